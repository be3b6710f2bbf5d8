"""A bound that is higher than the relaxed one, and the choices that come near it.

Given seconds T, options are chosen one item after the other, all ways at once. A way is kept as
what it leaves of some budgets, each of which every plan of T seconds is within:

- work, and bytes of each memory, of all ranks together, as in the relaxation: alone, and work with
  bytes priced;
- parts counted by size: of parts that take more than 1/(k + 1) of a rank at most k lie on one, so
  every 1/(k + 1) that a part is above costs 1/k of a rank. (Such a count f has f(x) + f(y) <=
  f(x + y) and f(1) = 1, a dual feasible function of bin packing: no rank's parts count more than
  1.) The same of bytes;
- what all ranks spend alike, beside the largest part of any item.

Where no way is left, no plan takes T seconds. Of too many ways, neighbours become one that leaves
as much of each budget as any of them: it may stand for no choice at all, so what is not ruled out
may still be impossible, but what is ruled out is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwright.planner.search.bound import Relaxed, relaxed
from shardwright.planner.search.space import Bools, Floats, Ints, ItemOption, Space

COUNTS = (1, 2, 3, 4, 6, 9)  # k: parts that may share a rank
WAYS = 64  # that are kept apart
TOLERANCE = 1e-9  # of a budget: what rounding may take
SAME = 1e-9  # share by which a proof is made below the seconds that it is of
CLOSE = 2e-3  # to what is proven, for no further step
STEPS = 7  # of a bisection between what is proven and what is found
MOST_ITEMS, MOST_PARTS = 80, 100_000

Part = tuple[int, float, tuple[float, ...]]  # how many ranks have it; seconds, bytes of each tier


def prove(facts: ProofFacts, low: float, high: float, take: Callable[[Ints], float]) -> float:
    """Seconds that no plan takes less than, by bisection between those that are known for that
    (``low``) and those of a plan (``high``).

    ``take`` is given ways that may take fewer [ways, items], numbers of options, and says what the
    best plan takes then.
    """
    for _ in range(STEPS if low > 0 else 0):
        if high <= low * (1 + CLOSE):
            break
        # The middle of a ratio, not of a difference, since `CLOSE` is one. What cannot be ruled out
        # is not shown to exist: from then on `high` is only as far as a proof may still get.
        middle = float(np.sqrt(low * high))
        ways = facts.ways(middle)
        if ways is None:
            low = middle
        else:
            high = max(min(middle, take(ways)), low)
    return low


def is_proven(space: Space, seconds: float, *, roomy: bool) -> bool:
    """Whether no plan takes less than ``seconds``, as far as ``prove`` can tell."""
    facts = facts_of(relaxed(space), roomy=roomy)
    return facts is not None and facts.ways(seconds * (1 - SAME)) is None


class _Demands(NamedTuple):
    """By option what it ``uses`` of every budget, beside the least of its item, what it puts on
    every rank (``alike``) beside that, and its ``largest`` part, as shares of a rank; and how much
    of the ``budgets``, and of every rank (``left``), the least of all items leave."""

    owner: Ints
    uses: Floats
    alike: Floats
    largest: Floats
    budgets: Floats
    left: Floats


@dataclass(frozen=True)
class ProofFacts:
    """The options of all items in rows: what each puts on every rank (``alike``: seconds, then
    bytes of each of the ``tiers`` that matter), and ``parts`` beside it, likewise, of ``counts``
    ranks each."""

    ranks: int
    starts: Ints
    owner: Ints
    fits: Bools
    total: Floats
    alike: Floats
    part_owner: Ints
    counts: Floats
    parts: Floats
    capacity: Floats
    prices: Floats

    @cached_property
    def largest(self) -> Floats:
        """The largest part of every option."""
        found: Floats = np.zeros(self.alike.shape)
        np.maximum.at(found, self.part_owner, self.parts)
        return found

    def ways(self, seconds: float, share: float = 1.0, only: Bools | None = None) -> Ints | None:
        """Choices [ways, items] that may take so few ``seconds``, in a ``share`` of every rank's
        memory and of some options ``only``; None where no plan does."""
        limits = np.concatenate([[seconds], self.capacity * share])
        kept = self._kept(limits, self.fits if only is None else self.fits & only)
        if kept is None:
            return None
        found = _ways(self._demands(limits, kept))
        return None if found is None else np.flatnonzero(kept)[found] - self.starts

    def _least(self, values: Floats, kept: Bools) -> Floats:
        """The least of every item, of its options that are ``kept``."""
        found: Floats = np.minimum.reduceat(np.where(kept[:, None], values, np.inf), self.starts)
        return found

    def _kept(self, limits: Floats, kept: Bools) -> Bools | None:
        """Options whose largest part has room beside the least that every rank has of all other
        items; None where an item has none."""
        # Again and again until nothing changes: without a dropped option the least of its item may
        # be more, which leaves less room beside it and may drop others.
        before = -1
        while kept.sum() != before:
            before = kept.sum()
            if not np.logical_or.reduceat(kept, self.starts).all():
                return None
            least = self._least(self.alike, kept)
            others = least.sum(axis=0) - least
            most = self.alike + self.largest + others[self.owner]
            kept = kept & np.logical_and.reduce(most <= limits * (1 + TOLERANCE), axis=1)
        return kept

    def _demands(self, limits: Floats, kept: Bools) -> _Demands:
        """What the options that are ``kept`` ask for."""
        least = self._least(self.alike, kept)
        left = 1 - least.sum(axis=0) / limits
        alike = (self.alike - least[self.owner]) / limits
        # Everything is a share of a rank, so that seconds and bytes of each memory are one kind of
        # number and one tolerance serves all of them.
        sums = self.total / limits / self.ranks
        columns = [*sums.T]
        if self.prices.any():
            weights = np.concatenate([[1.0], self.prices * limits[1:] / limits[0]])
            columns.append(sums @ (weights / weights.sum()))
        # Parts are counted beside what every rank has anyway: a part of half a rank is one of two
        # that fit, but the only one where a third of the rank is taken.
        room = np.maximum(left, TOLERANCE)
        shares, rest = self.parts / limits / room, alike / room
        for k in COUNTS:
            counted = _counted(shares, k) * self.counts[:, None]
            for column, more in zip(counted.T, _counted(rest, k).T, strict=True):
                taken = np.bincount(self.part_owner, column, minlength=len(kept))
                columns.append(taken / self.ranks + more)
        uses = np.column_stack(columns)
        # What the least of every item uses is taken off all budgets at once. Only what an option
        # uses beyond that is left to choose, and a budget that all items together cannot exceed
        # then is left out, which makes every way shorter.
        floor = self._least(uses, kept)
        uses = (uses - floor[self.owner])[kept]
        budgets = 1 - floor.sum(axis=0)
        owner, largest = self.owner[kept], self.largest[kept] / limits
        begins = np.flatnonzero(np.diff(owner, prepend=-1))
        most = np.maximum.reduceat(uses, begins).sum(axis=0)
        tight = most > budgets  # no choice can be beyond the others
        return _Demands(owner, uses[:, tight], alike[kept], largest, budgets[tight], left)


def _counted(shares: Floats, k: int) -> Floats:
    found: Floats = np.maximum(np.ceil((k + 1) * (shares - TOLERANCE)) - 1, 0) / k
    return found


def _ways(demands: _Demands) -> Ints | None:
    """Choices of a row of the ``demands`` for each item that are within all budgets, as far as can
    be told; None where there are none."""
    owner, uses, alike, largest, budgets, left = demands
    if budgets.min(initial=0.0) < -TOLERANCE:
        return None
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    ends = [*begins[1:].tolist(), len(owner)]
    # Items that differ most between their options come first: ways that are impossible end early,
    # and ways that were merged late are merged over little.
    spread = (np.maximum.reduceat(uses, begins) / np.maximum(budgets, TOLERANCE)).max(
        axis=1, initial=0.0
    )
    kinds, limits = len(budgets), len(left)
    ways = np.concatenate([budgets, left, np.zeros(limits)])[None]  # at last minus largest parts
    chosen = np.zeros((1, len(begins)), np.int64)
    for item in np.argsort(-spread, kind="stable").tolist():
        rows = np.arange(begins[item], ends[item])
        # An option that uses no less of anything than another one of its item, and has no smaller
        # part, may be replaced by that one in every way: it is left out.
        rows = rows[_undominated(np.column_stack([uses[rows], alike[rows], largest[rows]]))]
        more = np.empty((len(ways), len(rows), ways.shape[1]))
        more[..., :kinds] = ways[:, None, :kinds] - uses[rows]
        more[..., kinds:-limits] = ways[:, None, kinds:-limits] - alike[rows]
        more[..., -limits:] = np.minimum(ways[:, None, -limits:], -largest[rows])
        found = more.reshape(-1, ways.shape[1])
        # Within a budget to a little more than it: what is ruled out here must be impossible, and
        # rounding must never be what rules it out.
        within: Bools = np.logical_and.reduce(found[:, :kinds] >= -TOLERANCE, axis=1)
        within &= (found[:, kinds:-limits] + found[:, -limits:] >= -TOLERANCE).all(axis=1)
        places = np.flatnonzero(within)
        if not len(places):
            return None
        ways, first = _merged(found[places], budgets)
        places = places[first]
        chosen = chosen[places // len(rows)]
        chosen[:, item] = rows[places % len(rows)]
    return chosen


def _undominated(rows: Floats) -> Bools:
    """Rows that no other row is nowhere above; of equal ones the first."""
    no_worse: Bools = np.logical_and.reduce(rows[:, None] <= rows, axis=2)
    number = np.arange(len(rows))
    better = no_worse & (~no_worse.T | (number[:, None] < number))
    kept: Bools = ~np.logical_or.reduce(better, axis=0)
    return kept


def _merged(ways: Floats, budgets: Floats) -> tuple[Floats, Ints]:
    """As few as are kept apart, neighbours in how they leave the first two budgets, and the first
    of those that each is made of."""
    if len(ways) <= WAYS:
        return ways, np.arange(len(ways))
    # Neighbours in the first two budgets that are left (mostly seconds and bytes of all ranks): the
    # largest of what two alike ways leave is hardly more than what each leaves, while two unlike
    # ones would make one that is better than both by far, and prove nothing.
    key = ways[:, 0]
    if len(budgets) > 1:
        key = key / max(budgets[0], TOLERANCE) - ways[:, 1] / max(budgets[1], TOLERANCE)
    order = np.argsort(key, kind="stable")
    cuts = np.linspace(0, len(ways), WAYS + 1).astype(np.int64)[:-1]
    found: Floats = np.maximum.reduceat(ways[order], cuts, axis=0)
    return found, order[cuts]


def facts_of(whole: Relaxed, *, roomy: bool = False) -> ProofFacts | None:
    """None where there is too much to look at, or not all options are listed. ``roomy``: as if
    memory were no matter but for what fits no rank alone."""
    space, options, bound = whole
    # The floor of an item is below its options and none of them: it has no parts that could be
    # counted.
    if len(space.items) > MOST_ITEMS or not options.listed.all():
        return None
    owner: list[int] = []
    alike: list[list[float]] = []
    parts: list[tuple[int, int, list[float]]] = []
    tiers = [] if roomy else [tier for tier, _ in space.scarce_tiers]
    for item, entry in enumerate(space.items):
        for option in entry.options:
            every, rest = _split(option)
            parts += [(len(owner), count, [s, *(b[t] for t in tiers)]) for count, s, b in rest]
            alike.append([every[1], *(every[2][t] for t in tiers)])
            owner.append(item)
        if len(parts) > MOST_PARTS:
            return None
    return ProofFacts(
        space.ranks,
        options.starts,
        np.array(owner),
        options.fits,
        np.column_stack([options.seconds, options.storage[:, tiers]]),
        np.array(alike),
        np.array([row for row, _, _ in parts]),
        np.array([count for _, count, _ in parts], np.float64),
        np.array([values for _, _, values in parts]),
        np.array(space.capacity, np.float64)[tiers],
        bound.prices[tiers],
    )


def _split(option: ItemOption) -> tuple[Part, list[Part]]:
    """What an option puts on every rank, and what on some beside it."""
    if not option.is_uniform:
        blocks = option.blocks
        # Blocks that are alike are one object (see `space._make_blocks`): each kind of part is
        # counted with how many there are, or a table in a thousand pieces would be a thousand rows.
        times = len(blocks) if blocks[0] is blocks[-1] else 1
        rest = [
            (count * times, own[0], tuple(own[1:]))
            for block in (blocks[:1] if times > 1 else blocks)
            for own, count in _kinds(np.column_stack([block.seconds, block.storage]))
        ]
        return (1, option.everywhere, (0.0, 0.0, 0.0)), rest
    runs = option.stretches
    # Of runs that differ the least is on every rank, and the rest is a part of some ranks beside
    # it.
    least = min(run.seconds for run in runs)
    sizes = tuple(float(min(run.storage[tier] for run in runs)) for tier in range(3))
    rest = [
        (
            run.ranks.stop - run.ranks.start,
            run.seconds - least,
            tuple(size - low for size, low in zip(run.storage, sizes, strict=True)),
        )
        for run in runs
    ]
    return (1, option.everywhere + least, sizes), rest


def _kinds(rows: Floats) -> list[tuple[list[float], int]]:
    """Rows that differ, in order, and how many there are of each."""
    counts = Counter(map(tuple, rows.tolist()))
    return [([*row], counts[row]) for row in sorted(counts)]
