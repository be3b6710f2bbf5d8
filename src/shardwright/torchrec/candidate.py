"""What proposers choose among: choices made ready to be placed many times, so that what each shard
puts on a rank is added up once.

Times are milliseconds and are added in TorchRec's order and grouping, so that candidates and ranks
tie exactly where they tie there.
"""

# Proposers score and partitioners rate the same shards thousands of times, so a choice is folded
# once: runs of like shards, five parts of a shard's milliseconds and their total, each rounded as
# TorchRec rounds it. A candidate has a number, and a proposal is the set of its numbers: two
# proposers that come to the same one are answered once.

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from operator import add
from typing import NamedTuple

import numpy as np

from shardwright.core.model import TableSpec
from shardwright.core.option import Option
from shardwright.core.sharding import Partition
from shardwright.planner.choice import Choice, Cost
from shardwright.planner.search.watch import Watch

MS_PER_SECOND = 1000.0
MANY = 64  # additions from which an array is faster
PARTS = ("fwd_compute", "bwd_compute", "fwd_comms", "bwd_comms")  # as TorchRec adds them

Bytes = tuple[int, int, int]  # HBM, DDR, SSD
Parts = tuple[float, float, float, float, float]  # milliseconds: PARTS, then all others
Price = Callable[[Sequence[tuple[TableSpec, Option]]], Sequence[Choice]]
Key = tuple[object, ...]


class Load(NamedTuple):
    """What one shard puts on its rank: bytes by tier, and milliseconds of a step."""

    hbm: int
    ddr: int
    ssd: int
    parts: Parts
    total: float

    @property
    def storage(self) -> Bytes:
        """Bytes of HBM, DDR and SSD."""
        return self.hbm, self.ddr, self.ssd


NO_PARTS: Parts = (0.0, 0.0, 0.0, 0.0, 0.0)


def add_parts(a: Parts, b: Parts) -> Parts:
    """The sum, part by part."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4]


def total_of(parts: Parts) -> float:
    """All parts together."""
    return parts[0] + parts[1] + parts[2] + parts[3] + parts[4]


# Python 3.12 adds floats in `sum` with compensation and 3.11 does not: the same proposal would be
# rated differently by the two, and by TorchRec, which adds one by one.
def in_turn(times: Iterable[float]) -> float:
    """The sum of ``times``, rounded after each of them; ``sum`` may round only once."""
    return reduce(add, times, 0.0)


def add_often(start: float, value: float, count: int) -> float:
    """``start`` and ``count`` times ``value``, rounded after each addition."""
    if count < MANY:
        return in_turn([start, *[value] * count])
    # cumsum rounds after every addition as a loop does; np.sum adds in pairs and would round
    # otherwise.
    terms = np.full(count + 1, value)
    terms[0] = start
    return float(np.cumsum(terms)[-1])


def load(cost: Cost) -> Load:
    """A cost as a load."""
    seconds = cost.seconds
    # Back to milliseconds, in which TorchRec compares: a sum of seconds ties elsewhere.
    a, b, c, d = [seconds.get(part, 0.0) * MS_PER_SECOND for part in PARTS]
    rest = in_turn(spent for part, spent in seconds.items() if part not in PARTS)
    parts = a, b, c, d, rest * MS_PER_SECOND
    return Load(cost.hbm_bytes, cost.ddr_bytes, cost.ssd_bytes, parts, total_of(parts))


@dataclass(frozen=True, eq=False)
class Candidate:
    """A choice for a table. Candidates with the same ``number`` are the same.

    ``runs`` are neighbouring shards of one load: how many, and what each puts on its rank.
    """

    number: int
    choice: Choice
    module: str
    runs: tuple[tuple[int, Load], ...]

    @property
    def table(self) -> str:
        """The table's name."""
        return self.choice.table.name

    @cached_property
    def partition(self) -> Partition:
        """Which ranks the shards may go to."""
        return self.choice.option.partition

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """Every shard's load, one by one."""
        return tuple(load for count, load in self.runs for _ in range(count))

    @cached_property
    def same_times(self) -> bool:
        """Whether all shards take the same time in every part."""
        return all(a[1].parts == b[1].parts for a, b in pairwise(self.runs))

    @cached_property
    def storage(self) -> Bytes:
        """Bytes of all shards by tier."""
        hbm = sum(count * load.hbm for count, load in self.runs)
        ddr = sum(count * load.ddr for count, load in self.runs)
        return hbm, ddr, sum(count * load.ssd for count, load in self.runs)

    @cached_property
    def sum_ms(self) -> float:
        """Milliseconds of all shards, added one after the other."""
        found = 0.0
        for count, load in self.runs:
            found = add_often(found, load.total, count)
        return found

    @cached_property
    def max_ms(self) -> float:
        """Milliseconds of the slowest shard."""
        return max(load.total for _, load in self.runs)

    @cached_property
    def size_key(self) -> tuple[int, int, int, int]:
        """Largest shard and sum of HBM, then of DDR: what a greedy walk takes for size."""
        hbm = max(load.hbm for _, load in self.runs)
        ddr = max(load.ddr for _, load in self.runs)
        return hbm, self.storage[0], ddr, self.storage[1]

    def score(self, use_depth: bool) -> float:
        """Milliseconds of the slowest shard, or of all."""
        return self.max_ms if use_depth else self.sum_ms


def candidate_of(choice: Choice, known: dict[Key, Candidate]) -> Candidate:
    """The candidate of a choice; of those equal in table, option and cache the one in ``known``."""
    key = _key(choice)
    found = known.get(key)
    if found is None:
        known[key] = found = Candidate(len(known), choice, module_of(choice.table), _merged(choice))
    return found


def module_of(table: TableSpec) -> str:
    """The collection that holds a table: bags are pooled, plain embeddings are not."""
    return "ebc" if table.pooled else "ec"


def walk_order(tables: Iterable[TableSpec]) -> list[TableSpec]:
    """Tables as TorchRec's planner meets them: its walk takes the last module first."""
    # A stable sort: inside of a module the order is the model's.
    return sorted(tables, key=lambda table: table.pooled)


def _key(choice: Choice) -> Key:
    option, cache = choice.option, choice.table.cache
    load_factor = None if cache is None else cache.load_factor
    return option.table, option.sharding_type, option.compute_kernel, option.runs, load_factor


def _merged(choice: Choice) -> tuple[tuple[int, Load], ...]:
    runs: list[tuple[int, Load]] = []
    for run, cost in zip(choice.option.runs, choice.costs, strict=True):
        shard = load(cost)
        # Merged by what they put on a rank, so that placing 2,048 like shards is one step.
        if runs and runs[-1][1] == shard:
            runs[-1] = runs[-1][0] + run.count, shard
        else:
            runs.append((run.count, shard))
    return tuple(runs)


Proposal = tuple[Candidate, ...]  # one candidate for each table


# Milliseconds of a proposal's busiest rank; None where it does not fit.
Rating = float | None

# Yields proposals, receives ratings and returns why it stopped early, if it did.
Proposals = Generator[Proposal, Rating, str | None]


@dataclass(frozen=True, slots=True)
class Offer:
    """What there is to choose from: the candidates of each table, and room on each rank.

    ``price`` prices options anew, for a proposer that changes them; ``watch`` says when
    long work is to stop.
    """

    tables: tuple[tuple[Candidate, ...], ...]
    capacities: Sequence[Bytes]
    known: dict[Key, Candidate]
    price: Price | None
    watch: Watch

    @property
    def hbm(self) -> int:
        """Bytes of HBM on all ranks."""
        return sum(hbm for hbm, _, _ in self.capacities)

    def by_score(self, use_depth: bool) -> list[list[Candidate]]:
        """The candidates of each table, fastest first; ties stay in order."""
        return [sorted(ways, key=lambda c: c.score(use_depth)) for ways in self.tables]
