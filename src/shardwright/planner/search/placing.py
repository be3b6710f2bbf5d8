"""Where blocks go: each to the ranks where it adds least, and quickly, the longest first."""

# Three ways to place, from careful to quick. ``spread`` puts the blocks of one option where they
# add least to what ranks cost, with everything else in place; blocks that are alike are dealt at
# once (``deal``), for the k-th on a rank costs more than the one before it. ``placed`` makes a
# start: every item spread in turn, the widest first, since a host-wide block finds no gap later.
# ``longest_first`` judges thousands of choices of options by the slowest rank alone.
#
# Of many ranks only the least busy are looked at (``_nearest``). That is no guess: costs are
# convex, so what a block adds to the least busy of the others bounds what it adds to any of them,
# and where the bound is not met all ranks are looked at after all.

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.planner.search.space import Bools, Floats, Ints, OptionBlock, Space, open_slots
from shardwright.planner.search.state import MAX_RATIO, NEAR_SLOTS, SearchState, least_first

ROUNDED_UP = 1 + 1e-9  # times, that rounding may take
MANY_SLOTS = 4  # times as many as are looked at, for these to be looked at first
SPARE_ROWS = 2  # blocks of a slot that are looked at first, above twice an even share

# What ranks cost at their seconds and bytes.
Costs = Callable[[Floats, Floats], Floats]


class Lots(NamedTuple):
    """Lots of blocks; those of a lot are alike. How many there are (``counts`` [lots]), what one
    takes (``seconds`` [lots, width], ``storage`` [lots, width, 3]), and the slots, such as hosts,
    that they may go to: ``load`` [lots, slots, width] and ``memory`` [lots, slots, width, 3] there
    before, ``closed`` [lots, slots] where they may not."""

    counts: Ints
    seconds: Floats
    storage: Floats
    load: Floats
    memory: Floats
    closed: Bools

    def at(self, kept: Ints) -> Lots:
        """Some of the lots."""
        counts, seconds, storage, load, memory, closed = self
        return Lots(
            counts[kept], seconds[kept], storage[kept], load[kept], memory[kept], closed[kept]
        )


def at_least(lots: Lots, costs: Costs) -> Floats:
    """What all slots cost at least with each lot: as if every block cost what the cheapest slot
    takes for the first."""
    before = costs(lots.load, lots.memory)
    after = costs(lots.load + lots.seconds[:, None], lots.memory + lots.storage[:, None])
    added = np.add.reduce(after - before, axis=2)
    if lots.closed.any():
        added[lots.closed] = np.inf
    least: Floats = np.add.reduce(before, axis=(1, 2)) + lots.counts * added.min(axis=1)
    return least


def deal(lots: Lots, costs: Costs) -> tuple[Ints, Bools, Floats]:
    """Deals the blocks of each lot: how many lie on each slot [lots, slots], whether any slot was
    open, and what the dearest of the blocks adds [lots].

    A block costs its slot more than the one before it, so the cheapest of all steps are taken, in
    as many rows as are needed.
    """
    number, places, _ = lots.load.shape
    most = int(lots.counts.max())
    rows = min(most, 2 * -(-most // places) + SPARE_ROWS)
    while True:
        # What a slot costs with 0, 1, 2 ... blocks: the differences are what each further block
        # adds. As costs are convex they rise, so the cheapest of all steps of all slots are always
        # the first ones of each slot, and taking them in one go is what placing block after block
        # would come to.
        step = np.arange(rows + 1.0)[:, None, None]
        reached = np.add.reduce(
            costs(
                lots.load[:, None] + step * lots.seconds[:, None, None],
                lots.memory[:, None] + step[..., None] * lots.storage[:, None, None],
            ),
            axis=3,
        )
        # Rounding (and the cut at MAX_RATIO) may make a later step cheaper than the one before it.
        # Then a slot would be given its third block without its second, so steps are kept from
        # falling.
        added = np.maximum.accumulate(reached[:, 1:] - reached[:, :-1], axis=1)
        if lots.closed.any():
            added = np.where(lots.closed[:, None], np.inf, added)
        taken, last = _cheapest(added.reshape(number, -1), lots.counts)
        taken = taken.reshape(added.shape)
        # How many blocks a slot gets is not known before. Twice an even share is enough for nearly
        # all; where the last row was reached, the slot might have taken more, and more rows are
        # looked at.
        if rows == most or not (taken[:, -1].any() or np.isinf(last).any()):
            break  # nothing of the last row is taken: none after it is
        rows = min(2 * rows, most)
    counts: Ints = taken.sum(axis=1)
    opened: Bools = np.logical_or.reduce(~lots.closed, axis=1)
    return counts, opened, last


def _cheapest(added: Floats, counts: Ints) -> tuple[Bools, Floats]:
    """The ``counts`` [lots] cheapest of ``added`` [lots, steps], the first of equal ones; and what
    the last of them adds, without end where there are too few."""
    lots, steps = added.shape
    last = np.sort(added)[np.arange(lots), np.minimum(counts, steps) - 1]
    last[counts > steps] = np.inf
    cheaper, alike = added < last[:, None], added == last[:, None]
    # Many slots are exactly alike at first, so what is equally cheap is dealt in order until the
    # count is met: not one block too many, and the same slots every time.
    left = counts - cheaper.sum(axis=1)
    return cheaper | (alike & (alike.cumsum(axis=1) <= left[:, None])), last


Fallen = tuple[float, tuple[tuple[int, ...], ...]]  # seconds of the worst rank, and slots


def spread(state: SearchState, item: int, option: int) -> tuple[int, ...] | None:
    """Where the blocks of ``option`` would go, one after the other, so that all ranks cost
    least; None if the rules leave no place. The item must lie nowhere."""
    chosen = state.space.items[item].options[option]
    if chosen.is_uniform:
        mask = state.allowed(item)
        return (0,) if mask is None or mask.all() else None
    everywhere, blocks = chosen.everywhere, chosen.blocks
    load, memory = state.load + everywhere if everywhere else state.load, state.memory
    alike = blocks[0] is blocks[-1]
    if alike and blocks[0].width == 1 and not state.space.constrained:
        near = _with_room(state, blocks[0], len(blocks), load)
        if near is not None:
            return _dealt(state, item, blocks[0], len(blocks), load, near)
    if alike and blocks[0].width < state.space.ranks and len(blocks) > 1:
        return _dealt(state, item, blocks[0], len(blocks), load, None)
    mask = state.allowed(item)
    if blocks[0].width == state.space.ranks:
        return (0,) * len(blocks) if mask is None or mask.all() else None
    costs = state.cost(load, memory) if everywhere else state.rank_costs()
    if len(blocks) == 1:
        slot = _place(state, blocks[0], load, memory, costs, mask)
        return None if slot is None else (slot,)
    # Blocks that differ cannot be dealt by steps of one size: each is placed with the ones before
    # it in place.
    load, memory, costs = load.copy(), memory.copy(), costs.copy()
    slots: list[int] = []
    for block in blocks:
        slot = _place(state, block, load, memory, costs, mask)
        if slot is None:
            return None
        ranks = slice(slot, slot + block.width)
        load[ranks] += block.seconds
        memory[ranks] += block.storage
        costs[ranks] = state.cost(load[ranks], memory[ranks])
        slots.append(slot)
    return tuple(slots)


def _with_room(state: SearchState, block: OptionBlock, count: int, load: Floats) -> Ints | None:
    """As many of the least busy ranks as there are blocks of one rank each, if each has room
    for all of them: where nothing is full no other rank takes one for less."""
    near = least_first(load, min(count, len(load)))
    # Room for all of the blocks on each rank, though none will get all: then bytes cannot matter,
    # however they are dealt, and only seconds decide.
    filled = state.memory[near] + count * block.storage[0]
    return near if (filled <= state.limits).all() else None


def _dealt(
    state: SearchState, item: int, block: OptionBlock, count: int, load: Floats, near: Ints | None
) -> tuple[int, ...] | None:
    """``spread`` of ``count`` blocks that are alike, over the ranks ``near`` or over all."""
    if near is not None and count == 1:
        return (int(near[0]),)
    width, others = block.width, np.inf
    load, memory = load.reshape(-1, width), state.memory.reshape(-1, width, 3)
    if near is None and not state.space.constrained:
        near, others = _nearest(state, block, count, load)
    every = np.arange(len(load))
    closed = state.closed(item, width)
    for some in (every,) if near is None else (near, every):
        lots = Lots(
            np.array([count]),
            block.seconds[None],
            block.storage[None],
            load[None, some],
            memory[None, some],
            closed[None, some],
        )
        counts, opened, dearest = deal(lots, state.cost)
        if some is every or float(dearest[0]) <= others:
            break
    return tuple(np.repeat(some * width, counts[0]).tolist()) if opened[0] else None


def _nearest(
    state: SearchState, block: OptionBlock, count: int, load: Floats
) -> tuple[Ints | None, float]:
    """Slots that are least busy, some more than ``count``, and what a block adds at least to
    any other one; None where that leaves few out. ``load`` is that of slots [slots, width].

    What a rank costs is convex, and so is what a block adds to it: a slot pays at least as much
    as if its ranks were all as busy as they are on average.
    """
    number, shortest = count + NEAR_SLOTS, float(block.seconds.min())
    if MANY_SLOTS * number > len(load):
        return None, np.inf
    busy = load.sum(axis=1) / block.width
    near = least_first(busy, number)
    busy[near] = np.inf
    least = np.array([busy.min()])
    # Above the cut costs are flat, and a bound by their slope does not hold.
    if least + shortest >= MAX_RATIO * state.target:
        return None, np.inf
    added = state.time_cost(least + shortest) - state.time_cost(least)
    return near, block.width * float(added[0]) * ROUNDED_UP


def _place(
    state: SearchState,
    block: OptionBlock,
    load: Floats,
    memory: Floats,
    costs: Floats,
    mask: Bools | None,
) -> int | None:
    """The slot where a block adds least to ``costs``, those of the ranks as they are."""
    load, memory = load.reshape(-1, block.width), memory.reshape(-1, block.width, 3)
    costs = costs.reshape(-1, block.width)
    near, others = (None, np.inf) if mask is not None else _nearest(state, block, 1, load)
    if near is not None:
        after = state.cost(load[near] + block.seconds, memory[near] + block.storage)
        added = (after - costs[near]).sum(axis=1)
        if added.min() <= others:
            return int(near[added.argmin()]) * block.width
    added = (state.cost(load + block.seconds, memory + block.storage) - costs).sum(axis=1)
    if mask is not None:
        slots = open_slots(mask, block.width)
        if not slots.any():
            return None
        added = np.where(slots, added, np.inf)
    return int(added.argmin()) * block.width


def longest_first(
    space: Space, options: Sequence[int], below: float = float("inf")
) -> Fallen | None:
    """Seconds of the worst rank and the slots when blocks go, widest and longest first, to the
    least busy ranks with room; None if a block finds none, or a rank is not ``below`` then."""
    everywhere = work = longest = 0.0
    blocks: list[tuple[int, float, int, int]] = []
    slots = []
    for item, number in enumerate(options):
        option = space.items[item].options[number]
        everywhere += option.everywhere
        work += option.total_seconds
        longest = max(longest, option.largest - option.everywhere)
        blocks += space.blocks_of(item, number)
        slots.append([0] * len(option.widths))
    # No placement at all is below an even share of the work, nor below the longest block beside
    # what is everywhere. Most tries end here, before anything is sorted.
    if max(work / space.ranks, everywhere + longest) >= below * ROUNDED_UP:
        return None
    load: Floats = np.full(space.ranks, everywhere)
    memory: Floats = np.zeros((space.ranks, 3))
    blocks.sort()
    for start, (width, _, item, index) in enumerate(blocks):
        # Widths are negative, so that sorting puts the widest first; once one of a single rank
        # comes, only such are left, for which a heap finds the least busy rank at once.
        if width == -1:
            if not _singles_placed(space, options, blocks[start:], load, memory, slots, below):
                return None
            break
        block = space.items[item].options[options[item]].blocks[index]
        slot = _widely_placed(space, item, block, load, memory)
        if slot is None:
            return None
        load[slot : slot - width] += block.seconds
        memory[slot : slot - width] += block.storage
        slots[item][index] = slot
    seconds = float(load.max())
    return (seconds, tuple(map(tuple, slots))) if seconds < below else None


def _widely_placed(
    space: Space, item: int, block: OptionBlock, load: Floats, memory: Floats
) -> int | None:
    """The first of the ranks, such as a host, that are least busy and have room."""
    width = block.width
    if width == space.ranks:
        return 0
    busy: Floats = np.maximum.reduce(load.reshape(-1, width), axis=1)
    for tier, _ in space.scarce_tiers:
        filled = memory[:, tier].reshape(-1, width) + block.storage[:, tier]
        busy[np.maximum.reduce(filled, axis=1) > space.capacity[tier]] = np.inf
    allowed = space.items[item].allowed
    if allowed is not None:
        busy[~open_slots(allowed, width)] = np.inf
    place = int(busy.argmin())
    return place * width if np.isfinite(busy[place]) else None


def _singles_placed(
    space: Space,
    options: Sequence[int],
    blocks: Sequence[tuple[int, float, int, int]],
    load: Floats,
    memory: Floats,
    slots: list[list[int]],
    below: float,
) -> bool:
    """Places blocks of one rank each; False if one finds no room, or its rank is not ``below``."""
    tiers = [tier for tier, _ in space.scarce_tiers]
    filled = [(tier, memory[:, tier].tolist(), space.capacity[tier]) for tier in tiers]
    ranks = [(seconds, rank) for rank, seconds in enumerate(load.tolist())]
    heapq.heapify(ranks)
    for _, minus_seconds, item, index in blocks:
        entry = space.items[item]
        allowed, sizes = entry.allowed, entry.options[options[item]].single
        passed = []
        while ranks:
            busy, rank = ranks[0]
            # The rank on top of the heap is the least busy of those that are left, so no other one
            # is below the limit either.
            if busy - minus_seconds >= below:
                return False
            for tier, own, limit in filled:
                if own[rank] + sizes[tier] > limit:
                    break
            else:
                if allowed is None or allowed[rank]:
                    break
            # A rank without room for this block may have room for the next, smaller one: it is put
            # back when the block is placed.
            passed.append(heapq.heappop(ranks))
        else:
            return False
        for tier, own, _ in filled:
            own[rank] += sizes[tier]
        heapq.heapreplace(ranks, (busy - minus_seconds, rank))
        for back in passed:
            heapq.heappush(ranks, back)
        slots[item][index] = rank
    for seconds, rank in ranks:
        load[rank] = seconds
    return True


def placed(space: Space, chosen: Ints, target: float) -> SearchState:
    """The chosen options, widest blocks first, then by what they fill of a rank."""
    state = SearchState(space, target)

    def weight(item: int) -> tuple[float, ...]:
        option = space.items[item].options[int(chosen[item])]
        filled = (np.array(option.largest_storage) / space.capacity_array).max()
        return (-max(option.widths), -max(option.largest / target, float(filled)))

    # What rules leave the fewest ranks goes first: any other item still finds a place later, this
    # one may not.
    for item in sorted(range(len(space.items)), key=lambda i: (_freedom(space, i), weight(i))):
        slots = spread(state, item, int(chosen[item]))
        if slots is not None:
            state.put(item, int(chosen[item]), slots)
        elif not _put_anywhere(state, item):
            _make_room(state, item)
    return state


def _freedom(space: Space, item: int) -> tuple[int, int]:
    """Items that rules leave few ranks go first: ranks left, and items it must avoid."""
    rule = space.items[item]
    ranks = space.ranks + 1 if rule.allowed is None else int(rule.allowed.sum())
    return (ranks, -len(rule.apart_from)) if space.constrained else (0, 0)


def _put_anywhere(state: SearchState, item: int) -> bool:
    """Take the option that costs least where the chosen one is ruled out; False if none is left."""
    found = []
    for option in range(len(state.space.items[item].options)):
        slots = spread(state, item, option)
        if slots is not None:
            state.put(item, option, slots)
            found.append((float(state.rank_costs().sum()), option, slots))
            state.drop(item)
    if found:
        _, option, slots = min(found)
        state.put(item, option, slots)
    return bool(found)


def _make_room(state: SearchState, item: int) -> None:
    """Take the items off that this one must avoid, place it, and place them again."""
    # Items that must be apart may have taken every rank that is open to this one. They are the only
    # ones in its way, so they alone are placed again after it.
    others = [o for o in state.space.items[item].apart_from if state.options[o] >= 0]
    for other in others:
        state.drop(other)
    for one in (item, *others):
        _put_anywhere(state, one)
