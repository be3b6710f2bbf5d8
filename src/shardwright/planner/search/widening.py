"""From few options to all, and from no plan to the one that asks least of the fullest rank.

The least memory is found by the same search, with the share of a rank's capacity in the place of
seconds. A shard counts with the larger of its shares. So the search knows too much of a rank that
is filled in two memories at once, and the bound is worked out for each memory, for all on average,
and for all as one.
"""

# Fewer options are the smaller space: the search gets further in it in as many steps, and from its
# end among all options. Without that step 14 of 80 random problems end elsewhere, up to 0.5 %
# slower. Where the bounds say that only the other options help, it is the other way round.
#
# Where memory is short the search for the fastest plan may end with none though there are some:
# its penalty for bytes has to compete with seconds. A search that knows of bytes alone finds one,
# from which the fast search goes on; and where blocks of a whole table each hardly fit, moves and
# swaps come no further either: they are packed rank by rank (``repacked``): a rank gets the
# largest block that is left and others with it that fill it up to what may stay free on all ranks
# together. Where memory is tight that is little, so few fillings are worth a look.

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from shardwright.planner.choice import Choice
from shardwright.planner.search.bound import (
    ROUNDING,
    Bound,
    OptionTable,
    Relaxed,
    lower_bound,
    relaxed,
    table,
)
from shardwright.planner.search.search import SAME_BOUND, Earlier, SearchOutcome, search
from shardwright.planner.search.space import (
    Assignment,
    Floats,
    Item,
    ItemOption,
    Space,
    item_option,
)
from shardwright.planner.search.state import restored
from shardwright.planner.search.watch import Watch


def search_widening(
    whole: Relaxed,
    narrow: Callable[[Item, ItemOption], bool],
    watch: Watch,
    *,
    quick: bool = False,
    roomy: bool = False,
) -> SearchOutcome:
    """First among the ``narrow`` options, then, from what that found, among all; where the bounds
    say that more options help, among all, and then the others only where that found nothing faster
    than their bound. Where nothing fits, memory alone is looked at before giving up.
    ``quick``: all of it is a start for another search; ``roomy``: there are options that take less
    memory beside those of the space."""
    space = whole.space
    outcome = _widened(whole, narrow, watch, quick=quick, roomy=roomy)
    if outcome.best is not None or not outcome.bound.usable:
        return outcome
    least = least_memory(space, watch.part())
    fits = least.seconds <= 1 or len(space.used_tiers) > 1  # of several memories it knows too much
    if least.best is None or least.bound.seconds > 1 + ROUNDING or not fits:
        return replace(outcome, tried=outcome.tried + least.tried)
    found = search(whole, watch, Earlier(least.best), roomy=roomy)
    tried = outcome.tried + least.tried + found.tried
    return replace(found, tried=tried, feasible=outcome.feasible + found.feasible)


def _widened(
    whole: Relaxed,
    narrow: Callable[[Item, ItemOption], bool],
    watch: Watch,
    *,
    quick: bool,
    roomy: bool,
) -> SearchOutcome:
    space = whole.space
    kept = [
        [number for number, option in enumerate(item.options) if narrow(item, option)]
        or list(range(len(item.options)))
        for item in space.items
    ]
    if all(len(k) == len(i.options) for k, i in zip(kept, space.items, strict=True)):
        return search(whole, watch, quick=quick, roomy=roomy)
    items = tuple(
        replace(item, options=tuple(item.options[number] for number in numbers), floor=None)
        for item, numbers in zip(space.items, kept, strict=True)
    )
    part = relaxed(replace(space, items=items))
    if whole.bound.seconds < part.bound.seconds * (1 - SAME_BOUND):  # more options help
        outer = search(whole, watch, quick=quick, roomy=roomy)
        if outer.seconds <= part.bound.seconds or watch.over():
            return outer
        inner = search(part, watch, quick=True)
        outer = _added(outer, inner)
        if inner.seconds >= outer.seconds:
            return outer
        more = search(whole, watch, _widely(kept, inner), quick=True)
        return replace(_added(more, outer), proved=outer.proved)
    inner = search(part, watch, quick=quick, roomy=None)
    outer = search(whole, watch, _widely(kept, inner), quick=quick, roomy=roomy)
    return _added(outer, inner)


def _widely(kept: Sequence[Sequence[int]], found: SearchOutcome) -> Earlier | None:
    """What was found among the options that were kept, by their numbers among all."""
    if found.best is None:
        return None
    options = (numbers[own] for numbers, own in zip(kept, found.best.options, strict=True))
    return Earlier(Assignment(tuple(options), found.best.slots), found.bound.seconds)


def _added(outcome: SearchOutcome, before: SearchOutcome) -> SearchOutcome:
    """The outcome, with the starts of another search counted."""
    tried = outcome.tried + before.tried
    return replace(outcome, tried=tried, feasible=outcome.feasible + before.feasible)


UNLIMITED = 2**62


def least_memory(space: Space, watch: Watch | None = None) -> SearchOutcome:
    """``seconds`` and the bound are shares of a rank's capacity. ``seconds`` are at least the share
    of the fullest rank; a bound above 1 proves that nothing fits."""
    found = _least(space, watch or Watch())
    return replace(found, bound=least_share(space))


def _least(space: Space, watch: Watch, enough: float = 0.0) -> SearchOutcome:
    """What the search finds; packed anew where that is above a whole rank of the one memory."""
    weighed = _weighed_space(space)
    found = search(relaxed(weighed), watch, enough=enough)
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
    # Each memory alone says nothing of options that save one by filling another. The mean of the
    # shares, and all bytes beside all capacities, are further weighings of the same, and each is a
    # bound of its own: the best of them counts.
    weights.append(used / max(len(tiers), 1))
    weights.append(used * space.capacity_array / max((used * space.capacity_array).sum(), 1.0))
    unlimited = replace(space, capacity=(UNLIMITED,) * 3)
    found = [lower_bound(unlimited, _weighed(space, options, own)) for own in weights]
    return max(found, key=lambda bound: bound.seconds)


def _weighed(space: Space, options: OptionTable, weights: Floats) -> OptionTable:
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
    before = Earlier(found.best)
    return search(relaxed(space), watch, before, enough=float("inf")).best is not None


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


MAX_RANKS, MAX_BLOCKS = 256, 1_000
LOOKS = 50_000  # at a block, in one attempt
ATTEMPTS = 12

Blocks = list[tuple[int, int]]  # bytes and number of each, the largest first


@dataclass
class _Attempt:
    """Packs blocks into ranks of ``capacity`` bytes, within so many ``looks``."""

    capacity: int
    looks: int = LOOKS

    def packed(self, blocks: Blocks, ranks: int) -> list[Blocks] | None:
        """The blocks of every rank; None where no packing is found."""
        # All that may stay free on all ranks together. A rank that leaves more than that makes the
        # rest impossible, so only fillings within it are tried; where memory is tight these are
        # few.
        spare = ranks * self.capacity - sum(size for size, _ in blocks)
        if spare < 0:
            return None
        if ranks == 1 or not blocks:
            return [blocks] + [[]] * (ranks - 1)
        # The largest block must lie somewhere and ranks are alike, so it may as well lie on this
        # one: that leaves out all orders of the ranks.
        first, rest = blocks[0], blocks[1:]
        left = [*itertools.accumulate((size for size, _ in reversed(rest)), initial=0)][::-1]
        room = self.capacity - first[0]
        for chosen in self._fillings(rest, left, 0, room - spare, room):
            inside = set(chosen)
            others = [block for index, block in enumerate(rest) if index not in inside]
            found = self.packed(others, ranks - 1)
            if found is not None:
                return [[first, *(rest[index] for index in chosen)], *found]
            if self.looks <= 0:
                break
        return None

    def _fillings(
        self, blocks: Blocks, left: Sequence[int], start: int, least: int, most: int
    ) -> Iterator[tuple[int, ...]]:
        """Blocks from ``start`` on of ``least`` to ``most`` bytes together, large ones first;
        ``left[i]`` are the bytes of all from ``i`` on."""
        last = -1
        for index in range(start, len(blocks)):
            self.looks -= 1
            if left[index] < least or self.looks <= 0:
                return
            size = blocks[index][0]
            if size <= most and size != last:  # of equal ones, the first that is left out
                last = size
                for more in self._fillings(blocks, left, index + 1, least - size, most - size):
                    yield (index, *more)
        if least <= 0:
            yield ()


def repacked(space: Space, found: Assignment, tier: int, enough: int) -> Assignment:
    """The same options with blocks of one rank elsewhere, where the fullest rank then holds less
    of a memory; of less than ``enough`` bytes it need not be. Others lie on all ranks."""
    blocks: Blocks = []
    base = 0
    where: list[tuple[int, int]] = []
    for item, number in enumerate(found.options):
        for index, block in enumerate(space.items[item].options[number].blocks):
            if block.width == 1:
                blocks.append((int(block.storage[0, tier]), len(where)))
                where.append((item, index))
            elif block.width == space.ranks:
                base += int(block.storage[:, tier].max())
            else:
                return found
    if space.constrained or space.ranks > MAX_RANKS or not 0 < len(blocks) <= MAX_BLOCKS:
        return found
    blocks.sort(reverse=True)
    filled = [0] * space.ranks
    for size, number in blocks:
        item, index = where[number]
        filled[found.slots[item][index]] += size
    best = _packed_tightest(blocks, space.ranks, max(filled), enough - base)
    if best is None:
        return found
    slots = [list(own) for own in found.slots]
    for rank, own in enumerate(best):
        for _, number in own:
            item, index = where[number]
            slots[item][index] = rank
    return Assignment(found.options, tuple(tuple(own) for own in slots))


def _packed_tightest(blocks: Blocks, ranks: int, most: int, enough: int) -> list[Blocks] | None:
    """A packing in ranks of less than ``most`` bytes, of ``enough`` if it can be; else the least
    that bisection finds."""
    low = max(blocks[0][0], -(-sum(size for size, _ in blocks) // ranks))
    best, high = None, most
    for attempt in range(ATTEMPTS):
        if low >= high:
            break
        tried = enough if attempt == 0 and low <= enough < high else (low + high) // 2
        found = _Attempt(tried).packed(blocks, ranks)
        if found is None:
            low = tried + 1
        else:
            best, high = found, max(sum(size for size, _ in own) for own in found)
            if high <= enough:
                break
    return best
