"""A plan's tables as the planner places them, from the numbers that the plan itself holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec

from shardwright.core.model import TableSpec
from shardwright.core.option import Option
from shardwright.job.plan import Plan, TablePlan
from shardwright.planner.choice import Choice, cost
from shardwright.planner.tally import Placed, Tally, tally


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
        cost(dict(sorted(s.seconds.items())), hbm=s.hbm, ddr=s.ddr, ssd=s.ssd)  # summed in order
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
