"""What the search chooses among: items, their options, and the blocks that an option puts on ranks.

A block lies on ``width`` consecutive ranks: one rank for a whole table or a column shard, a host
for a row-cut inside it, all ranks for a replica or a row-cut over everything. Blocks of one width
are interchangeable, so one set of moves serves every sharding type.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.choice import Choice

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """``seconds`` [width] and ``storage`` [width, 3] that a block adds to its ranks."""

    width: int
    seconds: Floats
    storage: Floats


@dataclass(frozen=True)
class ItemOption:
    """One way to shard an item: ``choices`` of its tables, and their blocks in order.

    Seconds are those of all ranks together, ``everywhere`` included; bytes likewise.
    """

    choices: tuple[Choice, ...]
    total_seconds: float
    total_storage: tuple[int, int, int]
    largest: float
    largest_storage: tuple[int, int, int]
    everywhere: float
    widths: tuple[int, ...]

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, made on first use."""
        return tuple(_make_blocks(self))


@dataclass(frozen=True, slots=True)
class Item:
    """Tables that are decided together, their options, and the ranks they may use (None: all)."""

    tables: tuple[int, ...]
    options: tuple[ItemOption, ...]
    allowed: Bools | None = None
    apart_from: tuple[int, ...] = ()


@dataclass(frozen=True)
class Space:
    """Every item on ``ranks`` ranks in groups of ``group``; ``capacity`` [3] bytes on each rank."""

    items: tuple[Item, ...]
    ranks: int
    group: int
    capacity: tuple[int, int, int]
    constrained: bool = False

    @functools.cached_property
    def used_tiers(self) -> tuple[tuple[int, float], ...]:
        """Tiers that any option fills, each with what makes its bytes a share of the capacity."""
        used = {
            tier
            for item in self.items
            for option in item.options
            for tier in range(3)
            if option.total_storage[tier]
        }
        return tuple((tier, 1.0 / max(self.capacity[tier], 1)) for tier in sorted(used))

    @functools.cached_property
    def capacity_array(self) -> Floats:
        """``capacity`` as floats, 1 where there is none so that it can divide."""
        return np.maximum(np.array(self.capacity, dtype=np.float64), 1.0)


@dataclass(frozen=True, slots=True)
class Assignment:
    """An option for each item, and the first rank of each of its blocks."""

    options: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]


def item_option(choices: Sequence[Choice], ranks: int, group: int) -> ItemOption:
    """Several tables' choices as one option; several only where each is one whole shard."""
    everywhere = sum(choice.everywhere for choice in choices)
    storage = [choice.total_storage for choice in choices]
    widths = tuple(_widths(choices[0], ranks, group))
    return ItemOption(
        tuple(choices),
        sum(choice.total_seconds for choice in choices) + everywhere * ranks,
        (sum(s[0] for s in storage), sum(s[1] for s in storage), sum(s[2] for s in storage)),
        sum(choice.max_seconds for choice in choices) + everywhere,
        _largest_storage(choices),
        everywhere,
        widths,
    )


def _largest_storage(choices: Sequence[Choice]) -> tuple[int, int, int]:
    """Bytes of each tier that the shard with most of it needs; whole tables lie together."""
    hbm, ddr, ssd = (
        sum(max(cost.storage[tier] for cost in choice.costs) for choice in choices)
        for tier in range(3)
    )
    return hbm, ddr, ssd


def _widths(choice: Choice, ranks: int, group: int) -> list[int]:
    count = choice.option.count
    match choice.option.partition:
        case "uniform":
            return [ranks]
        case "device":
            return [1] * count
        case "host":
            return [group]
        case "multi_host":
            return [group] * (count // group)


def _make_blocks(option: ItemOption) -> list[Block]:
    seconds, storage = _expanded(option.choices[0])
    for choice in option.choices[1:]:
        more = _expanded(choice)
        seconds, storage = seconds + more[0], storage + more[1]
    if option.choices[0].option.partition == "host" and len(seconds) != option.widths[0]:
        seconds, storage = _folded(seconds, storage, option.widths[0])
    blocks, start = [], 0
    for width in option.widths:
        stop = start + width
        blocks.append(Block(width, seconds[start:stop], storage[start:stop]))
        start = stop
    return blocks


def _expanded(choice: Choice) -> tuple[Floats, Floats]:
    """Seconds [shards] and storage [shards, 3] of every shard."""
    counts = [run.count for run in choice.option.runs]
    seconds = np.repeat([cost.total_seconds for cost in choice.costs], counts)
    storage = np.repeat(np.array([cost.storage for cost in choice.costs], float), counts, axis=0)
    return seconds, storage


def _folded(seconds: Floats, storage: Floats, width: int) -> tuple[Floats, Floats]:
    """Column shards dealt in turn to the ranks of a host."""
    place = np.arange(len(seconds)) % width
    folded = np.zeros(width), np.zeros((width, 3))
    np.add.at(folded[0], place, seconds)
    np.add.at(folded[1], place, storage)
    return folded


def shard_ranks(option: ItemOption, member: int, slots: Sequence[int]) -> Sequence[int]:
    """The rank of every shard of one member table of an item that lies at ``slots``."""
    count = option.choices[member].option.count
    if len(option.widths) == 1:
        width = option.widths[0]
        if count == width:
            return range(slots[0], slots[0] + width)
        return tuple(slots[0] + k % width for k in range(count))
    pairs = zip(slots, option.widths, strict=True)
    return tuple(slot + k for slot, width in pairs for k in range(width))
