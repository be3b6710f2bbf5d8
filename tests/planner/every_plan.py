"""Every plan of a small job of tables, listed without the planner's options, spaces and searches.

What may be chosen is written down here once more, from the documentation: sharding types, kernels,
even cuts of columns, ranks, rules. Only the price of a shard is the planner's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from shardwright.core.batch import lookups
from shardwright.core.cluster import Cluster
from shardwright.core.model import TableSpec
from shardwright.core.option import Option, shard_runs
from shardwright.core.sharding import ShardingType
from shardwright.estimate.recordings import described
from shardwright.job.job import Job
from shardwright.planner.choice import Choice
from shardwright.planner.choices import price
from shardwright.planner.problem import Problem, make_problem

TYPES: tuple[ShardingType, ...] = get_args(ShardingType)
OF_SEQUENCES = ("data_parallel", "table_wise", "column_wise", "row_wise")
CUT_BY_COLUMNS = ("column_wise", "table_column_wise", "grid_shard")
MOST_WAYS = 2000  # of one table
MOST_TRIED = 300_000  # ways of a table beside what is chosen of others

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class TooManyError(Exception):
    """There are more plans than can be listed."""


@dataclass
class Ways:
    """Every way to place a table: [ways, ranks] seconds, [ways, ranks, 3] bytes, ranks in use."""

    seconds: Floats
    storage: Floats
    used: Bools
    whole: Bools

    def only(self, wanted: Bools) -> Ways:
        """Those that are ``wanted``."""
        return Ways(
            self.seconds[wanted], self.storage[wanted], self.used[wanted], self.whole[wanted]
        )


def fastest(job: Job) -> float:
    """Seconds of the fastest plan of ``job`` that fits, or infinity.

    :raises TooManyError: there are too many plans.
    """
    model = described(job)
    problem = make_problem(job, model)
    ways = [_ways(problem, table) for table in model.tables]
    number = {table.name: index for index, table in enumerate(model.tables)}
    rules = job.planner.constraints
    together = [{number[name] for name in group} for group in rules.together]
    for index in set().union(*together):
        ways[index] = ways[index].only(ways[index].whole)
    apart = [{number[name] for name in group} for group in rules.apart]
    return _Listing(problem, ways, together, apart).best()


def _ways(problem: Problem, table: TableSpec) -> Ways:
    cluster, ranks = problem.cluster, problem.cluster.world_size
    pinned = problem.job.planner.constraints.ranks.get(table.name, tuple(range(ranks)))
    planner = problem.job.planner
    uncut = planner.constants == "torchrec-1.9" or planner.options == "torchrec"
    options = list(
        _options(table, cluster, planner.constants, _replica(problem, table), uncut=uncut)
    )
    found = []
    for choice in price(problem.job, problem.context, [(table, option) for option in options]):
        for places in _places(choice.option, cluster):
            if set(places) <= set(pinned):
                found.append(_way(choice, places, ranks))
                if len(found) > MOST_WAYS:
                    raise TooManyError
    whole = [way[3] for way in found]
    return Ways(
        np.array([way[0] for way in found]).reshape(-1, ranks),
        np.array([way[1] for way in found]).reshape(-1, ranks, 3),
        np.array([way[2] for way in found]).reshape(-1, ranks),
        np.array(whole, bool),
    )


def _replica(problem: Problem, table: TableSpec) -> str:
    """Replicas exchange rows where they are above 1 MiB and the rows that all ranks look up, with
    their numbers, are half of them at most; TorchRec's have dense gradients."""
    rows = problem.cluster.world_size * lookups(table, problem.context.batch)
    replica = table.rows * table.dim * 4
    few = replica > 2**20 and 2 * rows * (8 + table.dim * 4) <= replica
    return "fused" if few and problem.job.planner.constants == "cluster" else "dense"


def _options(
    table: TableSpec, cluster: Cluster, profile: str, replica: str, *, uncut: bool
) -> Iterator[Option]:
    """Options of a table; one shard of all columns is a cut by columns in TorchRec alone."""
    for kind in table.sharding_types or TYPES:
        if profile == "additive" and kind not in ("table_wise", "column_wise"):
            continue
        if not table.pooled and kind not in OF_SEQUENCES:
            continue
        widths = [table.dim]
        if kind in CUT_BY_COLUMNS:
            least = table.min_partition or 4
            widths = widths if uncut else []
            widths += [w for w in range(4, table.dim, 4) if table.dim % w == 0 and w >= least]
        for width in widths:
            runs = shard_runs(table, kind, cluster.world_size, cluster.group, width)
            for kernel in _kernels(table, kind, cluster, profile, replica):
                yield Option(table.name, kind, kernel, runs)


def _kernels(
    table: TableSpec, kind: str, cluster: Cluster, profile: str, replica: str
) -> list[str]:
    named = table.compute_kernels
    known = ["fused"]
    if profile == "additive":
        return known
    if kind == "data_parallel":
        either = [k for k in (replica, "dense") if named is None or k in named]
        known = either[:1]
    elif cluster.compute_device == "cuda":
        known = ["fused", "fused_uvm", "fused_uvm_caching"]
        known += ["key_value"] if named and cluster.ssd_cap else []
    return [kernel for kernel in known if named is None or kernel in named]


def _places(option: Option, cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """The ranks of all shards, in every way that differs: shards of one shape cost the same."""
    ranks, group = range(cluster.world_size), cluster.group
    hosts = [range(start, start + group) for start in range(0, len(ranks), group)]
    match option.partition:
        case "uniform":
            yield tuple(ranks)
        case "device":
            yield from itertools.combinations_with_replacement(ranks, option.count)
        case "host" if option.sharding_type == "table_row_wise":
            yield from map(tuple, hosts)
        case "host":
            for host in hosts:
                yield from itertools.combinations_with_replacement(host, option.count)
        case "multi_host":
            for homes in itertools.combinations_with_replacement(hosts, option.count // group):
                yield tuple(rank for host in homes for rank in host)


def _way(choice: Choice, places: tuple[int, ...], ranks: int) -> tuple[Floats, Floats, Bools, bool]:
    seconds, storage = np.full(ranks, choice.everywhere), np.zeros((ranks, 3))
    used = np.zeros(ranks, bool)
    for rank, cost in zip(places, choice.shard_costs, strict=True):
        seconds[rank] += cost.total_seconds
        storage[rank] += cost.storage
        used[rank] = True
    return seconds, storage, used, choice.option.sharding_type == "table_wise"


class _Listing:
    """All combinations, the table with most ways first; those that cannot be faster than one that
    is known are passed over."""

    def __init__(
        self, problem: Problem, ways: list[Ways], together: list[set[int]], apart: list[set[int]]
    ) -> None:
        self.ranks = problem.cluster.world_size
        self.capacity = np.array(problem.capacity, float)
        self.ways, self.together, self.apart = ways, together, apart
        self.order = sorted(range(len(ways)), key=lambda index: -len(ways[index].seconds))
        self.least = [way.seconds.sum(axis=1).min(initial=np.inf) for way in ways]
        self.found = np.inf
        self.tried = 0

    def best(self) -> float:
        """Seconds of the fastest that fits."""
        self._go(0, np.zeros(self.ranks), np.zeros((self.ranks, 3)), {})
        return float(self.found)

    def _go(self, depth: int, load: Floats, storage: Floats, chosen: dict[int, Bools]) -> None:
        if depth == len(self.order):
            self.found = min(self.found, load.max())
            return
        index = self.order[depth]
        ways = self.ways[index]
        self.tried += len(ways.seconds)
        if self.tried > MOST_TRIED:
            raise TooManyError
        loads, filled = load + ways.seconds, storage + ways.storage
        allowed = (filled <= self.capacity).all(axis=(1, 2)) & self._obeys(index, chosen)
        rest = sum(self.least[other] for other in self.order[depth + 1 :])
        least = np.maximum(loads.max(axis=1), (loads.sum(axis=1) + rest) / self.ranks)
        for way in np.argsort(least, kind="stable"):
            if least[way] >= self.found:
                return
            if allowed[way]:
                more = chosen | {index: ways.used[way]}
                self._go(depth + 1, loads[way], filled[way], more)

    def _obeys(self, index: int, chosen: dict[int, Bools]) -> Bools:
        """Which ways keep the rules beside what is chosen."""
        used = self.ways[index].used
        allowed = np.ones(len(used), bool)
        for other, held in chosen.items():
            if any({index, other} <= group for group in self.apart):
                allowed &= ~(used & held).any(axis=1)
            if any({index, other} <= group for group in self.together):
                allowed &= (used == held).all(axis=1)
        return allowed
