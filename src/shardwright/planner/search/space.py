"""What the search chooses among: items, their options, and the blocks that an option puts on ranks.

A block lies on ``width`` consecutive ranks: one rank for a whole table or a column shard, a host
for a row-cut inside it, all ranks for a replica or a row-cut over everything. Blocks of one width
are interchangeable, so one set of moves serves every sharding type.
"""

# Why blocks and not shards: to place something one needs to know how many neighbouring ranks it
# takes, its seconds and its bytes, and nothing of sharding types.
#
# What must stay true: all blocks of an option are as wide, those of one rank are alike, and a block
# begins at a multiple of its width, so that it never lies across two hosts. Moves of a block,
# dealing of many and bounds by reshaped arrays all rest on it.

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright.planner.choice import Choice

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Storage = tuple[int, int, int]  # bytes of HBM, DDR and SSD

MAX_KEPT = 1024  # ranks of a block that is kept
MAX_ITEMS = 300  # above which a search looks at fewer ways


@dataclass(frozen=True, slots=True)
class OptionBlock:
    """``seconds`` [width] and ``storage`` [width, 3] that a block adds to its ranks."""

    width: int
    seconds: Floats
    storage: Floats


class RankRun(NamedTuple):
    """Neighbouring ranks, the seconds that an option on all ranks adds to each, and the bytes."""

    ranks: slice
    seconds: float
    storage: Storage


class ItemOption(msgspec.Struct, frozen=True, dict=True):
    """One way to shard an item: ``choices`` of its tables, and their blocks in order.

    Seconds are those of all ranks together, ``everywhere`` included; bytes likewise. Blocks of one
    rank each are alike. If they are ``close``, they lie in one group of ranks; only the exact
    search knows how.
    """

    choices: tuple[Choice, ...]
    total_seconds: float
    total_storage: Storage
    largest: float
    largest_storage: Storage
    everywhere: float
    widths: tuple[int, ...]
    close: bool = False

    @functools.cached_property
    def is_uniform(self) -> bool:
        """Whether it has one block, with a shard of one table on every rank."""
        if not self.choices or len(self.widths) > 1:
            return False
        return self.choices[0].option.partition == "uniform"

    @functools.cached_property
    def stretches(self) -> tuple[RankRun, ...]:
        """The ranks of the only block of an option that ``is_uniform``, in runs of like shards."""
        choice = self.choices[0]
        ends = itertools.accumulate(run.count for run in choice.option.runs)
        return tuple(
            RankRun(slice(end - run.count, end), cost.total_seconds, cost.storage)
            for end, run, cost in zip(ends, choice.option.runs, choice.costs, strict=True)
        )

    @property
    def blocks(self) -> tuple[OptionBlock, ...]:
        """The blocks, made on first use and kept; wide ones, which would fill gigabytes, are made
        each time."""
        return self._kept if self.widths[0] <= MAX_KEPT else _make_blocks(self)

    @functools.cached_property
    def _kept(self) -> tuple[OptionBlock, ...]:
        return _make_blocks(self)

    @functools.cached_property
    def lengths(self) -> tuple[tuple[int, float], ...]:
        """Width and seconds of every block, both negative so that the widest and longest come first
        in order."""
        return tuple((-block.width, -float(block.seconds.max())) for block in self.blocks)

    @functools.cached_property
    def single(self) -> tuple[float, ...]:
        """Bytes of each tier that a block of one rank has there; they are alike."""
        return tuple(self.blocks[0].storage[0].tolist())


@dataclass(frozen=True, slots=True)
class Item:
    """Tables that are decided together, their options, and the ranks they may use (None: all).

    ``floor``: where there are more options than are listed, what none of them is below, in seconds
    nor in bytes of any tier. It counts for bounds and is never chosen.
    """

    tables: tuple[int, ...]
    options: tuple[ItemOption, ...]
    allowed: Bools | None = None
    apart_from: tuple[int, ...] = ()
    floor: ItemOption | None = None


@dataclass(frozen=True)
class Space:
    """Every item on ``ranks`` ranks in groups of ``group``; ``capacity`` [3] bytes on each rank."""

    items: tuple[Item, ...]
    ranks: int
    group: int
    capacity: Storage
    constrained: bool = False

    @property
    def has_many(self) -> bool:
        """Whether there are so many items that none gets the search's full attention."""
        return len(self.items) > MAX_ITEMS

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
    def scarce_tiers(self) -> tuple[tuple[int, float], ...]:
        """``used_tiers`` that are too small on one rank for all that may ever be there."""
        return tuple(
            (tier, scale)
            for tier, scale in self.used_tiers
            if sum(max(o.total_storage[tier] for o in item.options) for item in self.items)
            > self.capacity[tier]
        )

    @functools.cached_property
    def least_work(self) -> tuple[float, ...]:
        """Seconds of all ranks together of the cheapest option of each item."""
        return tuple(min(option.total_seconds for option in item.options) for item in self.items)

    @functools.cached_property
    def _blocks(self) -> dict[tuple[int, int], list[tuple[int, float, int, int]]]:
        return {}

    def blocks_of(self, item: int, option: int) -> list[tuple[int, float, int, int]]:
        """``lengths`` of an option's blocks, each with its item and number; kept."""
        known = self._blocks.get((item, option))
        if known is None:
            lengths = self.items[item].options[option].lengths
            known = [(*key, item, index) for index, key in enumerate(lengths)]
            self._blocks[item, option] = known
        return known

    @functools.cached_property
    def capacity_array(self) -> Floats:
        """``capacity`` as floats, 1 where there is none so that it can divide."""
        return np.maximum(np.array(self.capacity, dtype=np.float64), 1.0)


@dataclass(frozen=True, slots=True)
class Assignment:
    """An option for each item, and the first rank of each of its blocks."""

    options: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]


def item_option(
    choices: Sequence[Choice], ranks: int, group: int, widths: tuple[int, ...] = ()
) -> ItemOption:
    """Several tables' choices as one option; several only where each is one whole shard. ``widths``
    are those of its blocks where they do not follow from its type."""
    sums = [_sums(choice) for choice in choices]
    everywhere = sum(choice.everywhere + choice.latency for choice in choices)
    return ItemOption(
        tuple(choices),
        sum(own.seconds for own in sums) + everywhere * ranks,
        _added([own.storage for own in sums]),
        sum(own.most_seconds for own in sums) + everywhere,
        _added([own.most_storage for own in sums]),
        everywhere,
        widths or tuple(_widths(choices[0], ranks, group)),
    )


class _Sums(NamedTuple):
    """A choice's seconds and bytes of all shards, and the most that a shard has of each."""

    seconds: float
    storage: Storage
    most_seconds: float
    most_storage: Storage


def _sums(choice: Choice) -> _Sums:
    """Costs that are one object are added up once."""
    runs, times = choice.option.column_block
    costs = choice.costs[: len(runs)]
    if len(runs) == 1:
        cost, count = costs[0], runs[0].count * times
        hbm, ddr, ssd = own = cost.storage
        storage = hbm * count, ddr * count, ssd * count
        return _Sums(cost.total_seconds * count, storage, cost.total_seconds, own)
    # By identity: shards of one shape share their Cost (see `pricing.evaluate`), so a table of
    # thousands of shards adds up a few different ones.
    counts: dict[int, int] = {}
    for run, cost in zip(runs, costs, strict=True):
        counts[id(cost)] = counts.get(id(cost), 0) + run.count * times
    kinds = [(cost, counts.pop(id(cost))) for cost in costs if id(cost) in counts]
    seconds = math.fsum(count * cost.total_seconds for cost, count in kinds)
    hbm, ddr, ssd = (sum(n * cost.storage[tier] for cost, n in kinds) for tier in range(3))
    most = [max(cost.storage[tier] for cost, _ in kinds) for tier in range(3)]
    longest = max(cost.total_seconds for cost, _ in kinds)
    return _Sums(seconds, (hbm, ddr, ssd), longest, (most[0], most[1], most[2]))


def _added(sizes: Sequence[Storage]) -> Storage:
    if len(sizes) == 1:
        return sizes[0]
    return sum(s[0] for s in sizes), sum(s[1] for s in sizes), sum(s[2] for s in sizes)


def floor_option(options: Sequence[Sequence[ItemOption]]) -> ItemOption:
    """What no choice of one option for each of several tables on a common rank is below."""

    def least(field: str) -> float:
        return math.fsum(min(getattr(option, field) for option in own) for own in options)

    def least_bytes(field: str) -> Storage:
        hbm, ddr, ssd = (
            sum(min(getattr(option, field)[tier] for option in own) for own in options)
            for tier in range(3)
        )
        return hbm, ddr, ssd

    return ItemOption(
        (),
        least("total_seconds"),
        least_bytes("total_storage"),
        least("largest"),
        least_bytes("largest_storage"),
        least("everywhere"),
        (1,),
    )


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


def _make_blocks(option: ItemOption) -> tuple[OptionBlock, ...]:
    """Every block; blocks that are alike are one object."""
    seconds, storage = _expanded(option.choices[0])
    for choice in option.choices[1:]:
        more = _expanded(choice)
        seconds, storage = seconds + more[0], storage + more[1]
    count, width = len(option.widths), option.widths[0]
    # One block on a host with more shards than ranks there: these are dealt in turn, as the runtime
    # does it (`shard_ranks`), so a rank has several of them.
    if count == 1 and len(seconds) != width:
        seconds, storage = _folded(seconds, storage, width)
    first = OptionBlock(width, seconds[:width], storage[:width])
    shaped = seconds.reshape(count, width), storage.reshape(count, width, 3)
    # One object for all blocks that are alike: whoever places them asks `blocks[0] is blocks[-1]`
    # and may then deal them at once.
    if count == 1 or all((values == values[:1]).all() for values in shaped):
        return (first,) * count
    assert width > 1
    return tuple(OptionBlock(width, *own) for own in zip(*shaped, strict=True))


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


def open_slots(allowed: Bools, width: int) -> Bools:
    """Which slots of so many ranks, such as hosts, have none that is not ``allowed``."""
    found: Bools = np.logical_and.reduce(allowed.reshape(-1, width), axis=1)
    return found


def fill(option: ItemOption, slots: Sequence[int], load: Floats, memory: Floats, sign: int) -> None:
    """Add an option's seconds and bytes to ranks, or take them off: ``sign`` is 1 or -1."""
    if option.everywhere:
        load += sign * option.everywhere
    if option.is_uniform:
        for ranks, seconds, storage in option.stretches:
            load[ranks] += sign * seconds
            memory[ranks] += [sign * size for size in storage]
        return
    blocks = option.blocks
    # add.at, for several blocks may lie on one rank: `load[slots] += ...` would count such a rank
    # once.
    if len(blocks) > 1 and blocks[0].width == 1 and blocks[0] is blocks[-1]:
        np.add.at(load, list(slots), sign * blocks[0].seconds[0])
        np.add.at(memory, list(slots), sign * blocks[0].storage[0])
        return
    for block, slot in zip(blocks, slots, strict=True):
        ranks = slice(slot, slot + block.width)
        load[ranks] += sign * block.seconds
        memory[ranks] += sign * block.storage


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
