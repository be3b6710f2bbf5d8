"""Where every block lies now, what that puts on each rank, and moves with their exact effect.

A state may be over capacity on the way. What is minimised is a sum over the ranks: the rank's
seconds, relative to a target, to a power (so the worst ranks count most but a change of the others
is seen too), plus a penalty for the share of its capacity that is exceeded.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.search.space import Assignment, Block, Bools, Floats, Space

OVERFLOW_PENALTY = 1e9  # times what the slowest rank costs
MAX_RATIO = 1e3  # of a rank to the target; above it powers overflow


@dataclass(frozen=True, slots=True)
class Singles:
    """All blocks of width 1 in arrays: their item, number in it, rank, seconds and storage."""

    item: NDArray[np.int64]
    number: NDArray[np.int64]
    rank: NDArray[np.int64]
    seconds: Floats
    storage: Floats


@dataclass
class State:
    """``load`` [ranks] seconds, ``memory`` [ranks, 3] bytes; ``slots`` first ranks of blocks.

    ``power`` is a power of two.
    """

    space: Space
    target: float
    power: float = 8.0
    options: list[int] = field(default_factory=list)
    slots: list[tuple[int, ...]] = field(default_factory=list)
    penalty: float = OVERFLOW_PENALTY
    steps: int = 0  # moves made by a search
    _singles: Singles | None = None

    def __post_init__(self) -> None:
        count = len(self.space.items)
        self.options = self.options or [-1] * count
        self.slots = self.slots or [()] * count
        self.load: Floats = np.zeros(self.space.ranks)
        self.memory: Floats = np.zeros((self.space.ranks, 3))
        self.on_rank: list[set[int]] = [set() for _ in range(self.space.ranks)]

    def cost(self, load: Floats, memory: Floats) -> Floats:
        """What each rank contributes to the sum that is minimised."""
        result: Floats = np.minimum(load / self.target, MAX_RATIO)
        for _ in range(int(self.power).bit_length() - 1):  # a power of two: squared so many times
            result *= result
        for tier, scale in self.space.used_tiers:
            over = memory[..., tier] * scale
            over -= 1.0
            np.maximum(over, 0.0, out=over)
            over *= self.penalty
            result += over
        return result

    def sharpen(self, power: float) -> None:
        """Another power; a byte too many stays worse than any time that a rank takes now."""
        self.power = power
        ratio = min(max(self.worst / self.target, 1.0), MAX_RATIO)
        self.penalty = OVERFLOW_PENALTY * ratio**power

    def rank_costs(self) -> Floats:
        """``cost`` of every rank as it is."""
        return self.cost(self.load, self.memory)

    @property
    def fits(self) -> bool:
        """Whether every item lies somewhere and no rank is over capacity."""
        if min(self.options, default=0) < 0:
            return False
        return bool((self.memory <= np.array(self.space.capacity, dtype=np.float64)).all())

    @property
    def worst(self) -> float:
        """Seconds of the slowest rank."""
        return float(self.load.max())

    def assignment(self) -> Assignment:
        """A copy of the choice."""
        return Assignment(tuple(self.options), tuple(self.slots))

    def blocks(self, item: int, option: int | None = None) -> tuple[Block, ...]:
        """Blocks of an item's option, by default the chosen one."""
        number = self.options[item] if option is None else option
        return self.space.items[item].options[number].blocks

    def put(self, item: int, option: int, slots: tuple[int, ...]) -> None:
        """Place an item that lies nowhere."""
        self.options[item], self.slots[item] = option, slots
        self._apply(item, 1)

    def take(self, item: int) -> None:
        """Take an item off its ranks; its option and slots are remembered."""
        self._apply(item, -1)

    def _apply(self, item: int, sign: int) -> None:
        option = self.space.items[item].options[self.options[item]]
        if option.everywhere:
            self.load += sign * option.everywhere
        blocks, slots = option.blocks, self.slots[item]
        if len(blocks) > 1 and blocks[0].width == 1 and blocks[0] is blocks[-1]:
            np.add.at(self.load, list(slots), sign * blocks[0].seconds[0])
            np.add.at(self.memory, list(slots), sign * blocks[0].storage[0])
        else:
            for block, slot in zip(blocks, slots, strict=True):
                ranks = slice(slot, slot + block.width)
                self.load[ranks] += sign * block.seconds
                self.memory[ranks] += sign * block.storage
        if blocks[0].width < self.space.ranks:
            for slot in set(slots):
                for rank in range(slot, slot + blocks[0].width):
                    (self.on_rank[rank].add if sign > 0 else self.on_rank[rank].discard)(item)
        self._singles = None

    def move(self, item: int, number: int, slot: int) -> None:
        """Move one block elsewhere."""
        block, old = self.blocks(item)[number], self.slots[item][number]
        for place, sign in ((old, -1), (slot, 1)):
            ranks = slice(place, place + block.width)
            self.load[ranks] += sign * block.seconds
            self.memory[ranks] += sign * block.storage
        slots = list(self.slots[item])
        slots[number] = slot
        self.slots[item] = tuple(slots)
        held = {
            rank
            for place, part in zip(slots, self.blocks(item), strict=True)
            for rank in range(place, place + part.width)
        }
        for rank in range(old, old + block.width):
            if rank not in held:
                self.on_rank[rank].discard(item)
        for rank in range(slot, slot + block.width):
            self.on_rank[rank].add(item)
        if block.width == 1 and self._singles is not None:
            s = self._singles
            s.rank[(s.item == item) & (s.number == number)] = slot

    def singles(self) -> Singles:
        """The blocks of width 1; ranks are kept up to date by ``move``."""
        if self._singles is None:
            self._singles = self._gathered()
        return self._singles

    def _gathered(self) -> Singles:
        """The blocks of width 1 as they lie now; those of an item are alike and follow one
        another."""
        found = [
            (item, block)
            for item, option in enumerate(self.options)
            if option >= 0
            and (block := self.space.items[item].options[option].blocks[0]).width == 1
        ]
        slots = [self.slots[item] for item, _ in found]
        counts = np.array([len(own) for own in slots], dtype=np.int64)
        which = np.arange(len(found)).repeat(counts)
        before = counts.cumsum() - counts
        return Singles(
            np.array([item for item, _ in found], dtype=np.int64)[which],
            np.arange(len(which)) - before[which],
            np.fromiter(itertools.chain.from_iterable(slots), np.int64, len(which)),
            np.array([block.seconds[0] for _, block in found])[which],
            np.array([block.storage[0] for _, block in found]).reshape(-1, 3)[which],
        )

    def allowed(self, item: int) -> Bools | None:
        """Ranks that the rules leave an item as things stand; None for all."""
        if not self.space.constrained:
            return None
        rule = self.space.items[item]
        mask = np.ones(self.space.ranks, bool) if rule.allowed is None else rule.allowed.copy()
        for other in rule.apart_from:
            if self.options[other] >= 0:
                for block, slot in zip(self.blocks(other), self.slots[other], strict=True):
                    mask[slot : slot + block.width] = False
        return mask

    def spread(self, item: int, option: int) -> tuple[tuple[int, ...], float] | None:
        """Where the blocks of ``option`` would go one after the other, and the cost of all ranks
        afterwards; None if the rules leave no place. The item must lie nowhere."""
        mask = self.allowed(item)
        everywhere = self.space.items[item].options[option].everywhere
        load, memory = self.load + everywhere, self.memory.copy()
        blocks = self.blocks(item, option)
        if len(blocks) > 1 and blocks[0].width < self.space.ranks and blocks[0] is blocks[-1]:
            return self._deal(blocks[0], len(blocks), load, memory, mask)
        costs = self.cost(load, memory)
        slots: list[int] = []
        for block in blocks:
            slot = self._place(block, load, memory, costs, mask)
            if slot is None:
                return None
            ranks = slice(slot, slot + block.width)
            load[ranks] += block.seconds
            memory[ranks] += block.storage
            costs[ranks] = self.cost(load[ranks], memory[ranks])
            slots.append(slot)
        return tuple(slots), float(costs.sum())

    def _deal(
        self, block: Block, count: int, load: Floats, memory: Floats, mask: Bools | None
    ) -> tuple[tuple[int, ...], float] | None:
        """``spread`` of ``count`` blocks that are alike."""
        closed: Bools = np.zeros(self.space.ranks // block.width, bool)
        if mask is not None:
            closed = np.logical_or.reduce(~mask.reshape(-1, block.width), axis=1)
            if closed.all():
                return None
        dealt = deal(block, count, load, memory, closed, self.cost, self.cost_of)
        return dealt.slots, dealt.cost

    def cost_of(self, load: float, memory: Sequence[float]) -> float:
        """``cost`` of one rank."""
        result = min(load / self.target, MAX_RATIO)
        for _ in range(int(self.power).bit_length() - 1):
            result *= result
        for tier, scale in self.space.used_tiers:
            result += max(memory[tier] * scale - 1.0, 0.0) * self.penalty
        return result

    def _place(
        self, block: Block, load: Floats, memory: Floats, costs: Floats, mask: Bools | None
    ) -> int | None:
        """The slot where a block adds least to ``costs``, those of the ranks as they are."""
        width = block.width
        if width == self.space.ranks:
            return 0 if mask is None or mask.all() else None
        if width == 1:
            added = self.cost(load + block.seconds[0], memory + block.storage[0]) - costs
        else:
            hosts = self.space.ranks // width
            after = self.cost(
                load.reshape(hosts, width) + block.seconds,
                memory.reshape(hosts, width, 3) + block.storage,
            )
            added = (after - costs.reshape(hosts, width)).sum(axis=1)
        if mask is not None:
            open_slots = mask if width == 1 else mask.reshape(-1, width).all(axis=1)
            if not open_slots.any():
                return None
            added = np.where(open_slots, added, np.inf)
        return int(added.argmin()) * width


def restored(space: Space, target: float, power: float, found: Assignment) -> State:
    """The state of an assignment."""
    state = State(space, target, power)
    for item, (option, slots) in enumerate(zip(found.options, found.slots, strict=True)):
        state.put(item, option, slots)
    return state


MANY = 64  # blocks; of more, whole rows of ranks are worked out at once
ROWS = 4  # blocks of a slot that are looked at first

# What ranks cost at their seconds and bytes, as arrays; and one rank, as numbers.
Costs = Callable[[Floats, Floats], Floats]
Cost = Callable[[float, Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Dealt:
    """The first ranks of the blocks, and what all ranks together cost with them."""

    slots: tuple[int, ...]
    cost: float


def deal(
    block: Block, count: int, load: Floats, memory: Floats, closed: Bools, costs: Costs, cost: Cost
) -> Dealt:
    """Deal ``count`` of ``block`` to ranks with ``load`` [ranks] seconds and ``memory`` [ranks, 3]
    bytes; none to a slot, such as a host, that is ``closed`` [ranks / width]."""
    if block.width == 1 and count <= MANY:
        return _one_by_one(block, count, load, memory, closed, costs, cost)
    return _by_rows(block, count, load, memory, closed, costs)


def _one_by_one(
    block: Block, count: int, load: Floats, memory: Floats, closed: Bools, costs: Costs, cost: Cost
) -> Dealt:
    """Only the rank that got the last block is worked out anew."""
    before = costs(load, memory)
    added = costs(load + block.seconds[0], memory + block.storage[0]) - before
    added[closed] = np.inf
    seconds, storage = float(block.seconds[0]), block.storage[0].tolist()
    order = np.argsort(added, kind="stable")[:count]
    fresh = list(zip(added[order].tolist(), order.tolist(), strict=True))[::-1]
    again: list[tuple[float, int]] = []
    held: dict[int, tuple[float, list[float], float]] = {}
    slots = []
    for _ in range(count):
        if again and (not fresh or again[0] < fresh[-1]):
            rank = heapq.heappop(again)[1]
            own, sizes, _ = held[rank]
        else:
            rank = fresh.pop()[1]
            own, sizes = float(load[rank]), memory[rank].tolist()
        own, sizes = own + seconds, _plus(sizes, storage)
        held[rank] = own, sizes, cost(own, sizes)
        more = cost(own + seconds, _plus(sizes, storage))
        heapq.heappush(again, (more - held[rank][2], rank))
        slots.append(rank)
    for rank, (_, _, after) in held.items():
        before[rank] = after
    return Dealt(tuple(slots), float(before.sum()))


def _plus(sizes: Sequence[float], more: Sequence[float]) -> list[float]:
    return [sizes[0] + more[0], sizes[1] + more[1], sizes[2] + more[2]]


def _by_rows(
    block: Block, count: int, load: Floats, memory: Floats, closed: Bools, costs: Costs
) -> Dealt:
    """A block costs its ranks more than the one before it: the cheapest of all steps are taken."""
    width, places = block.width, len(closed)
    load, memory = load.reshape(places, width), memory.reshape(places, width, 3)
    steps, rows = [costs(load, memory).sum(axis=1)], ROWS
    while True:
        while len(steps) <= min(rows, count):
            load, memory = load + block.seconds, memory + block.storage
            steps.append(costs(load, memory).sum(axis=1))
        reached = np.array(steps)
        added = np.maximum.accumulate(np.diff(reached, axis=0), axis=0)
        added[:, closed] = np.inf
        chosen = np.argsort(added, axis=None, kind="stable")[:count]
        enough = len(chosen) == count and np.isfinite(added.flat[chosen[-1]])
        if rows >= count or (enough and chosen.max() < added.size - places):
            break  # nothing of the last row is taken: none after it is
        rows *= 2
    slots = chosen % places
    counts = np.bincount(slots, minlength=places)
    total = float(reached[counts, np.arange(places)].sum())
    return Dealt(tuple((slots * width).tolist()), total)
