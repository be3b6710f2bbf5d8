"""Another option for an item on the worst rank, with everything placed anew around it, or in place.

Moves keep the rest where it is, so they miss changes that only pay off when other blocks make room.
Here a change of option is judged by a quick placement of all blocks, longest first; what looks
promising is placed properly and improved. At the end no item alone can do better by another option.
"""

# Annealing looks at options only and places them anew each time; moves look at places and keep
# most options. Each finds what the other cannot. Annealing is for few items on few ranks, where a
# placement takes next to no time, and only for what moves leave far from its bound.

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from shardwright.core.quantities import SAME_SECONDS
from shardwright.planner.search.placing import ROUNDED_UP, Fallen, longest_first, spread
from shardwright.planner.search.space import Assignment, Floats, ItemOption, Space
from shardwright.planner.search.state import SearchState, restored

MAX_STEPS = 40
WORST_RANKS = 2
PROMISING = 1.02  # of the best so far, for a quick placement to be improved
IMPROVED_PER_STEP = 3
MAX_WORK = 1.25  # times the work of an item's cheapest option, plus this share of the target:
WORK_SLACK = 0.15
SHARP, SHARPEST = 16.0, 64.0  # powers; of the ranks little but the slowest counts at the highest
MAX_SWEEPS = 8
LEAST_ROOM = 1e-15  # seconds that rounding may take
MAX_ANNEALED, MOST_ANNEALED_RANKS = 40, 128  # more ranks take long
ANNEALING_STEPS, ANNEALING_PLACED = 600, 6_000  # steps, and items placed in all of them, at most
HEAT = 0.05  # share by which a change may be slower at first
MOVED, IMPROVED = 6, 2  # of the options that annealing finds, blocks moved and options changed

Improve = Callable[[SearchState], SearchState]


def polish(
    space: Space, best: Assignment, target: float, good: float, improve: Improve
) -> SearchState:
    """The best state found from ``best``; ends at ``good`` seconds or when no change helps."""
    state = restored(space, target, SHARPEST, best)
    # Every step places all blocks anew for dozens of changes. Of many items a single one changes
    # little, and what time there is goes to more starts instead (`STARTS_OF_MANY`).
    if space.has_many or space.ranks == 1:
        return state
    for _ in range(MAX_STEPS):
        if state.worst <= good:
            break
        better = _step(space, state, target, improve)
        if better is None:
            break
        state = better
    return state


def _step(space: Space, state: SearchState, target: float, improve: Improve) -> SearchState | None:
    """The first promising change that improves on ``state``."""
    found = []
    for item, option in _changes(space, state, target):
        options = [*state.options]
        options[item] = option
        # A little slower than the best so far is good enough here, for what falls quickly is
        # improved afterwards; a stricter limit would drop changes that only need their blocks
        # moved.
        fallen = longest_first(space, options, state.worst * PROMISING)
        if fallen is not None:
            found.append((fallen[0], item, option, fallen[1]))
    found.sort(key=lambda entry: entry[:3])
    for _, item, option, placed in found[:IMPROVED_PER_STEP]:
        options = [*state.options]
        options[item] = option
        tried = improve(restored(space, target, SHARP, Assignment(tuple(options), placed)))
        if tried.fits and tried.worst < state.worst * (1 - SAME_SECONDS):
            return tried
    return None


def _changes(space: Space, state: SearchState, target: float) -> Iterator[tuple[int, int]]:
    """Other options, of affordable work, for the items of the worst ranks."""
    order = np.argsort(-state.load, kind="stable")[:WORST_RANKS]
    for item in sorted({item for rank in order for item in state.on_rank[int(rank)]}):
        options = space.items[item].options
        # An option that takes far more work in all cannot pay off by lying better: the work of all
        # ranks is what the bound is made of. The share of the target is for items so small that any
        # option is dear beside their cheapest.
        most = space.least_work[item] * MAX_WORK + WORK_SLACK * target
        for number, option in enumerate(options):
            if number != state.options[item] and option.total_seconds <= most:
                yield item, number


def annealed(
    space: Space,
    best: Assignment,
    target: float,
    improve: Callable[..., SearchState],
    over: Callable[[], bool],
    seed: int = 0,
) -> SearchState:
    """The best state found by changes of one or two items' options at a time, judged by a quick
    placement. Changes for the worse are taken too, ever smaller ones; the best few are improved,
    by moves alone first."""
    state = restored(space, target, SHARPEST, best)
    draw = random.Random(seed).random  # the same problem is searched the same way
    most = state.worst * space.ranks  # of all work: no better plan has as much
    work = [[option.total_seconds for option in item.options] for item in space.items]
    slack = most - sum(space.least_work)
    # An option that alone takes more work above the cheapest one than a better plan may have in all
    # is in none, so it need not be drawn.
    usable = [
        [number for number, own in enumerate(its) if own <= least + slack]
        for its, least in zip(work, space.least_work, strict=True)
    ]
    best_seconds = state.worst
    options, seconds = best.options, best_seconds
    found: dict[tuple[int, ...], Fallen] = {}
    failed: dict[tuple[int, ...], float] = {}  # what a quick placement is not below
    steps = min(ANNEALING_STEPS, ANNEALING_PLACED // len(space.items))
    for step in range(steps):
        if over():
            break
        changed = list(options)
        for _ in range(1 + step % 2):
            item = int(draw() * len(changed))
            changed[item] = usable[item][int(draw() * len(usable[item]))]
        # As in any annealing the limit cools to none. It is drawn before the placement and given to
        # it, so that a placement ends as soon as a rank is above it.
        below = seconds * (1 + HEAT * (1 - step / steps) * draw())
        tried = tuple(changed)
        # The same few options are drawn again and again. What did not come below a higher limit
        # does not come below a lower one.
        if failed.get(tried, 0.0) >= below:
            continue
        if sum(own[number] for own, number in zip(work, tried, strict=True)) < most:
            placed = found.get(tried) or longest_first(space, tried, below)
            if placed is None:
                failed[tried] = below
            elif placed[0] < below:
                options, seconds = tried, placed[0]
                found[options] = placed
    # Moving blocks alone is far quicker than changing options as well, so it chooses which few of
    # what was found are worth the whole of it.
    nearest = sorted(found.items(), key=lambda each: each[1])[:MOVED]
    moved = [
        improve(restored(space, target, SHARP, Assignment(chosen, slots)), reoption=False)
        for chosen, (_, slots) in nearest
    ]
    moved.sort(key=lambda own: (not own.fits, own.worst))
    for start in moved[:IMPROVED]:
        other = improve(start)
        if other.fits and other.worst < state.worst * (1 - SAME_SECONDS):
            state = other
    return state


class ItemChange(NamedTuple):
    """An item's option on other ranks, and the seconds of the slowest rank then."""

    seconds: float
    option: int
    slots: tuple[int, ...]


def settled(state: SearchState, good: float, over: Callable[[], bool]) -> SearchState:
    """The state with one item after the other given an option, on the ranks that are least busy
    without it, that makes the slowest rank faster; until none does, or all are ``good``."""
    state.sharpen(SHARPEST)
    for _ in range(MAX_SWEEPS):
        before = state.worst
        for item in relieving(state, before):
            below = state.worst * (1 - SAME_SECONDS)
            if state.worst <= good or over():
                break
            best = min(changes(state, item, below), default=None)
            if best is not None:
                state.take(item)
                state.put(item, best.option, best.slots)
        if state.worst >= before:
            break
    return state


def relieving(state: SearchState, below: float) -> list[int]:
    """Items without which every rank may be ``below`` some seconds."""
    slow = np.flatnonzero(state.load >= below)
    if not len(slow):
        return list(range(len(state.options)))
    # The slowest rank gets faster only if all that are as slow do. An item that is missing on one
    # of them leaves that one as it is, whatever becomes of the item.
    held = set.intersection(*(state.on_rank[int(rank)] for rank in slow))
    width = state.space.ranks
    uniform = {
        item
        for item, (own, number) in enumerate(zip(state.space.items, state.options, strict=True))
        if own.options[number].widths[0] == width or own.options[number].everywhere
    }
    return sorted(held | uniform)


def changes(state: SearchState, item: int, below: float) -> list[ItemChange]:
    """Ways to place an item, everything else in place, with every rank ``below`` some seconds and
    within its capacity."""
    found = []
    with state.without(item):
        room = below - state.load
        for number, option in enumerate(state.space.items[item].options):
            if not _may_go(option, room):
                continue
            slots = spread(state, item, number)
            if slots is not None:
                worst, fits = state.reached(item, number, slots)
                if worst < below and fits:
                    found.append(ItemChange(worst, number, slots))
    return found


def _may_go(option: ItemOption, room: Floats) -> bool:
    """Whether ranks with seconds left, ``room``, could take the blocks if each were alone."""
    if option.everywhere:
        room = room - option.everywhere
    if room.min() <= 0:
        return False
    if option.is_uniform:
        return all(room[ranks].min() > seconds for ranks, seconds, _ in option.stretches)
    block, count = option.blocks[0], len(option.widths)
    if block.width > 1:
        return bool((room.reshape(-1, block.width) > block.seconds).all(axis=1).any())
    if not block.seconds[0]:
        return True
    # Only seconds are asked, and each rank by itself: quick, and never wrongly false. Whether bytes
    # and rules allow it the real placement says.
    return bool(np.floor(room / block.seconds[0]).sum() >= count)


def coarsened(state: SearchState, worst: float) -> SearchState:
    """The same assignment with fewer blocks wherever an item can have them and nothing is slower:
    a table in fewer pieces is easier to live with."""
    # What is cut finest first: it has most pieces to lose, and what one item gives up in room the
    # next ones no longer have.
    cut = [item for item in range(len(state.options)) if len(state.slots[item]) > 1]
    for item in sorted(cut, key=lambda item: (-len(state.slots[item]), item)):
        options = state.space.items[item].options
        fewer = [n for n in range(len(options)) if len(options[n].widths) < len(state.slots[item])]
        found = None
        with state.without(item):
            # Here as slow as the worst rank is allowed, so a little is added for rounding: the
            # item's own seconds were just subtracted from sums, and an option that fits exactly
            # would be missed by a last digit.
            room = worst * ROUNDED_UP + LEAST_ROOM - state.load
            for number in sorted(fewer, key=lambda n: (len(options[n].widths), n)):
                slots = spread(state, item, number) if _may_go(options[number], room) else None
                if slots is not None:
                    seconds, fits = state.reached(item, number, slots)
                    if fits and seconds <= worst:
                        found = number, slots
                        break
        if found is not None:
            state.take(item)
            state.put(item, *found)
    return state
