"""How a plan is to be searched: the ``[planner]`` section of a job."""

# Defaults of this section are what a plan is made with when nobody says anything, so changing one
# changes plans of every job. Keys that came later are UNSET where a job has none and are not
# written then: a plan embeds its job.

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.model import KindName
from shardwright.core.sharding import ShardingType

Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10**6)]

Profile = Literal["cluster", "torchrec-1.9", "additive"]
ReservationKind = Literal["none", "percentage", "absolute", "heuristic", "inference", "traced"]
PipelineType = Literal["none", "train_base", "train_sparse_dist", "train_prefetch_sparse_dist"]
CommunicationDtype = Literal["fp32", "fp16", "bf16", "fp8", "int8"]
Communication = tuple[CommunicationDtype, CommunicationDtype]  # forward and backward
IN_FULL: Communication = ("fp32", "fp32")
# int8 and fp8 are priced, as TorchRec prices them, but no exchange of ours sends them.
TRAINED_COMMUNICATION = ("fp32", "fp16", "bf16")


class EstimatorSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step keeps alive: the input pipeline, and whether outputs count at the peak.

    ``communication`` are the dtypes of embedding rows on the wire, forward and backward.
    """

    pipeline_type: PipelineType = "none"
    count_ephemeral: bool = False
    is_inference: bool = False
    communication: Communication | None = None
    cache_load_factor: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    prefetch_pipeline: bool | None = None


def trained_communication(section: EstimatorSection) -> Communication:
    """Dtypes in which a run's rows and their gradients travel; UnsupportedError for others."""
    dtypes = section.communication or IN_FULL
    for dtype in dtypes:
        if dtype not in TRAINED_COMMUNICATION:
            wanted = f"two of {', '.join(TRAINED_COMMUNICATION)} where tables are trained"
            raise UnsupportedError(expected("planner.estimator.communication", wanted, dtype))
    return dtypes


class ReservationSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory that tables may not use, per rank.

    ``percentage`` is a share from 0 to 1, ``nbytes`` an absolute amount; ``dense_bytes`` are the
    bytes of the dense parameters and ``multiplier`` how often a heuristic counts them.
    """

    kind: ReservationKind | None = None
    percentage: Share = 0.15
    nbytes: Bytes = 0
    dense_bytes: Bytes = 0
    multiplier: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 6.0


class ProposerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A proposer by name. ``use_depth`` scores by the largest shard instead of by the sum."""

    kind: Literal["greedy", "uniform", "grid", "dynamic_programming", "scaleup"]
    use_depth: bool = True
    threshold: Annotated[int, msgspec.Meta(ge=0, le=10**6)] | None = None
    max_proposals: Count = 10_000
    bins_per_device: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100


class PartitionerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a proposal's shards are given to ranks."""

    kind: Literal["greedy", "memory_balanced"] = "greedy"
    sort_by: Literal["storage", "perf"] = "storage"
    balance_modules: bool = False
    max_search_count: Count = 10
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.02


class ConstraintsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tables that share one rank, tables that share none, and the ranks a table may use."""

    together: tuple[tuple[str, ...], ...] = ()
    apart: tuple[tuple[str, ...], ...] = ()
    ranks: dict[str, tuple[int, ...]] = {}


class DenseSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is forced of dense units; the planner chooses what is not given.

    ``layers_per_unit`` layers that follow one another share a unit, at most and evenly;
    ``prefetch`` 1 gathers the next unit while one computes; ``reshard`` says whether sharded units
    let full weights go after forward; ``checkpointing`` names the policies that may be chosen.
    ``bucket_size`` makes units of so many elements as gradients come, where parameters stay whole;
    "auto" where that is faster.
    """

    layers_per_unit: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    prefetch: Literal[0, 1] | None = None
    reshard: bool | None = None
    checkpointing: tuple[str, ...] | UnsetType = UNSET
    bucket_size: Annotated[int, msgspec.Meta(ge=1, le=2**40)] | Literal["auto"] | UnsetType = UNSET


class PlannerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How plans are priced and searched, and what is forced.

    ``units`` maps the name of a unit, or of a series of layers, to ``shard``, ``replicate`` or
    ``offload``: it is sharded, with its shards, gradients and states in host memory,
    ``tables`` the path of an embedding in a module of the user's own to a sharding type, or to
    ``dense``: it stays in a unit.
    ``kinds`` are those that a plan may choose for tables that name none, in the order in which it
    would have them. ``dedup`` says whether a row that a rank asks for several times travels once;
    where nothing is said, tables for which that costs less do so.
    ``options`` "torchrec" looks at what TorchRec's planner looks at, one column split per table;
    "wide" at more.
    """

    constants: Profile = "cluster"
    search: Literal["bounded", "proposers", "exact"] = "bounded"
    options: Literal["wide", "torchrec"] = "wide"
    time_limit: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    estimator: EstimatorSection = EstimatorSection()
    reservation: ReservationSection = ReservationSection()
    proposers: tuple[ProposerSection, ...] = ()
    partitioner: PartitionerSection = PartitionerSection()
    constraints: ConstraintsSection = ConstraintsSection()
    units: dict[str, Literal["shard", "replicate", "offload"]] = {}
    dense: DenseSection = DenseSection()
    tables: dict[str, Literal[ShardingType, "dense"]] | UnsetType = UNSET
    kinds: tuple[KindName, ...] | UnsetType = UNSET
    dedup: bool | UnsetType = UNSET

    @property
    def as_torchrec(self) -> bool:
        """Whether only what TorchRec's planner looks at may be chosen."""
        return self.options == "torchrec" or self.search == "proposers"
