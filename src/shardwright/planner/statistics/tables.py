"""A plan table by table, and kernel by kernel."""

from __future__ import annotations

from shardwright.core.batch import Batch, lookups
from shardwright.core.cluster import TIERS
from shardwright.core.model import TableSpec
from shardwright.core.plan import Plan, TablePlan
from shardwright.core.statistics import KernelStatistics, TableStatistics
from shardwright.cost.embedding import CACHED_KERNELS
from shardwright.planner.statistics.holdings import Holdings
from shardwright.planner.tally import Placed


def table_statistics(plan: Plan, held: Holdings) -> tuple[TableStatistics, ...]:
    """Every table, in the plan's order."""
    batch = Batch(plan.job.batch.size, plan.job.batch.sequence)
    rows = zip(plan.tables, held.specs, held.tables, strict=True)
    return tuple(_table(plan, batch, *row) for row in rows)


def _table(
    plan: Plan, batch: Batch, chosen: TablePlan, spec: TableSpec, placed: Placed
) -> TableStatistics:
    choice = placed.choice
    parts: dict[str, float] = {}
    for shard in chosen.shards:
        for part, seconds in shard.seconds.items():
            parts[part] = parts.get(part, 0.0) + shard.run.count * seconds
    share = load_factor(plan, chosen, spec)
    return TableStatistics(
        chosen.name,
        chosen.fqn,
        chosen.sharding_type,
        chosen.compute_kernel,
        choice.total_seconds,
        parts,
        *choice.total_storage,
        load_factor=None if share is None else share[0],
        pooling_factor=sum(spec.pooling_factors),
        num_poolings=sum(spec.poolings),
        ids=lookups(spec, batch),
        pooled=spec.pooled,
        weighted=weighted(plan, spec),
        features=len(spec.pooling_factors),
        rows=spec.rows,
        dim=spec.dim,
        columns=min(shard.run.columns for shard in chosen.shards),
        ranks=tuple(placed.ranks),
        batch_sizes=spec.batch_sizes,
    )


def weighted(plan: Plan, spec: TableSpec) -> bool:
    """Whether ids carry weights; TorchRec takes a pooled table's word from its module alone."""
    if plan.job.planner.constants == "torchrec-1.9" and spec.pooled:
        return spec.module_weighted
    return spec.constraint_weighted or (spec.module_weighted and spec.pooled)


def load_factor(plan: Plan, chosen: TablePlan, spec: TableSpec) -> tuple[float, str] | None:
    """The cached share of a table's rows and who says so; None for a kernel without a cache.

    ``spec`` is the table as the job has it.
    """
    if chosen.compute_kernel not in CACHED_KERNELS:
        return None
    shared = plan.job.planner.estimator.cache_load_factor
    names = ("cache_load_factor",)
    own, origin = chosen.cache_load_factor, f"tables.{spec.name}.cache.load_factor"
    if spec.cache is not None and own != spec.cache.load_factor:
        origin = "the search"
    if plan.job.planner.constants == "torchrec-1.9" and chosen.compute_kernel == "key_value":
        own, names = None, ("kv_cache_load_factor",)
    if own is not None:
        return own, origin
    if shared is not None:
        return shared, "planner.estimator.cache_load_factor"
    return plan.cluster.constants[names[0]].value, f"constant {names[0]}"


def kernel_statistics(plan: Plan, held: Holdings) -> tuple[KernelStatistics, ...]:
    """Every compute kernel that is used, the one of most tables first."""
    groups: dict[str, list[Placed]] = {}
    for placed in held.tables:
        groups.setdefault(placed.choice.option.compute_kernel, []).append(placed)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return tuple(_kernel(kernel, tables) for kernel, tables in ordered)


def _kernel(kernel: str, tables: list[Placed]) -> KernelStatistics:
    kinds: dict[str, int] = {}
    tiers = [0] * len(TIERS)
    for placed in tables:
        choice = placed.choice
        for run, cost in zip(choice.option.runs, choice.costs, strict=True):
            for index, tier in enumerate(TIERS):
                for kind, nbytes in cost.kinds(tier).items():
                    kinds[kind] = kinds.get(kind, 0) + run.count * nbytes
                    tiers[index] += run.count * nbytes
    weights, states = kinds.pop("weight", 0), kinds.pop("optimizer_state", 0)
    named = sum(placed.choice.table.compute_kernels is not None for placed in tables)
    return KernelStatistics(
        kernel, len(tables), named, weights, states, sum(kinds.values()), *tiers
    )
