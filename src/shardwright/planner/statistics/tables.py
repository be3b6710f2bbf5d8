"""A plan table by table and kernel by kernel, and what one step moves through a shard: from the
numbers that the plan itself holds (``Holdings``)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec

from shardwright.core.amount import Lift, bare, named, sum_of, summed, times, total
from shardwright.core.batch import distinct_rows, lookups, outputs
from shardwright.core.cluster import TIERS
from shardwright.core.model import TableSpec
from shardwright.core.option import Option, ShardRun
from shardwright.core.tensor import ELEMENT_BYTES
from shardwright.cost import embedding
from shardwright.cost.embedding import CACHED_KERNELS, Demand
from shardwright.job.plan import Plan, TablePlan
from shardwright.planner import profiles
from shardwright.planner.choice import Choice, Cost, Placed, Tally, tally
from shardwright.planner.choice import cost as cost_of
from shardwright.planner.problem import batch_of
from shardwright.planner.statistics.records import (
    KernelStatistics,
    Measure,
    TableStatistics,
    unit_of,
)


@dataclass(frozen=True)
class Holdings:
    """The tables of ``plan`` with what each shard costs its rank."""

    plan: Plan

    @cached_property
    def specs(self) -> tuple[TableSpec, ...]:
        """The tables as the job describes them."""
        return self.plan.model.tables

    @cached_property
    def tables(self) -> tuple[Placed, ...]:
        """Every table's shards, their costs and their ranks, in the plan's order."""
        pairs = zip(self.plan.tables, self.specs, strict=True)
        return tuple(_placed(table, as_planned(spec, table)) for table, spec in pairs)

    @cached_property
    def tally(self) -> Tally:
        """What they add up to on every rank."""
        return tally(self.tables, self.plan.world_size)


def as_planned(table: TableSpec, chosen: TablePlan) -> TableSpec:
    """The table as the search left it: a search may choose how much of it is cached."""
    if table.cache is None:
        return table
    cache = msgspec.structs.replace(table.cache, load_factor=chosen.cache_load_factor)
    return msgspec.structs.replace(table, cache=cache)


def _placed(table: TablePlan, spec: TableSpec) -> Placed:
    runs = tuple(shard.run for shard in table.shards)
    option = Option(table.name, table.sharding_type, table.compute_kernel, runs)
    costs = tuple(
        cost_of(dict(sorted(s.seconds.items())), hbm=s.hbm, ddr=s.ddr, ssd=s.ssd)  # summed in order
        for s in table.shards
    )
    return Placed(Choice(spec, option, costs, dedup=table.dedup is True), ranks_of(table))


def ranks_of(table: TablePlan) -> Sequence[int]:
    """The rank of every shard; a ``range`` where they follow one another."""
    shards = table.shards
    follow = all(a.rank + a.run.count == b.rank for a, b in pairwise(shards))
    if shards and follow:
        return range(shards[0].rank, shards[-1].rank + shards[-1].run.count)
    return table.ranks


STORED: tuple[Measure, ...] = ("hbm_bytes", "ddr_bytes", "ssd_bytes")


def table_statistics(plan: Plan, held: Holdings) -> tuple[TableStatistics, ...]:
    """Every table, in the plan's order."""
    rows = zip(plan.tables, held.specs, held.tables, strict=True)
    return tuple(_table(plan, *row) for row in rows)


def _table(plan: Plan, chosen: TablePlan, spec: TableSpec, placed: Placed) -> TableStatistics:
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
        over_shards(choice, "seconds"),
        parts,
        over_shards(choice, "hbm_bytes"),
        over_shards(choice, "ddr_bytes"),
        over_shards(choice, "ssd_bytes"),
        load_factor=None if share is None else share[0],
        pooling_factor=sum(spec.pooling_factors),
        num_poolings=sum(spec.poolings),
        ids=lookups(spec, batch_of(plan.job)),
        pooled=spec.pooled,
        weighted=weighted(plan, spec),
        features=len(spec.pooling_factors),
        rows=spec.rows,
        dim=spec.dim,
        columns=min(shard.run.columns for shard in chosen.shards),
        ranks=tuple(placed.ranks),
        batch_sizes=spec.batch_sizes,
    )


def measure_of(cost: Cost, of: Measure) -> float:
    """A shard's seconds, or its bytes in one memory."""
    found: float = cost.total_seconds if of == "seconds" else getattr(cost, of)
    return found


def over_shards(choice: Choice, of: Measure, lift: Lift = bare) -> Any:
    """What all shards of a table take together; plain seconds are added without rounding."""
    unit, source = unit_of(of), f"one shard; --tensor {choice.table.name}"
    terms = []
    for number, (run, cost) in enumerate(zip(choice.option.runs, choice.costs, strict=True)):
        label = f"{of}[{run.rows} x {run.columns}, {number}]"
        terms.append(times(lift(measure_of(cost, of), label, unit, source), run.count))
    return summed(of, terms, unit, math.fsum if of == "seconds" else total)


def on_rank(placed: Placed, rank: int, of: Measure, lift: Lift = bare) -> Any:
    """What a table's shards on one rank take of it."""
    unit, source = unit_of(of), f"a shard on this rank; --tensor {placed.choice.table.name}"
    terms = [
        lift(measure_of(cost, of), f"{of}[{run.rows} x {run.columns}, {number}]", unit, source)
        for number, run, cost in placed.on_rank(rank)
    ]
    return summed(f"{of}_of_table", terms, unit)


def weighted(plan: Plan, spec: TableSpec) -> bool:
    """Whether ids carry weights; TorchRec takes a pooled table's word from its module alone."""
    if plan.job.planner.constants == "torchrec-1.9" and spec.pooled:
        return spec.module_weighted
    return spec.weighted


def load_factor(plan: Plan, chosen: TablePlan, spec: TableSpec) -> tuple[float, str] | None:
    """The cached share of a table's rows and who says so; None for a kernel without a cache.

    ``spec`` is the table as the job has it.
    """
    if chosen.compute_kernel not in CACHED_KERNELS:
        return None
    shared = plan.job.planner.estimator.cache_load_factor
    name = "cache_load_factor"
    own, origin = chosen.cache_load_factor, f"tables.{spec.name}.cache.load_factor"
    if spec.cache is not None and own != spec.cache.load_factor:
        origin = "the search"
    if plan.job.planner.constants == "torchrec-1.9" and chosen.compute_kernel == "key_value":
        own, name = None, "kv_cache_load_factor"
    if own is not None:
        return own, origin
    if shared is not None:
        return shared, "planner.estimator.cache_load_factor"
    return plan.cluster.constants[name].value, f"constant {name}"


def kernel_statistics(held: Holdings) -> tuple[KernelStatistics, ...]:
    """Every compute kernel that is used, the one of most tables first."""
    groups: dict[str, list[Placed]] = {}
    for placed in held.tables:
        groups.setdefault(placed.choice.option.compute_kernel, []).append(placed)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return tuple(kernel_of(kernel, tables) for kernel, tables in ordered)


def kernel_of(kernel: str, tables: list[Placed], lift: Lift = bare) -> KernelStatistics:
    """The tables of one kernel."""

    def over_tables(name: str, of: Callable[[Choice], int]) -> Any:
        sizes = ((placed.choice.table.name, of(placed.choice)) for placed in tables)
        values = {table: nbytes for table, nbytes in sizes if nbytes}
        return sum_of(name, values, "B", "all shards of that table", lift)

    weights = over_tables("weight_bytes", lambda choice: _bytes_of(choice, "weight"))
    states = over_tables("optimizer_bytes", lambda choice: _bytes_of(choice, "optimizer_state"))
    tiers = [over_tables(of, functools.partial(over_shards, of=of)) for of in STORED]
    whole = summed("all_bytes", tiers, "B")
    rest = named("other_bytes", whole - weights - states, "B")
    limited = sum(placed.choice.table.compute_kernels is not None for placed in tables)
    return KernelStatistics(kernel, len(tables), limited, weights, states, rest, *tiers)


def _bytes_of(choice: Choice, kind: str) -> int:
    """Bytes of one kind in all shards of a table."""
    return sum(
        run.count * cost.kinds(tier).get(kind, 0)
        for run, cost in zip(choice.option.runs, choice.costs, strict=True)
        for tier in TIERS
    )


def traffic(plan: Plan, placed: Placed, run: ShardRun, lift: Lift = bare) -> tuple[Any, Any]:
    """Bytes that one step moves through a shard: of the ids that reach it, of the rows out of it.

    They are those of the plan's cost formulas. Memory may hold more than one step's inputs and none
    of its outputs.
    """
    table, kind = placed.choice.table, placed.choice.option.sharding_type
    batch, where = batch_of(plan.job), f"tables.{table.name}"
    ids = lift(lookups(table, batch), "ids_of_one_rank", "ids", f"{where} x batch.size")
    bags = lift(outputs(table, batch), "bags_of_one_rank", "rows", f"{where} x batch.size")
    as_torchrec = plan.job.planner.constants == "torchrec-1.9"
    communication = plan.job.planner.estimator.communication
    dtype, source = table.dtype, f"{where}.dtype"
    if communication is not None and not as_torchrec:
        dtype, source = communication[0], "planner.estimator.communication"
    size = lift(ELEMENT_BYTES[dtype], "element_bytes", "B", f"{source} {dtype}")
    rows = lift(run.rows, "rows_of_shard", "rows", "the shard's")
    columns = lift(run.columns, "columns_of_shard", "columns", "the shard's")
    if placed.choice.dedup:
        ids = bags = lift(
            distinct_rows(table, batch),
            "different_rows_of_one_rank",
            "rows",
            f"{where}: expected of its ids",
        )
    demand = Demand(ids, bags, rows, columns, 0, 0, 0, 0)
    if as_torchrec:
        return profiles.torchrec.exchange_bytes(
            plan.cluster, table.pooled, kind, demand, size, lift
        )
    world = lift(plan.world_size, "ranks", "", "cluster.world_size")
    local = None
    if plan.cluster.linked is not None:
        local = lift(plan.cluster.linked, "ranks_of_host", "", "cluster.local_world_size")
    once = lift(1, "batches_in_flight", "batches", "of one step")
    found = embedding.exchange_bytes(demand, kind, size, once, world, local)
    return found["input"], found["output"]
