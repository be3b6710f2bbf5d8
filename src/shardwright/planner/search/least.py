"""The assignment that asks least of the fullest rank, whatever its memory: the same search, with
the share of a rank's capacity in the place of seconds."""

from __future__ import annotations

from dataclasses import replace

from shardwright.planner.choice import Choice
from shardwright.planner.search.search import Outcome, search
from shardwright.planner.search.space import Item, Space, item_option
from shardwright.planner.search.state import restored

UNLIMITED = 2**62


def least_memory(space: Space, deadline: float = float("inf")) -> Outcome:
    """``seconds`` and the bound are shares of a rank's capacity; above 1 does not fit. A bound
    above 1 proves that nothing fits."""
    return search(_weighed_space(space), deadline)


def fits_somehow(space: Space, deadline: float) -> bool:
    """Whether an assignment is found that no rank is too small for."""
    found = search(_weighed_space(space), deadline, enough=1.0, hopeless=1.0)
    return found.best is not None and restored(space, 1.0, 2.0, found.best).fits


def _weighed_space(space: Space) -> Space:
    items = tuple(
        Item(
            item.tables,
            tuple(
                item_option(
                    [_weighed(choice, space.capacity) for choice in option.choices],
                    space.ranks,
                    space.group,
                )
                for option in item.options
            ),
            item.allowed,
            item.apart_from,
        )
        for item in space.items
    )
    unlimited = (UNLIMITED, UNLIMITED, UNLIMITED)
    return Space(items, space.ranks, space.group, unlimited, space.constrained)


def _weighed(choice: Choice, capacity: tuple[int, int, int]) -> Choice:
    def share(storage: tuple[int, int, int]) -> float:
        pairs = zip(storage, capacity, strict=True)
        return max((size / max(limit, 1) for size, limit in pairs if size), default=0.0)

    costs = tuple(replace(c, total_seconds=share(c.storage)) for c in choice.costs)
    return Choice(choice.table, choice.option, costs)
