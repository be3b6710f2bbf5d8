"""Greedy placement inside a byte budget per rank, then single moves that help the busiest rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

from shardwright.core.model import ShardingType
from shardwright.planner.draft import Draft, Placed
from shardwright.planner.problem import UNIFORM, Problem, TableChoice, UnitChoice

MAX_ROUNDS = 200
MAX_UNIT_COMBINATIONS = 16

Tables = tuple[tuple[TableChoice, ...], ...]
Key = Callable[["_Loads", TableChoice, tuple[int, ...]], tuple[float, ...]]


class _Loads:
    """Bytes and seconds that tables have put on each rank so far."""

    def __init__(self, world_size: int) -> None:
        self.bytes = [0] * world_size
        self.seconds = [0.0] * world_size

    def add(self, choice: TableChoice, ranks: tuple[int, ...], sign: int = 1) -> None:
        for rank, size, spent in zip(ranks, choice.bytes, choice.seconds, strict=True):
            self.bytes[rank] += sign * size
            self.seconds[rank] += sign * spent
        if choice.request_seconds:
            self.seconds = [s + sign * choice.request_seconds for s in self.seconds]

    def ranks_for(self, choice: TableChoice, budget: float) -> tuple[int, ...] | None:
        """Where the shards go: rank k, or one after the other to the least busy rank with room."""
        world_size = len(self.bytes)
        if choice.option.sharding_type in UNIFORM:
            ranks = tuple(range(world_size))
            room = all(self.bytes[r] + choice.bytes[r] <= budget for r in ranks)
            return ranks if room else None
        sizes, seconds = list(self.bytes), list(self.seconds)
        chosen = []
        for size, spent in zip(choice.bytes, choice.seconds, strict=True):
            fitting = [r for r in range(world_size) if sizes[r] + size <= budget]
            if not fitting:
                return None
            rank = min(fitting, key=lambda r: (seconds[r], sizes[r], r))
            sizes[rank] += size
            seconds[rank] += spent
            chosen.append(rank)
        return tuple(chosen)


def _fastest(loads: _Loads, choice: TableChoice, ranks: tuple[int, ...]) -> tuple[float, ...]:
    """The busiest rank afterwards, then the work added in all."""
    after = [seconds + choice.request_seconds for seconds in loads.seconds]
    for rank, spent in zip(ranks, choice.seconds, strict=True):
        after[rank] += spent
    return max(after), _work(loads, choice), sum(choice.bytes)


def _work(loads: _Loads, choice: TableChoice) -> float:
    return math.fsum(choice.seconds) + choice.request_seconds * len(loads.seconds)


def _smallest(loads: _Loads, choice: TableChoice, ranks: tuple[int, ...]) -> tuple[float, ...]:
    """The fullest rank afterwards, then the bytes added in all."""
    after = list(loads.bytes)
    for rank, size in zip(ranks, choice.bytes, strict=True):
        after[rank] += size
    return max(after), sum(choice.bytes), math.fsum(choice.seconds)


def _least_work(loads: _Loads, choice: TableChoice, ranks: tuple[int, ...]) -> tuple[float, ...]:
    return _work(loads, choice), max(loads.seconds[r] for r in ranks)


STRATEGIES: tuple[Key, ...] = (_fastest, _least_work, _smallest)

# Placing one table after the other does not see that the first replica or routed table costs its
# collectives whatever follows, nor that whole tables balance in the end: so plans that avoid a type
# wherever they can are proposed as well.
LEFT_OUT: tuple[tuple[ShardingType, ...], ...] = (
    (),
    ("data_parallel",),
    ("row_wise", "column_wise"),
    ("table_wise", "row_wise", "column_wise"),
)


def proposals(problem: Problem, budget: float) -> Iterator[Draft]:
    """Every combination of unit modes with every strategy, placed within ``budget`` bytes."""
    for units in _unit_combinations(problem):
        kept = max(_kept_by_units(problem, units))
        for left_out, strategy in product(LEFT_OUT, STRATEGIES):
            tables = _without(problem, left_out)
            placed = _place(problem, tables, budget - kept, strategy)
            if placed is not None:
                yield Draft(problem, placed, units)
                yield Draft(problem, _improve(problem, placed, budget - kept), units)


def smallest(problem: Problem) -> Draft:
    """The draft that asks least of the fullest rank, whatever its memory."""
    units = tuple(min(c, key=lambda u: u.layout.shard_bytes) for c in problem.units)
    placed = _place(problem, problem.tables, float("inf"), _smallest)
    assert placed is not None
    return Draft(problem, placed, units)


def _unit_combinations(problem: Problem) -> Iterator[tuple[UnitChoice, ...]]:
    count = 1
    for choices in problem.units:
        count *= len(choices)
    if count <= MAX_UNIT_COMBINATIONS:
        yield from product(*problem.units)
        return
    for wanted in (0, -1):  # all as replicated as possible, all as sharded as possible
        yield tuple(choices[wanted] for choices in problem.units)


def _kept_by_units(problem: Problem, units: tuple[UnitChoice, ...]) -> tuple[int, ...]:
    return Draft(problem, (), units).kept_bytes


def _without(problem: Problem, types: tuple[ShardingType, ...]) -> Tables:
    """The choices that are not of ``types``, for tables that have any."""
    return tuple(
        tuple(c for c in choices if c.option.sharding_type not in types) or choices
        for choices in problem.tables
    )


def _place(problem: Problem, tables: Tables, budget: float, key: Key) -> tuple[Placed, ...] | None:
    """Largest tables first, each where ``key`` is smallest; None if one fits nowhere."""
    loads = _Loads(problem.cluster.world_size)
    order = sorted(range(len(tables)), key=lambda i: -tables[i][0].table.nbytes)
    placed: list[Placed | None] = [None] * len(tables)
    for index in order:
        best = _best(loads, tables[index], budget, key)
        if best is None:  # what is avoided is still better than nothing
            best = _best(loads, problem.tables[index], budget, key)
        if best is None:
            return None
        loads.add(best.choice, best.ranks)
        placed[index] = best
    return tuple(p for p in placed if p is not None)


def _best(
    loads: _Loads, choices: tuple[TableChoice, ...], budget: float, key: Key
) -> Placed | None:
    found = []
    for choice in choices:
        ranks = loads.ranks_for(choice, budget)
        if ranks is not None:
            found.append(Placed(choice, ranks))
    return min(found, key=lambda p: key(loads, p.choice, p.ranks), default=None)


def _improve(problem: Problem, start: tuple[Placed, ...], budget: float) -> tuple[Placed, ...]:
    """Take one table after the other out and back in elsewhere while the busiest rank gains."""
    placed = list(start)
    loads = _Loads(problem.cluster.world_size)
    for item in placed:
        loads.add(item.choice, item.ranks)
    for _ in range(MAX_ROUNDS):
        before = (max(loads.seconds), math.fsum(loads.seconds))
        improved = False
        for index, item in enumerate(placed):
            loads.add(item.choice, item.ranks, -1)
            best = _best(loads, problem.tables[index], budget, _fastest) or item
            loads.add(best.choice, best.ranks)
            if (max(loads.seconds), math.fsum(loads.seconds)) < (before[0] - 1e-15, before[1]):
                placed[index] = best
                before = (max(loads.seconds), math.fsum(loads.seconds))
                improved = True
            else:
                loads.add(best.choice, best.ranks, -1)
                loads.add(item.choice, item.ranks)
        if not improved:
            break
    return tuple(placed)


def replaced(draft: Draft, index: int, choice: TableChoice) -> Draft:
    """``draft`` with another choice for one table, on the ranks that then are least busy."""
    loads = _Loads(draft.problem.cluster.world_size)
    for position, item in enumerate(draft.tables):
        if position != index:
            loads.add(item.choice, item.ranks)
    ranks = loads.ranks_for(choice, float("inf"))
    assert ranks is not None
    tables = list(draft.tables)
    tables[index] = Placed(choice, ranks)
    return Draft(draft.problem, tuple(tables), draft.units)
