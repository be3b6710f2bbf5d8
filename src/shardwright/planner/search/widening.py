"""From few options to all, and from no plan to the one that asks least of the fullest rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.planner.search.bound import ROUNDING, relaxed
from shardwright.planner.search.least import least_memory
from shardwright.planner.search.search import SAME_BOUND, Outcome, search
from shardwright.planner.search.space import Assignment, Item, ItemOption, Space
from shardwright.planner.search.watch import Watch


def search_widening(
    space: Space,
    narrow: Callable[[Item, ItemOption], bool],
    watch: Watch | None = None,
) -> Outcome:
    """First among the ``narrow`` options, then, from what that found, among all: looking at more
    never makes a plan worse. Where nothing fits, memory alone is looked at before giving up."""
    watch = watch or Watch()
    outcome = _widened(space, narrow, watch)
    if outcome.best is not None or not outcome.bound.usable:
        return outcome
    least = least_memory(space, watch.part())
    fits = least.seconds <= 1 or len(space.used_tiers) > 1  # of several memories it knows too much
    if least.best is None or least.bound.seconds > 1 + ROUNDING or not fits:
        return replace(outcome, tried=outcome.tried + least.tried)
    found = search(space, watch, least.best)
    return replace(
        found,
        tried=outcome.tried + least.tried + found.tried,
        feasible=outcome.feasible + found.feasible,
    )


def _widened(space: Space, narrow: Callable[[Item, ItemOption], bool], watch: Watch) -> Outcome:
    kept = [
        [number for number, option in enumerate(item.options) if narrow(item, option)]
        or list(range(len(item.options)))
        for item in space.items
    ]
    if all(len(k) == len(i.options) for k, i in zip(kept, space.items, strict=True)):
        return search(space, watch)
    items = tuple(
        replace(item, options=tuple(item.options[number] for number in numbers), floor=None)
        for item, numbers in zip(space.items, kept, strict=True)
    )
    small = replace(space, items=items)
    whole, part = relaxed(space), relaxed(small)
    more_helps = whole[1].seconds < part[1].seconds * (1 - SAME_BOUND)
    inner = search(small, watch, quick=more_helps, relaxed=part)
    first = inner.best
    if first is not None:
        options = tuple(kept[item][option] for item, option in enumerate(first.options))
        first = Assignment(options, first.slots)
    known = inner.bound.seconds if first is not None else float("inf")
    outer = search(space, watch, first, known_bound=known, relaxed=whole)
    return replace(outer, tried=outer.tried + inner.tried, feasible=outer.feasible + inner.feasible)
