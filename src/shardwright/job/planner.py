"""How a plan is to be searched: the ``[planner]`` section of a job."""

# Defaults of this section are what a plan is made with when nobody says anything, so changing one
# changes plans of every job. Keys that came later are UNSET where a job has none and are not
# written then: a plan embeds its job.

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.model import KindName
from shardwright.core.sharding import ShardingType

if TYPE_CHECKING:
    from shardwright.job.job import Job

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

    Attributes:
        pipeline_type: ``"none"``, ``"train_base"``, ``"train_sparse_dist"``,
            ``"train_prefetch_sparse_dist"``
        count_ephemeral, is_inference: outputs count at the peak; forward only
        communication (``dtype``): dtypes of rows [on the
            wire](runtime.md#half-precision-on-the-wire), forward, and of their gradients, backward,
            such as ``["fp16", "bf16"]``; where tables are trained two of ``fp32``, ``fp16``,
            ``bf16``, without it ``fp32``
        cache_load_factor, prefetch_pipeline: of all cached tables that say nothing themselves
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

    Attributes:
        kind (by profile): ``none``, ``percentage``, ``absolute``, ``heuristic``, ``inference``,
            ``traced`` (a DLRM's default: its dense part is simulated)
        percentage, nbytes: a share from 0 to 1; bytes, or a text such as ``"48 MiB"``
        dense_bytes, multiplier: bytes of the dense parameters, and how often ``heuristic`` counts
            them
    """

    kind: ReservationKind | None = None
    percentage: Share = 0.15
    nbytes: Bytes = 0
    dense_bytes: Bytes = 0
    multiplier: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 6.0


def reservation_kind(job: Job) -> ReservationKind:
    """What the job asks for, or what its profile reserves where it says nothing."""
    given = job.planner.reservation.kind
    if given is not None:
        return given
    if job.model.traits.has_step:
        return "traced"
    return "heuristic" if job.planner.constants == "torchrec-1.9" else "none"


class ProposerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A proposer by name.

    Attributes:
        kind: ``"greedy"``, ``"uniform"``, ``"grid"``, ``"dynamic_programming"``, ``"scaleup"``
        use_depth: score by the largest shard instead of by the sum
        threshold (none): of ``"greedy"``: plans in a row that are not the best before it stops
        max_proposals: of ``"grid"``: combinations at most
        bins_per_device: of ``"dynamic_programming"``: bins for the memory of each rank
    """

    kind: Literal["greedy", "uniform", "grid", "dynamic_programming", "scaleup"]
    use_depth: bool = True
    threshold: Annotated[int, msgspec.Meta(ge=0, le=10**6)] | None = None
    max_proposals: Count = 10_000
    bins_per_device: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100


class PartitionerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a proposal's shards are given to ranks.

    Attributes:
        kind: ``"greedy"`` or ``"memory_balanced"``
        sort_by: of ``"greedy"``: which shards come first, the largest or the slowest
        balance_modules: of ``"greedy"``: tables of small modules go before
        max_search_count: of ``"memory_balanced"``: further tries at most, with less memory each
        tolerance: of ``"memory_balanced"``: share by which a try's busiest rank may take longer
    """

    kind: Literal["greedy", "memory_balanced"] = "greedy"
    sort_by: Literal["storage", "perf"] = "storage"
    balance_modules: bool = False
    max_search_count: Count = 10
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.02


class ConstraintsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tables that share one rank, tables that share none, and the ranks a table may use.

    Attributes:
        together, apart: groups of tables on one common rank, or without a common rank
        ranks: the ranks a table may use, such as ``{ C3 = [0, 1] }``
    """

    together: tuple[tuple[str, ...], ...] = ()
    apart: tuple[tuple[str, ...], ...] = ()
    ranks: dict[str, tuple[int, ...]] = {}


class DenseSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is forced of dense units; the planner chooses what is not given.

    Attributes:
        layers_per_unit (free): at most so many neighbouring layers share a unit; the units' sizes
            differ by one at most
        bucket_size (none): where parameters stay whole (``[memory] zero`` 1, 2 or ``"auto"``):
            units are buckets of so many elements, in the order in which gradients come; ``"auto"``:
            whatever is [fastest and fits](planner.md#dense-units), units of modules among it
        prefetch (free): 1: the next unit is gathered and the last one reduced while one computes;
            0: nothing overlaps
        reshard (free): ``reshard_after_forward`` of every sharded unit, as FSDP calls it
        checkpointing (``["none", "selective", "full"]``): policies of ``[memory] checkpointing``
            that the plan may choose from where that is not given; all blocks get the same
    """

    layers_per_unit: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    prefetch: Literal[0, 1] | None = None
    reshard: bool | None = None
    checkpointing: tuple[str, ...] | UnsetType = UNSET
    bucket_size: Annotated[int, msgspec.Meta(ge=1, le=2**40)] | Literal["auto"] | UnsetType = UNSET


class PlannerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How plans are priced and searched, and what is forced.

    Attributes:
        constants: what prices rest on: the cluster's own constants, ``"torchrec-1.9"``, or
            ``"additive"``
        search: ``"bounded"``, ``"proposers"`` (TorchRec's way), ``"exact"`` (HiGHS, needs the extra
            ``exact``)
        options: ``"torchrec"``: only what TorchRec's planner looks at
        time_limit (none): seconds, pricing included, after which the best plan so far is taken;
            Ctrl-C does the same at any time
        units (free): per unit, or for all layers of a series, ``"shard"``, ``"replicate"`` or
            ``"offload"`` (sharded, with shards, gradients and states in host memory), such as ``{
            top = "shard" }`` or ``{ layers = "shard" }``
        tables (free): of ``python``: by the path of an embedding, or of what has the weight in a
            collection, a sharding type, or ``"dense"``, such as ``{ users = "row_wise" }``
        dedup (free): whether a row that a rank asks for several times in a step [travels
            once](planner.md#rows-that-travel-once): for all routed tables that can, ``true``, for
            none, ``false``, or table by table where it costs less
        kinds (none): kinds that a plan may choose for tables that name none and have more than
            ``embeddings.above`` rows, in the order in which it would have them, such as ``["full",
            "qr"]``: as few tables as possible, the largest first, are of a later kind than the
            first with which anything fits
        proposers (TorchRec's four): of search ``"proposers"``: who proposes plans, one after
            another
        partitioner: of search ``"proposers"``: how the shards of a proposal are given to ranks
        dense: what is forced of dense units; free where not given
        reservation: memory that tables may not use
        estimator: what a step of tables alone keeps alive, and what rows travel in; a key that
            ``constants`` do not look at is refused, beside a model all but ``communication``
        constraints: tables that share one rank or none, and ranks that a table may use
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
