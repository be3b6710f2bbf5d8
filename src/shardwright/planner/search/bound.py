"""A lower bound that no plan can beat, and the relaxed choice that attains it.

Relaxed: shards may be spread over the ranks at will, so only sums matter. Then a plan of T seconds
has, over all ranks, at most ``ranks * T`` seconds of work and ``ranks * capacity`` bytes, and no
shard of more than T. For a fixed T the cheapest choice under the byte limits is bounded by
Lagrange multipliers (a price per byte of each tier); every price gives a valid bound, the best one
is found by bisection. The bound is the smallest T that its own bound does not exceed.
"""

# The bound is of every plan, so nothing in it may depend on where a search looked: an option with
# a shard above T is ruled out by size, bytes by a price, and sums are rounded down, so that the
# bound is never too high. ``explain`` derives it with the same functions on Amounts. The choices
# that attain it are what a search starts from (``starts``), bent in a few ways: finer cuts, which
# even ranks out, and higher prices of bytes, which leave room.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.amount import maximum, named, total
from shardwright.planner.search.space import Bools, Floats, Ints, Space

BISECTIONS = 40
ROUNDS = 3  # over the tiers, where more than one is scarce
ROUNDING = 1e-12  # of a sum of doubles, relative, and more
LEAST_PRICE = 1e-30  # seconds per byte; the first that is tried where nothing takes any time


@dataclass(frozen=True, slots=True)
class Bound:
    """No plan takes fewer ``seconds``; ``prices`` are seconds per byte of each tier."""

    seconds: float
    prices: Floats
    usable: bool  # False: no choice at all meets the summed capacities


@dataclass(frozen=True)
class OptionTable:
    """All options of all items in one row each, item after item; an item's floor, which is not
    ``listed``, comes last."""

    starts: NDArray[np.int64]
    seconds: Floats
    storage: Floats
    largest: Floats
    largest_storage: Floats
    fits: Bools
    listed: Bools


def table(space: Space) -> OptionTable:
    """The options as arrays; an option with a shard that fits no rank does not ``fit``."""
    rows = [(*item.options, item.floor) if item.floor else item.options for item in space.items]
    counts = [len(row) for row in rows]
    options = [option for row in rows for option in row]
    largest_bytes = np.array([o.largest_storage for o in options], dtype=np.float64)
    capacity = np.array(space.capacity, dtype=np.float64)
    fits: Bools = np.logical_and.reduce(largest_bytes <= capacity, axis=1)
    return OptionTable(
        np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        np.array([o.total_seconds for o in options]),
        np.array([o.total_storage for o in options], dtype=np.float64),
        np.array([o.largest for o in options]),
        largest_bytes,
        fits,
        np.array([bool(o.choices) for o in options]),
    )


class Relaxed(NamedTuple):
    """A space, its options in rows, and the bound that follows from them."""

    space: Space
    options: OptionTable
    bound: Bound


def relaxed(space: Space) -> Relaxed:
    """The space with its bound."""
    options = table(space)
    return Relaxed(space, options, lower_bound(space, options))


def lower_bound(space: Space, options: OptionTable, *, roomy: bool = False) -> Bound:
    """The bound over all plans whose shards fit a rank each; ``roomy``: as if the ranks together
    had memory for any of them."""
    if not np.logical_or.reduceat(options.fits, options.starts).all():
        return Bound(0.0, np.zeros(3), usable=False)
    limit = np.array(space.capacity, dtype=np.float64) * space.ranks
    if roomy:
        limit = np.full(3, np.inf)
    # A plan of T seconds has no shard above T. So the lower T is, the fewer options there are and
    # the more work the cheapest choice takes; between two sizes of shards nothing changes.
    # Bisection finds the first size whose own bound is not above the next size: below that no T
    # holds.
    sizes = np.where(options.fits, options.largest, np.inf)
    floor = float(np.minimum.reduceat(sizes, options.starts).max())
    levels = np.array(sorted({*sizes[np.isfinite(sizes) & (sizes >= floor)].tolist()}))
    low, high = 0, len(levels) - 1
    found: dict[int, Bound] = {}

    def at(level: int) -> Bound:
        if level not in found:
            masked = np.where(sizes <= levels[level], options.seconds, np.inf)
            found[level] = _cheapest(masked, options, limit)
        return found[level]

    while low < high:  # the first level whose bound does not reach the next one
        middle = (low + high) // 2
        if at(middle).usable and at(middle).seconds / space.ranks <= levels[middle + 1]:
            high = middle
        else:
            low = middle + 1
    best = at(low)
    if not best.usable:
        return Bound(0.0, np.zeros(3), usable=False)
    seconds = slowest_rank(best.seconds, float(levels[low]), space.ranks)
    return Bound(seconds, best.prices, usable=True)


def slowest_rank(work: Any, largest: Any, ranks: Any, suffix: str = "") -> Any:
    """Seconds that some rank takes at least: its even share of the work, and the largest shard.

    A derivation's names end in ``suffix``.
    """
    return maximum(named(f"work_per_rank{suffix}", work / ranks, "s"), largest)


def priced(seconds: Any, bytes_and_prices: Iterable[tuple[Any, Any]]) -> Any:
    """Seconds of an option, and what its bytes of each scarce tier cost in seconds."""
    costs = [nbytes * price for nbytes, price in bytes_and_prices]
    return seconds + total(costs) if costs else seconds


def beyond_room(priced_work: Any, rooms_and_prices: Iterable[tuple[Any, Any]]) -> Any:
    """Priced work less what the bytes of all ranks are worth at these prices, never rounded up.

    Within these bytes no choice takes fewer seconds, whatever the prices.
    """
    worth = [room * price for room, price in rooms_and_prices]
    return priced_work - total(worth) * (1 + ROUNDING) if worth else priced_work


def _cheapest(seconds: Floats, options: OptionTable, limit: Floats) -> Bound:
    """The least work under the byte limits: the maximum over prices of the relaxed minimum."""
    # The dual of the linear relaxation (Lagrange): at any prices that are not below 0, the cheapest
    # priced choice less the worth of all room is no more than the least work within the room. A
    # price that is found badly makes a lower bound, never a wrong one.
    scarce = [t for t in range(3) if options.storage[:, t].any()]
    prices = np.zeros(3)
    if _excess(seconds, options, limit, prices).max(initial=-np.inf) <= 0:
        return Bound(_value(seconds, options, limit, prices), prices, usable=True)
    # No prices tell that nothing fits at all: they would rise without end. So the sums of least
    # bytes are asked first, of each memory and of all together, for options that save one fill
    # another.
    most = limit * (1 + ROUNDING)
    if any(_least(seconds, options, options.storage[:, t]) > most[t] for t in scarce):
        return Bound(np.inf, prices, usable=False)
    shares = (options.storage[:, scarce] / np.maximum(limit[scarce], 1.0)).sum(axis=1)
    if _least(seconds, options, shares) > len(scarce) * (1 + ROUNDING):  # more than all tiers hold
        return Bound(np.inf, prices, usable=False)
    best, best_prices = _value(seconds, options, limit, prices), prices.copy()
    # A price of one memory moves what is chosen and so what the others need: each is found anew
    # with the others fixed. Rounds need not get better every time, so the best is kept.
    for _ in range(ROUNDS if len(scarce) > 1 else 1):
        for tier in scarce:
            _settle(seconds, options, limit, prices, tier)
            value = _value(seconds, options, limit, prices)
            if value > best:
                best, best_prices = value, prices.copy()
    return Bound(best, best_prices, usable=True)


def _settle(
    seconds: Floats, options: OptionTable, limit: Floats, prices: Floats, tier: int
) -> None:
    """Bisect the price of one tier, the others fixed, to where the choice just meets its limit."""
    prices[tier] = 0.0
    if _excess(seconds, options, limit, prices)[tier] <= 0:
        return
    # Where to begin is a guess (all seconds of the dearest option for a full memory); it is raised
    # until the choice is within the limit, so a bad guess costs only rounds.
    finite = seconds[np.isfinite(seconds)]
    low, high = 0.0, max(float(finite.max() / max(limit[tier], 1.0)), LEAST_PRICE)
    prices[tier] = high
    while _excess(seconds, options, limit, prices)[tier] > 0 and high < 1e30:
        high *= 8
        # The end of the interval at which the limit is met. Any price is a valid bound, but starts
        # of the search are made at these prices and should be within the memory.
        prices[tier] = high
    for _ in range(BISECTIONS):
        prices[tier] = (low + high) / 2
        if _excess(seconds, options, limit, prices)[tier] > 0:
            low = prices[tier]
        else:
            high = prices[tier]
    prices[tier] = high


def _value(seconds: Floats, options: OptionTable, limit: Floats, prices: Floats) -> float:
    """The least work and priced bytes, less what all ranks' bytes are worth."""
    least = np.minimum.reduceat(priced_options(seconds, options, prices), options.starts)
    scarce = np.flatnonzero(prices)
    return float(beyond_room(float(least.sum()), zip(limit[scarce], prices[scarce], strict=True)))


def _excess(seconds: Floats, options: OptionTable, limit: Floats, prices: Floats) -> Floats:
    """Bytes above the limit of each tier when every item takes its cheapest option."""
    # The first of equally cheap options, as everywhere: with another one the bisection and so the
    # plan would depend on rounding.
    chosen = cheapest(priced_options(seconds, options, prices), options)
    over: Floats = options.storage[chosen].sum(axis=0) - limit
    return over


def _least(seconds: Floats, options: OptionTable, amounts: Floats) -> float:
    """The least sum of ``amounts`` over the items' options of finite seconds."""
    usable = np.where(np.isfinite(seconds), amounts, np.inf)
    return float(np.minimum.reduceat(usable, options.starts).sum())


def priced_options(seconds: Floats, options: OptionTable, prices: Floats) -> Floats:
    """Seconds of every option with its bytes at ``prices``."""
    scarce = np.flatnonzero(prices)
    found: Floats = priced(seconds, [(options.storage[:, t], prices[t]) for t in scarce])
    return found


def cheapest(costs: Floats, options: OptionTable) -> NDArray[np.int64]:
    """The row of the first cheapest option of every item."""
    least = np.minimum.reduceat(costs, options.starts)
    counts = np.diff(np.append(options.starts, len(costs)))
    hits = np.flatnonzero(costs == np.repeat(least, counts))
    item = np.searchsorted(options.starts, hits, side="right") - 1
    first = np.searchsorted(item, np.arange(len(options.starts)))
    rows: NDArray[np.int64] = hits[first]
    return rows


WITHIN = 1.0001  # of a target, rounding apart


class StartRule(NamedTuple):
    """A relaxed choice to start from, as the bound has it where nothing is said.

    ``price_factor``: by how much the prices of bytes are raised; ``finer_cost``: the share by which
    a finer cut may cost more; ``largest_shard``: its seconds as a share of the target;
    ``largest_bytes``: its bytes as a share of a rank's: what fills one alone leaves it idle.
    """

    price_factor: float = 1.0
    finer_cost: float = 0.0
    largest_shard: float = WITHIN
    largest_bytes: float = 1.0


STARTS = (
    StartRule(),
    StartRule(finer_cost=1e-3),
    StartRule(finer_cost=0.05, largest_shard=0.6),
    StartRule(price_factor=4.0),
    StartRule(price_factor=4.0, finer_cost=0.02),
    StartRule(price_factor=32.0),
    StartRule(finer_cost=0.3),
    StartRule(finer_cost=0.5),
)
STARTS_OF_MANY = (  # items; few are polished instead
    STARTS[0],
    StartRule(largest_shard=0.9, largest_bytes=0.5),
    StartRule(largest_shard=0.8, largest_bytes=0.7),
    *STARTS[1:],
)
TINY = 1e-12  # a target where the bound is 0
BYTE_PRICE = 1e-3  # of the target for a full rank, where bytes have no price of their own


def starts(whole: Relaxed) -> Iterator[Ints]:
    """Relaxed choices [items]: as they are, cut finer where that costs next to nothing, and with
    bytes counting for more from one to the next."""
    space, options, found = whole
    target = max(found.seconds, TINY)
    scale = target / space.capacity_array
    seen = set()
    for start in STARTS_OF_MANY if space.has_many else STARTS:
        usable = _small_enough(space, options, start, target)
        factor = start.price_factor
        # Where all bytes fit together their price is 0 and no factor raises it, though single ranks
        # may still be short. So a small price of its own is added, which is none at a factor of 1.
        prices = found.prices * factor + scale * BYTE_PRICE * (factor - 1)
        priced = np.where(usable, options.seconds + options.storage @ prices, np.inf)
        if start.finer_cost:
            priced = _by_size(space, options, priced, start.finer_cost, target)
        chosen = cheapest(priced, options) - options.starts
        if chosen.tobytes() not in seen:
            seen.add(chosen.tobytes())
            yield chosen


def _small_enough(space: Space, options: OptionTable, start: StartRule, target: float) -> Bools:
    """Options whose largest shard is as small as ``start`` asks, where an item has any."""
    fitting = options.fits & options.listed
    small = fitting & (options.largest <= target * start.largest_shard)
    small &= _filled(space, options) <= start.largest_bytes
    counts = np.diff(np.append(options.starts, len(small)))
    # An item that has no option as small as asked keeps all that fit a rank: a start without an
    # option for some item is none.
    has = np.repeat(np.logical_or.reduceat(small, options.starts), counts)
    return np.where(has, small, fitting)


def _filled(space: Space, options: OptionTable) -> Floats:
    """The share of a rank's memory that an option's largest shard takes."""
    shares: Floats = (options.largest_storage / space.capacity_array).max(axis=1)
    return shares


def _by_size(
    space: Space, options: OptionTable, priced: Floats, slack: float, target: float
) -> Floats:
    """The size of an option's largest shard, among those nearly as cheap as the cheapest."""
    counts = np.diff(np.append(options.starts, len(priced)))
    least = np.repeat(np.minimum.reduceat(priced, options.starts), counts)
    # By whichever of seconds and bytes is larger: a shard that fills a rank is as hard to place
    # beside others as one that takes all of its time.
    size = np.maximum(options.largest / target, _filled(space, options))
    return np.where(priced <= least * (1 + slack), size, np.inf)
