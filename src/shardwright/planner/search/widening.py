"""From few options to all, and from no plan to the one that asks least of the fullest rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.planner.search.bound import ROUNDING, Relaxed, relaxed
from shardwright.planner.search.least import least_memory
from shardwright.planner.search.search import SAME_BOUND, Outcome, search
from shardwright.planner.search.space import Assignment, Item, ItemOption, Space
from shardwright.planner.search.watch import Watch


def search_widening(
    space: Space,
    narrow: Callable[[Item, ItemOption], bool],
    watch: Watch | None = None,
    *,
    quick: bool = False,
    whole: Relaxed | None = None,
    roomy: bool = False,
) -> Outcome:
    """First among the ``narrow`` options, then, from what that found, among all; where the bounds
    say that more options help, among all, and then the others only where that found nothing faster
    than their bound. Where nothing fits, memory alone is looked at before giving up.
    ``quick``: all of it is a start for another search; ``whole``: the space's own relaxation where
    it is known; ``roomy``: there are options that take less memory beside those of the space."""
    watch = watch or Watch()
    outcome = _widened(space, narrow, watch, quick, whole or relaxed(space), roomy=roomy)
    if outcome.best is not None or not outcome.bound.usable:
        return outcome
    least = least_memory(space, watch.part())
    fits = least.seconds <= 1 or len(space.used_tiers) > 1  # of several memories it knows too much
    if least.best is None or least.bound.seconds > 1 + ROUNDING or not fits:
        return replace(outcome, tried=outcome.tried + least.tried)
    found = search(space, watch, least.best, roomy=roomy)
    return replace(
        found,
        tried=outcome.tried + least.tried + found.tried,
        feasible=outcome.feasible + found.feasible,
    )


def _widened(
    space: Space,
    narrow: Callable[[Item, ItemOption], bool],
    watch: Watch,
    quick: bool,
    whole: Relaxed,
    *,
    roomy: bool,
) -> Outcome:
    kept = [
        [number for number, option in enumerate(item.options) if narrow(item, option)]
        or list(range(len(item.options)))
        for item in space.items
    ]
    if all(len(k) == len(i.options) for k, i in zip(kept, space.items, strict=True)):
        return search(space, watch, quick=quick, relaxed=whole, roomy=roomy)
    items = tuple(
        replace(item, options=tuple(item.options[number] for number in numbers), floor=None)
        for item, numbers in zip(space.items, kept, strict=True)
    )
    small = replace(space, items=items)
    part = relaxed(small)
    if whole[1].seconds < part[1].seconds * (1 - SAME_BOUND):  # more options help
        outer = search(space, watch, quick=quick, relaxed=whole, roomy=roomy)
        if outer.seconds <= part[1].seconds or watch.over():
            return outer
        inner = search(small, watch, quick=True, relaxed=part)
        outer = _added(outer, inner)
        if inner.seconds >= outer.seconds:
            return outer
        more = search(space, watch, _widely(kept, inner), quick=True, relaxed=whole)
        return replace(_added(more, outer), proved=outer.proved)
    inner = search(small, watch, quick=quick, relaxed=part, roomy=None)
    known = inner.bound.seconds if inner.best is not None else float("inf")
    outer = search(
        space,
        watch,
        _widely(kept, inner),
        known_bound=known,
        quick=quick,
        relaxed=whole,
        roomy=roomy,
    )
    return _added(outer, inner)


def _widely(kept: Sequence[Sequence[int]], found: Outcome) -> Assignment | None:
    """What was found among the options that were kept, by their numbers among all."""
    if found.best is None:
        return None
    options = (numbers[own] for numbers, own in zip(kept, found.best.options, strict=True))
    return Assignment(tuple(options), found.best.slots)


def _added(outcome: Outcome, before: Outcome) -> Outcome:
    """The outcome, with the starts of another search counted."""
    return replace(
        outcome,
        tried=outcome.tried + before.tried,
        feasible=outcome.feasible + before.feasible,
    )
