"""Small spaces of every kind of block, and all their assignments."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from shardwright.core.model import TableSpec
from shardwright.core.option import Option, shard_runs
from shardwright.core.sharding import ShardingType
from shardwright.planner.choice import Choice, Cost, cost
from shardwright.planner.search.space import (
    Assignment,
    Bools,
    Floats,
    Item,
    ItemOption,
    Space,
    item_option,
)

PLENTY = 2**50
TYPES: tuple[tuple[ShardingType, int], ...] = (
    ("data_parallel", 1),
    ("table_wise", 1),
    ("row_wise", 1),
    ("column_wise", 2),
    ("column_wise", 4),
    ("table_row_wise", 1),
    ("table_column_wise", 4),
    ("grid_shard", 2),
)


def _choice(
    draw: random.Random, table: TableSpec, kind: ShardingType, parts: int, ranks: int, group: int
) -> Choice:
    """A way to shard a table, with made-up costs that are alike for shards of one shape."""
    runs = shard_runs(table, kind, ranks, group, table.dim // parts)
    kernel = "dense" if kind == "data_parallel" else draw.choice(["fused", "fused_uvm"])
    slow = kernel == "fused_uvm"
    work = draw.uniform(0.5, 2)
    known: dict[tuple[int, int], Cost] = {}
    for run in runs:
        shape = run.rows, run.columns
        if shape not in known:
            kept = 4 * run.rows * run.columns
            seconds = work * run.columns * (0.2 + run.rows / table.rows) * (3 if slow else 1)
            known[shape] = cost(
                {"lookup": seconds},
                hbm={"weight": 0 if slow else kept, "input": 8 * draw.randint(0, 9)},
                ddr={"weight": kept if slow else 0},
            )
    everywhere = draw.choice([0.0, 0.0, draw.uniform(0, 1)])
    option = Option(table.name, kind, kernel, runs)
    return Choice(table, option, tuple(known[run.rows, run.columns] for run in runs), everywhere)


@dataclass(frozen=True)
class _Everything:
    """Every assignment of a space: [assignments, ranks] seconds, [assignments, ranks, 3] bytes."""

    seconds: Floats
    storage: Floats
    parts: list[list[tuple[int, tuple[int, ...]]]]

    def fitting(self, capacity: Sequence[int]) -> Bools:
        """Which assignments are within ``capacity``; bytes of these spaces are exact in doubles."""
        found: Bools = (self.storage <= np.array(capacity, float)).all(axis=(1, 2))
        return found & np.isfinite(self.seconds).all(axis=1)

    def best(self, capacity: Sequence[int]) -> float:
        """Seconds of the fastest that fits, or infinity."""
        return float(self.seconds.max(axis=1)[self.fitting(capacity)].min(initial=np.inf))


def _placements(space: Space, item: Item, option: ItemOption) -> list[tuple[int, ...]]:
    """Where the blocks of an option, which are alike, may lie."""
    width = option.widths[0]
    slots = [
        slot
        for slot in range(0, space.ranks, width)
        if item.allowed is None or item.allowed[slot : slot + width].all()
    ]
    return list(itertools.combinations_with_replacement(slots, len(option.widths)))


def everything(space: Space) -> _Everything:
    """All assignments, in the order of the product over the items."""
    seconds, storage = np.zeros((1, space.ranks)), np.zeros((1, space.ranks, 3))
    parts: list[list[tuple[int, tuple[int, ...]]]] = []
    held: list[Bools] = []
    for item in space.items:
        own = [
            (number, slots)
            for number, option in enumerate(item.options)
            for slots in _placements(space, item, option)
        ]
        more = [_effect(space, item.options[number], slots) for number, slots in own]
        seconds = seconds[:, None] + np.array([m[0] for m in more])[None]
        storage = storage[:, None] + np.array([m[1] for m in more])[None]
        seconds, storage = seconds.reshape(-1, space.ranks), storage.reshape(-1, space.ranks, 3)
        parts.append(own)
        held.append(np.array([m[2] for m in more]))
    apart = [
        (first, second)
        for first, item in enumerate(space.items)
        for second in item.apart_from
        if first < second
    ]
    if apart:
        numbers = np.indices([len(own) for own in parts]).reshape(len(parts), -1)
        for first, second in apart:
            meet = (held[first][numbers[first]] & held[second][numbers[second]]).any(axis=1)
            seconds[meet] = np.inf
    return _Everything(seconds, storage, parts)


def _effect(space: Space, option: ItemOption, slots: Sequence[int]) -> tuple[Floats, Floats, Bools]:
    """Seconds, bytes and presence by rank, from the costs of the shards one by one."""
    seconds = np.full(space.ranks, option.everywhere)
    storage, present = np.zeros((space.ranks, 3)), np.zeros(space.ranks, bool)
    for choice in option.choices:
        for number, found in enumerate(choice.shard_costs):
            rank = _rank(choice.option, number, slots, space)
            seconds[rank] += found.total_seconds
            storage[rank] += found.storage
            present[rank] = True
    return seconds, storage, present


def _rank(option: Option, number: int, slots: Sequence[int], space: Space) -> int:
    match option.partition:
        case "uniform":
            return number
        case "device":
            return slots[number]
        case "host":
            return slots[0] + number % space.group
        case "multi_host":
            return slots[number // space.group] + number % space.group


def totals(space: Space, found: Assignment) -> tuple[Floats, Floats]:
    """Seconds and bytes of every rank, worked out from the shards."""
    seconds, storage = np.zeros(space.ranks), np.zeros((space.ranks, 3))
    for item, number, slots in zip(space.items, found.options, found.slots, strict=True):
        more = _effect(space, item.options[number], slots)
        seconds, storage = seconds + more[0], storage + more[1]
    return seconds, storage


def random_space(
    seed: int, tables: int = 3, *, memory: str = "plenty", constrained: bool = False
) -> Space:
    """A space of a few tables; ``memory`` is plenty, ``tight`` or ``short`` (perhaps too short)."""
    draw = random.Random(seed)
    group = draw.choice([1, 2, 2])
    ranks = group * draw.choice([1, 2, 2])
    joined = draw.random() < 0.5 and constrained
    items: list[Item] = []
    for index in range(tables):
        members = 2 if joined and index == 0 else 1
        tables_of_item = [
            TableSpec(f"t{index}_{m}", draw.randint(1, 40), draw.choice([16, 32, 64]))
            for m in range(members)
        ]
        kinds = [t for t in TYPES if draw.random() < 0.6]
        allowed = None
        if constrained and draw.random() < 0.5:
            allowed = np.zeros(ranks, bool)
            allowed[draw.sample(range(ranks), draw.randint(1, ranks))] = True
        if members == 2 or not kinds or (constrained and index < 2):
            kinds = [("table_wise", 1)]
        elif allowed is not None:
            kinds = [("table_wise", 1), ("column_wise", 2)]
        options = tuple(
            item_option(
                [_choice(draw, table, kind, parts, ranks, group) for table in tables_of_item],
                ranks,
                group,
            )
            for kind, parts in kinds
        )
        numbers = tuple(range(len(items), len(items) + members))
        items.append(Item(numbers, options, allowed))
    if constrained and ranks > 1 and draw.random() < 0.7:
        items[0] = Item(items[0].tables, items[0].options, items[0].allowed, (1,))
        items[1] = Item(items[1].tables, items[1].options, items[1].allowed, (0,))
    capacity = (PLENTY,) * 3
    space = Space(tuple(items), ranks, group, capacity, constrained)
    if memory == "plenty":
        return space
    return with_memory(space, draw.uniform(1.0, 1.3) if memory == "tight" else draw.uniform(0.5, 1))


def with_memory(space: Space, factor: float) -> Space:
    """``factor`` times what the assignment that needs least of the fullest rank takes of HBM; the
    least that then is needed of DDR."""
    found = everything(space)
    possible = np.isfinite(found.seconds).all(axis=1)
    if not possible.any():
        return space
    hbm = found.storage[possible][:, :, 0].max(axis=1)
    ddr = found.storage[possible][:, :, 1].max(axis=1)
    limit = int(hbm.min() * factor)
    near = hbm <= max(limit, hbm.min())
    capacity = (max(limit, 1), max(int(ddr[near].min() * max(factor, 1)), 1), 0)
    return Space(space.items, space.ranks, space.group, capacity, space.constrained)


@pytest.fixture(scope="session")
def space_of_seed() -> Callable[..., Space]:
    """A space drawn from a seed."""
    return random_space


@pytest.fixture(scope="session")
def many_ranks() -> Callable[[ShardingType, int, int], Space]:
    """A space of one table that is sharded in one way, on so many ranks in groups."""

    def made(kind: ShardingType, ranks: int, group: int) -> Space:
        table = TableSpec("t", 1001, 64)
        parts = 8 if kind in ("column_wise", "grid_shard") else 1
        choice = _choice(random.Random(1), table, kind, parts, ranks, group)
        item = Item((0,), (item_option([choice], ranks, group),))
        return Space((item,), ranks, group, (2**30,) * 3)

    return made


@pytest.fixture(scope="session")
def all_of() -> Callable[[Space], _Everything]:
    """Every assignment of a space."""
    return everything


@pytest.fixture(scope="session")
def totals_of() -> Callable[[Space, Assignment], tuple[Floats, Floats]]:
    """Seconds and bytes of every rank under an assignment."""
    return totals
