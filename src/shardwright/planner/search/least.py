"""The assignment that asks least of the fullest rank, whatever its memory: the same search, with
the share of a rank's capacity in the place of seconds.

A shard counts with the larger of its shares. So the search knows too much of a rank that is filled
in two memories at once, and the bound is worked out for each memory, for all on average, and for
all as one.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from shardwright.planner.choice import Choice
from shardwright.planner.search.bound import ROUNDING, Bound, Table, lower_bound, table
from shardwright.planner.search.packing import repacked
from shardwright.planner.search.search import Outcome, search
from shardwright.planner.search.space import Floats, Space, item_option
from shardwright.planner.search.state import restored
from shardwright.planner.search.watch import Watch

UNLIMITED = 2**62


def least_memory(space: Space, watch: Watch | None = None) -> Outcome:
    """``seconds`` and the bound are shares of a rank's capacity. ``seconds`` are at least the share
    of the fullest rank; a bound above 1 proves that nothing fits."""
    found = _least(space, watch or Watch())
    return replace(found, bound=least_share(space))


def _least(space: Space, watch: Watch, enough: float = 0.0) -> Outcome:
    """What the search finds; packed anew where that is above a whole rank of the one memory."""
    weighed = _weighed_space(space)
    found = search(weighed, watch, enough=enough)
    if found.best is None or found.seconds <= 1 or len(space.used_tiers) > 1 or watch.over():
        return found
    ((tier, _),) = space.used_tiers
    best = repacked(space, found.best, tier, space.capacity[tier])
    return replace(found, best=best, seconds=restored(weighed, 1.0, 2.0, best).worst)


def least_share(space: Space) -> Bound:
    """The share of its capacity that the fullest rank has at least."""
    options = table(space)
    tiers = [tier for tier, _ in space.used_tiers]
    weights = [np.eye(3)[tier] for tier in tiers]
    used = np.eye(3)[tiers].sum(axis=0)
    weights.append(used / max(len(tiers), 1))
    weights.append(used * space.capacity_array / max((used * space.capacity_array).sum(), 1.0))
    unlimited = replace(space, capacity=(UNLIMITED,) * 3)
    found = [lower_bound(unlimited, _weighed(space, options, own)) for own in weights]
    return max(found, key=lambda bound: bound.seconds)


def _weighed(space: Space, options: Table, weights: Floats) -> Table:
    """The options with a weighed sum of shares of a capacity for seconds."""
    shares = weights / space.capacity_array
    return replace(
        options,
        seconds=options.storage @ shares,
        largest=(options.largest_storage * shares).max(axis=1),
        storage=np.zeros_like(options.storage),
        fits=np.ones_like(options.fits),
    )


def fits_somehow(space: Space, watch: Watch) -> bool:
    """Whether an assignment is found that no rank is too small for."""
    if least_share(space).seconds > 1 + ROUNDING or watch.over():
        return False
    found = _least(space, watch, enough=1.0)
    if found.best is not None and restored(space, 1.0, 2.0, found.best).fits:
        return True
    if len(space.used_tiers) < 2:
        return False
    return search(space, watch, found.best, enough=float("inf")).best is not None


def _weighed_space(space: Space) -> Space:
    items = tuple(
        replace(
            item,
            options=tuple(
                item_option(
                    [_with_shares(choice, space.capacity) for choice in option.choices],
                    space.ranks,
                    space.group,
                    option.widths,
                )
                for option in item.options
            ),
            floor=None,
        )
        for item in space.items
    )
    unlimited = (UNLIMITED, UNLIMITED, UNLIMITED)
    return Space(items, space.ranks, space.group, unlimited, space.constrained)


def _with_shares(choice: Choice, capacity: tuple[int, int, int]) -> Choice:
    def share(storage: tuple[int, int, int]) -> float:
        pairs = zip(storage, capacity, strict=True)
        return max((size / max(limit, 1) for size, limit in pairs if size), default=0.0)

    costs = tuple(msgspec.structs.replace(c, total_seconds=share(c.storage)) for c in choice.costs)
    return Choice(choice.table, choice.option, costs)
