"""Where every block lies now, what that puts on each rank, and moves with their exact effect.

A state may be over capacity on the way. What is minimised is a sum over the ranks: the rank's
seconds, relative to a target, to a power (so the worst ranks count most but a change of the others
is seen too), plus a penalty for the share of its capacity that is exceeded.
"""

# The power stands for "the slowest rank": at 8 the search still sees what helps the second and the
# third, at 64 little but the first. It is a power of two so that it is taken by squaring, and a
# ratio is cut at MAX_RATIO before that. Costs of ranks are kept up to date block by block
# (``_changed``); whoever changes load or memory in another way has to drop them.

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwright.planner.search.space import (
    Assignment,
    Bools,
    Floats,
    Ints,
    OptionBlock,
    Space,
    fill,
    open_slots,
)

OVERFLOW_PENALTY = 1e9  # times what the slowest rank costs
MAX_RATIO = 1e3  # of a rank to the target; above it powers overflow
NEAR_SLOTS = 32  # the least busy ones, which are looked at first where there are many
MANY_RANKS = 2048  # most of which no block is near


class Singles(NamedTuple):
    """The items of which blocks of one rank lie on a rank, and what one of each takes: ``seconds``
    [items] and ``storage`` [items, 3]."""

    items: list[int]
    seconds: Floats
    storage: Floats


@dataclass
class Known:
    """What holds as of one ``change`` of a state, worked out when first asked for: the ranks
    without an item (``bare``), whether none holds too much (``room``), the ``idle`` ones."""

    change: int = -1
    bare: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    room: bool | None = None
    idle: tuple[Ints, float] | None = None


@dataclass
class SearchState:
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

    def __post_init__(self) -> None:
        count = len(self.space.items)
        self.options = self.options or [-1] * count
        self.slots = self.slots or [()] * count
        self.load: Floats = np.zeros(self.space.ranks)
        self.memory: Floats = np.zeros((self.space.ranks, 3))
        self.on_rank: list[set[int]] = [set() for _ in range(self.space.ranks)]
        self.uniform: set[int] = set()  # items that lie on every rank, and on none in ``on_rank``
        self.change = 0  # how many changes there were
        self.limits = np.array(self.space.capacity, dtype=np.float64)
        self._complete = False  # whether every item was seen to lie somewhere, and none was dropped
        self._costs: Floats | None = None  # of ranks, until anything changes
        self._singles: dict[int, Singles] = {}  # of ranks, until something there changes
        self._last = Known()

    def cost(self, load: Floats, memory: Floats) -> Floats:
        """What each rank contributes to the sum that is minimised."""
        result = self.time_cost(load)
        for tier, scale in self.space.scarce_tiers:
            filled = memory[..., tier]
            # Most of a search happens where nothing is over its capacity, and this is its innermost
            # loop: one maximum is much cheaper than the four passes over all ranks below.
            if np.maximum.reduce(filled, axis=None, initial=0.0) <= self.limits[tier]:
                continue  # no rank has too much
            over = filled * scale
            over -= 1.0
            np.maximum(over, 0.0, out=over)
            over *= self.penalty
            result += over
        return result

    def time_cost(self, load: Floats) -> Floats:
        """``cost`` of ranks that have room for what they hold."""
        # Cut before the power is taken: a ratio of 1e5 to the power of 64 is more than a double can
        # hold, and infinite costs of two ranks cannot be compared.
        result: Floats = np.minimum(load / self.target, MAX_RATIO)
        for _ in range(int(self.power).bit_length() - 1):  # a power of two: squared so many times
            result *= result
        return result

    def sharpen(self, power: float) -> None:
        """Another power; a byte too many stays worse than any time that a rank takes now."""
        self._costs = None
        self.power = power
        # With the power the costs of slow ranks grow by orders of magnitude. A penalty that stayed
        # as it was would become small beside them, and the search would pay for speed with memory
        # that is not there.
        ratio = min(max(self.worst / self.target, 1.0), MAX_RATIO)
        self.penalty = OVERFLOW_PENALTY * ratio**power

    def rank_costs(self) -> Floats:
        """``cost`` of every rank as it is, until anything changes."""
        if self._costs is None:
            self._costs = self.cost(self.load, self.memory)
        return self._costs

    @property
    def fits(self) -> bool:
        """Whether every item lies somewhere and no rank is over capacity."""
        # This is asked after every step. An item without a place can only come to be by `drop`, so
        # once all items were seen to lie somewhere the list is not looked through again.
        if not self._complete:
            self._complete = min(self.options, default=0) >= 0
        known = self._known
        if known.room is None:
            known.room = bool((self.memory <= self.limits).all())
        return self._complete and known.room

    @property
    def _known(self) -> Known:
        """What is known of the state as it is."""
        if self._last.change != self.change:
            self._last = Known(self.change)
        return self._last

    @property
    def worst(self) -> float:
        """Seconds of the slowest rank."""
        return float(self.load.max())

    def copy(self) -> SearchState:
        """Another one that is the same so far."""
        other = SearchState(self.space, self.target, self.power, [*self.options], [*self.slots])
        other.penalty, other.on_rank = self.penalty, [set(own) for own in self.on_rank]
        other.uniform, other._singles = {*self.uniform}, {**self._singles}
        other.load, other.memory = self.load.copy(), self.memory.copy()
        return other

    def assignment(self) -> Assignment:
        """A copy of the choice."""
        return Assignment(tuple(self.options), tuple(self.slots))

    def blocks(self, item: int, option: int | None = None) -> tuple[OptionBlock, ...]:
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

    def drop(self, item: int) -> None:
        """Take an item off its ranks and forget where it lay."""
        self.take(item)
        self.options[item], self.slots[item] = -1, ()
        self._complete = False

    @property
    def idle(self) -> tuple[Ints, float]:
        """The ranks that are least busy, and what any other one takes at least."""
        known = self._known
        if known.idle is None:
            near = least_first(self.load, NEAR_SLOTS)
            known.idle = near, float(np.delete(self.load, near).min())
        return known.idle

    def bare(self, item: int) -> tuple[Floats, Floats]:
        """The ranks' load and memory without an item, until anything changes."""
        bare = self._known.bare
        if item not in bare:
            load, memory = self.load.copy(), self.memory.copy()
            option = self.space.items[item].options[self.options[item]]
            fill(option, self.slots[item], load, memory, -1)
            bare[item] = load, memory
        return bare[item]

    @contextlib.contextmanager
    def without(self, item: int) -> Iterator[None]:
        """The ranks' load and memory without an item, while it is looked where else it may go."""
        # The arrays are copied and put back, not added to and subtracted from: sums of doubles
        # do not come back to what they were, so every look would change a state a little. `change`
        # stays as it was: what is known of the present change (`idle`, `bare`, room) is of the
        # ranks with the item and must not be asked for inside.
        load, memory, costs = self.load, self.memory, self._costs
        self.load, self.memory = load.copy(), memory.copy()
        self._costs = None if costs is None else costs.copy()
        self.add(item, -1)
        yield
        self.load, self.memory, self._costs = load, memory, costs

    def _apply(self, item: int, sign: int) -> None:
        self.add(item, sign)
        self.change += 1
        option, slots = self.space.items[item].options[self.options[item]], self.slots[item]
        width = option.widths[0]
        # Items on all ranks are kept apart from `on_rank`: no move of a block can help them, and
        # each would have to be listed on every rank whenever it is put or taken.
        if width == self.space.ranks > 1:
            (self.uniform.add if sign > 0 else self.uniform.discard)(item)
        for slot in set(slots) if width < self.space.ranks else ():
            for rank in range(slot, slot + width):
                (self.on_rank[rank].add if sign > 0 else self.on_rank[rank].discard)(item)
                self._singles.pop(rank, None)

    def add(self, item: int, sign: int) -> None:
        """Add what an item takes to its ranks, or take it off: ``sign`` is 1 or -1. Which items lie
        where stays as it is."""
        option, slots = self.space.items[item].options[self.options[item]], self.slots[item]
        fill(option, slots, self.load, self.memory, sign)
        width = option.widths[0]
        # Costs are worked out anew for the ranks that changed alone. Where all of them did, they
        # are dropped, which saves working them out several times before anybody asks.
        if option.everywhere or width == self.space.ranks:
            self._costs = None
        elif width == 1:
            self._changed(list(slots))
        else:
            for slot in slots:
                self._changed(slice(slot, slot + width))

    def _add_block(self, block: OptionBlock, slot: int, sign: int) -> None:
        ranks = slice(slot, slot + block.width)
        self.load[ranks] += sign * block.seconds
        self.memory[ranks] += sign * block.storage
        self._changed(ranks)

    def _changed(self, ranks: slice | list[int]) -> None:
        """Costs of ranks, where they are known, are worked out anew."""
        if self._costs is not None:
            self._costs[ranks] = self.cost(self.load[ranks], self.memory[ranks])

    def reached(self, item: int, option: int, slots: tuple[int, ...]) -> tuple[float, bool]:
        """Seconds of the slowest rank with an item, which lies nowhere, at ``slots``, and whether
        the ranks that hold it then have room for that."""
        chosen = self.space.items[item].options[option]
        # One block on all ranks is a few runs of like shards, so the slowest of each run says it
        # all. Of others every rank may get another sum, and only adding them up tells.
        if not chosen.is_uniform:
            load, memory = self.load.copy(), self.memory.copy()
            fill(chosen, slots, load, memory, 1)
            return float(load.max()), bool((memory <= self.limits).all())
        worst, fits = 0.0, True
        for ranks, seconds, storage in chosen.stretches:
            worst = max(worst, float(self.load[ranks].max()) + chosen.everywhere + seconds)
            fits = fits and bool((self.memory[ranks].max(axis=0) + storage <= self.limits).all())
        return worst, fits

    def move(self, item: int, number: int, slot: int) -> None:
        """Move one block elsewhere."""
        block, old = self.blocks(item)[number], self.slots[item][number]
        self._add_block(block, old, -1)
        self._add_block(block, slot, 1)
        self.change += 1
        slots = list(self.slots[item])
        slots[number] = slot
        self.slots[item] = tuple(slots)
        # An item may have several blocks on one rank. It leaves the old rank only if no other block
        # of it is there, or the rank would be taken to be free of it and never be helped.
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
        # Only blocks of one rank are among `singles`, and all blocks of an item are as wide, so of
        # a wide block that moved nothing that is kept here has changed.
        for rank in (old, slot):
            self._singles.pop(rank, None)

    def singles(self, rank: int) -> Singles:
        """One block of each item that has any of width 1 on a rank; an item's blocks are alike."""
        if rank not in self._singles:
            # Sorted, for a set of numbers has no order that may be relied on, and of equally good
            # moves the first is taken.
            found = [
                (item, block)
                for item in sorted(self.on_rank[rank])
                if (block := self.blocks(item)[0]).width == 1
            ]
            seconds = np.array([block.seconds[0] for _, block in found])
            storage = np.array([block.storage[0] for _, block in found]).reshape(-1, 3)
            self._singles[rank] = Singles([item for item, _ in found], seconds, storage)
        return self._singles[rank]

    def allowed(self, item: int) -> Bools | None:
        """Ranks that the rules leave an item as things stand; None for all."""
        if not self.space.constrained:
            return None
        rule = self.space.items[item]
        mask = np.ones(self.space.ranks, bool) if rule.allowed is None else rule.allowed.copy()
        # Rules between items depend on where the others lie just now, so this mask is made anew
        # each time and never kept with the item.
        for other in rule.apart_from:
            if self.options[other] >= 0:
                for block, slot in zip(self.blocks(other), self.slots[other], strict=True):
                    mask[slot : slot + block.width] = False
        return mask

    def closed(self, item: int, width: int) -> Bools:
        """The slots for a block, such as hosts, that the rules close to an item."""
        mask = self.allowed(item)
        if mask is None:
            return np.zeros(self.space.ranks // width, bool)
        return ~open_slots(mask, width)


def restored(space: Space, target: float, power: float, found: Assignment) -> SearchState:
    """The state of an assignment."""
    state = SearchState(space, target, power)
    for item, (option, slots) in enumerate(zip(found.options, found.slots, strict=True)):
        state.put(item, option, slots)
    return state


def least_first(values: Floats, count: int) -> Ints:
    """The places of the ``count`` least values, in order; of equal ones the first."""
    if count == 1:
        return np.array([values.argmin()])
    # Not argpartition: of equal values it returns any, which may differ between versions of numpy
    # and between machines, and plans are compared byte for byte.
    last = np.partition(values, count - 1)[count - 1]
    near = values < last
    near[np.flatnonzero(values == last)[: count - int(near.sum())]] = True
    return np.flatnonzero(near)
