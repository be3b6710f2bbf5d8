"""A plan: which block of which tensor lives on which rank, how it is reached, and what that costs.

The block list is the truth; sharding types and placements label it. A plan embeds everything its
numbers rest on (job, cluster, constants), so it can be explained and run anywhere.
"""

# A plan has to say everything by itself: a worker reads it and imports no planner, `explain`
# recomputes every number from it on another machine. So it embeds job, cluster, constants and
# recording, and a fingerprint over all of them: ranks compare it before anything collective,
# records and checkpoints name it, and a file that was edited by hand is refused. New fields are
# UNSET by default and not written then, or plans of before would have another fingerprint.

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.block import Block, BlockRun, check_tiling, decode
from shardwright.core.cluster import Cluster
from shardwright.core.document import Shown, read_document, write_document
from shardwright.core.errors import MismatchError, check_type, expected
from shardwright.core.footprint import Verdict, verdict_of
from shardwright.core.layout import ReplicaGrid
from shardwright.core.model import ModelSpec
from shardwright.core.option import ShardRun
from shardwright.core.placement import Placement, Replicate, Roles, TwoZeros, Zero
from shardwright.core.quantities import counted, format_seconds
from shardwright.core.recording import Recording
from shardwright.core.schedule import Modes
from shardwright.core.sharding import ShardingType, traits
from shardwright.core.timeline import EventRun, check_runs
from shardwright.job.job import Job, degrees_of, memory_of, overlap_of
from shardwright.job.model_of_job import early_tables, model_of, step_dtypes

T = TypeVar("T")

SCHEMA = "shardwright.plan/4"


# Runs, as options have them: a row-wise table on 2,048 ranks is two lines and not 2,048.
class ShardPlan(msgspec.Struct, frozen=True, array_like=True):
    """The shards of ``run``: the first on ``rank``, each next one on the rank after it.

    Each takes ``seconds`` per step, by part, and the bytes of each tier, by kind.
    """

    rank: int
    run: ShardRun
    seconds: dict[str, float]
    hbm: dict[str, int]
    ddr: dict[str, int]
    ssd: dict[str, int]

    @property
    def ranks(self) -> range:
        """The rank of each shard."""
        return range(self.rank, self.rank + self.run.count)

    @property
    def total_seconds(self) -> float:
        """Seconds per step of one of the shards."""
        return sum(self.seconds.values())

    @property
    def storage(self) -> tuple[int, int, int]:
        """Bytes of one of the shards in HBM, DDR and SSD."""
        return sum(self.hbm.values()), sum(self.ddr.values()), sum(self.ssd.values())


class TablePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen for a table; shards that are alike on ranks that follow are kept together.

    ``cache_load_factor`` is the share of its rows that is cached, where the table has a cache.
    With ``dedup`` a row that a rank asks for several times in a step travels once.
    """

    name: str
    fqn: str
    rows: int
    dim: int
    sharding_type: ShardingType
    compute_kernel: str
    optimizer: str
    shards: tuple[ShardPlan, ...]
    cache_load_factor: float | None = None
    dedup: bool | UnsetType = UNSET

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of every shard, in order."""
        return tuple(rank for shard in self.shards for rank in shard.ranks)

    @property
    def shard_sizes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of every shard."""
        return self._each([(shard.run.rows, shard.run.columns) for shard in self.shards])

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds per step of every shard."""
        return self._each([shard.total_seconds for shard in self.shards])

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of every shard in all tiers together."""
        return self._each([sum(shard.storage) for shard in self.shards])

    def _each(self, values: list[T]) -> tuple[T, ...]:
        pairs = zip(self.shards, values, strict=True)
        return tuple(value for shard, value in pairs for _ in range(shard.run.count))


class UnitPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen for a dense unit: its modules, a placement for each role, and whether full
    weights go after forward.

    ``modules`` are paths in the order of a step, of layers that share the unit's buffer, and
    ``members`` the units of the recording that it is made of. A step
    makes ``collectives`` calls for the unit; ``bytes_per_step`` are the full buffers of all of
    them. ``bytes_per_rank`` and ``padding_bytes`` are those of its parameters. The modules of it
    that are ``checkpointed`` run under the policy ``checkpointing``. Shards, gradients and states
    of a unit that is ``offloaded`` are in host memory.
    """

    name: str
    modules: tuple[str, ...]
    members: tuple[str, ...]
    tensors: tuple[str, ...]
    parameter: Placement
    gradient: Placement
    optimizer_state: Placement
    optimizer: str
    reshard_after_forward: bool
    seconds: float
    bytes_per_rank: int
    padding_bytes: int
    collectives: int
    bytes_per_step: int
    checkpointing: str = "none"
    checkpointed: tuple[str, ...] = ()
    offloaded: bool | UnsetType = UNSET

    @property
    def roles(self) -> Roles:
        """The placements of all three."""
        return Roles(self.parameter, self.gradient, self.optimizer_state)


class RankTotals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's predicted bytes by kind at the peak, where the peak is, and seconds per step.

    ``parts`` are the seconds by part; ``hbm_bytes`` and so on are what it fills of each tier.
    """

    rank: int
    peak_bytes: int
    peak_phase: str
    at_peak: dict[str, int]
    exact: dict[str, int]
    seconds: float
    parts: dict[str, float]
    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int = 0


class Reserved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What tables may fill of each rank's tiers, and what was set aside: ``kind`` names the rule.

    ``dense`` and ``inputs`` are bytes of HBM and DDR that the rule counts for the dense part and
    the inputs of a step.
    """

    kind: str
    hbm_left: int
    ddr_left: int
    ssd_left: int
    dense: tuple[int, int] = (0, 0)
    inputs: tuple[int, int] = (0, 0)


class Tried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best plan that was found with a checkpointing policy, and a stage of ZeRO, several
    ``replicas`` and buckets of ``bucket_size`` elements where that was left open: the seconds of
    its slowest rank and the bytes of its fullest. ``max_rank_seconds`` is None where none fits; the
    bytes are then the least that were found."""

    checkpointing: str
    max_rank_seconds: float | None
    peak_bytes: int
    zero: Zero | TwoZeros | UnsetType = UNSET
    replicas: int | UnsetType = UNSET
    bucket_size: int | UnsetType = UNSET


class Attempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a proposer did: new proposals, plans among them, and proposals made before.

    ``stopped`` says why it made none or no more of them; empty if it went to its end.
    """

    name: str
    proposals: int
    plans: int
    repeats: int
    stopped: str


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the plan was found.

    ``options`` were looked at, ``slow_kernels`` says whether all kernels with weights in host
    memory were among them, or only those that no faster one replaces. ``proved_seconds`` is a bound
    that the search itself has proved. ``skipped`` says what was not tried, and why. ``tried`` are
    checkpointing policies, where there was a choice and memory made one, ``attempts`` what each
    proposer did, where there are several.
    """

    name: str
    proposals: int
    feasible: int
    wall_seconds: float
    options: int = 0
    slow_kernels: bool = False
    proved_seconds: float = 0.0
    skipped: tuple[str, ...] = ()
    tried: tuple[Tried, ...] | UnsetType = UNSET
    attempts: tuple[Attempt, ...] | UnsetType = UNSET


class Plan(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything ``apply`` needs, and everything ``explain`` recomputes.

    ``recording`` is that of the model's step, none of tables alone. ``prefetch`` is how many units
    are gathered ahead of the one that computes. ``needs`` are the least and the most bytes that the
    rank which asks most needs of its accelerator, allocator and context counted.
    """

    schema: Literal["shardwright.plan/4"]
    version: str
    job: Job
    recording: Recording | None
    cluster: Cluster
    tables: tuple[TablePlan, ...]
    units: tuple[UnitPlan, ...]
    prefetch: Literal[0, 1]
    blocks: tuple[BlockRun, ...]
    timeline: tuple[EventRun, ...]
    ranks: tuple[RankTotals, ...]
    max_rank_seconds: float
    lower_bound_seconds: float
    gap: float
    reserved: Reserved
    assumptions: tuple[str, ...]
    search: Search
    fingerprint: str = ""
    needs: tuple[int, int] | UnsetType = UNSET

    def __repr__(self) -> str:
        parts = [
            counted(len(them), name)
            for name, them in (("table", self.tables), ("unit", self.units))
            if them
        ]
        return (
            f"<Plan of {' and '.join(parts)} on {counted(self.world_size, 'rank')}: "
            f"{format_seconds(self.max_rank_seconds)} per step, gap {self.gap * 100:.1f} %, "
            f"{self.verdict}, fingerprint {self.fingerprint[:12]}>"
        )

    @property
    def budget(self) -> int:
        """Bytes that a rank may fill of the memory that weights live in."""
        on_cpu = self.cluster.compute_device == "cpu"
        # On a CPU weights live in host memory and there is no HBM, so that is the tier that
        # decides.
        return self.reserved.ddr_left if on_cpu else self.reserved.hbm_left

    @property
    def needed(self) -> tuple[int, int]:
        """The least and the most bytes that the rank which asks most needs of that memory."""
        on_cpu = self.cluster.compute_device == "cpu"
        live = max(t.ddr_bytes if on_cpu else t.hbm_bytes for t in self.ranks)
        return (live, live) if self.needs is UNSET else self.needs

    @property
    def verdict(self) -> Verdict:
        """Whether every rank fits, as `memory` and `fit` say it of the same job."""
        return verdict_of(*self.needed, self.budget)

    @property
    def world_size(self) -> int:
        """Ranks the plan is for."""
        return self.cluster.world_size

    @property
    def model(self) -> ModelSpec:
        """What was planned: the job's tables and the recorded step."""
        return model_of(self.job, self.recording)

    @property
    def modes(self) -> Modes:
        """What the plan decides about the order of a step."""
        model = self.model  # which is put together anew each time
        step, cast = model.step, self._cast(model)
        paths = [(step.tables_of(t.fqn), traits(t.sharding_type).replicated) for t in self.tables]
        whole = {u.name for u in self.units if isinstance(u.parameter, Replicate)}
        replicated = {u.name for u in self.units if isinstance(u.optimizer_state, Replicate)}
        # Whole parameters with cut states: ZeRO-1 and 2. After an update every rank has only its
        # share, so they are gathered once a step although they stay.
        staying = whole - replicated
        frozen = {name for unit in model.units for name in unit.frozen}
        # Nothing updates a unit that is frozen as a whole, so nothing ever has to be gathered
        # again.
        still = {u.name for u in self.units if u.name in staying and frozen.issuperset(u.tensors)}
        routed = frozenset(path for path, is_replica in paths if not is_replica)
        overlap = overlap_of(self.job, self.world_size)
        early = early_tables(self.job, model) if overlap != "none" else ()
        return Modes(
            # Replicas that compute in another dtype count as sharded: they are copied into a buffer
            # of that dtype before they are used, which the flow has to order like a gather.
            sharded_units=frozenset(u.name for u in self.units) - (replicated - cast) - still,
            resharded_units=frozenset(u.name for u in self.units if u.reshard_after_forward),
            routed=routed,
            replicated_tables=frozenset(path for path, is_replica in paths if is_replica),
            early=routed.intersection(early),
            asked=routed.intersection(early if overlap == "ids_and_rows" else ()),
            prefetch=self.prefetch,
            merged=tuple((u.name, u.members) for u in self.units if u.members != (u.name,)),
            staying_units=frozenset(staying),
        )

    @property
    def grid(self) -> ReplicaGrid:
        """The ranks as units that are not replicated lie on them."""
        degrees, twice = degrees_of(self.job, self.world_size), memory_of(self.job).twice
        return ReplicaGrid(degrees.data_replicate, degrees.data_shard, twice)

    def _cast(self, model: ModelSpec) -> set[str]:
        """Units with tensors that compute in another dtype than they are kept in."""
        dtype = step_dtypes(self.job)[0]
        if not dtype or self.recording is None:
            return set()
        cast = {t.fqn for u in model.units for t in u.tensors if t.dtype != dtype}
        return {u.name for u in self.units if not cast.isdisjoint(u.tensors)}

    def expanded(self) -> list[Block]:
        """The block list without run-length encoding."""
        return list(decode(self.blocks))


def fingerprint(plan: Plan) -> str:
    """sha256 of what must be equal on every rank: all but how long the search took."""
    # Two plans that say the same must be equal.
    bare = msgspec.structs.replace(
        plan, fingerprint="", search=msgspec.structs.replace(plan.search, wall_seconds=0.0)
    )
    # Of the canonical form and not of the file: indentation, or order of keys, may change on the
    # way.
    return hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()


def sealed(plan: Plan) -> Plan:
    """The plan with its fingerprint."""
    return msgspec.structs.replace(plan, fingerprint=fingerprint(plan))


def write_plan(plan: Plan, path: Path | str) -> None:
    """Write ``plan`` as JSON."""
    check_type(plan, Plan, "plan", "plan and plan_module make one.")
    write_document(plan, path)


def read_plan(path: Path | str, *, check: bool = False) -> Plan:
    """Read a plan and check its fingerprint; with ``check`` also that its blocks tile its model."""
    plan = read_document(path, Plan, SCHEMA, made_by="shardwright plan JOB.toml -o plan.json")
    # Before anything is read off it: a plan that was edited would be run and explained by numbers
    # that nobody has worked out.
    if plan.fingerprint != fingerprint(plan):
        raise MismatchError(
            expected(
                str(path),
                f"content of fingerprint {plan.fingerprint[:12]}",
                f"{fingerprint(plan)[:12]}",
                "The file was edited after planning; make the plan again from the job.",
            )
        )
    check_runs(plan.timeline, plan.world_size, str(path))
    if check:
        check_tiling(plan.expanded(), plan.model.tensors, plan.world_size)
    return plan
