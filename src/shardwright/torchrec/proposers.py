"""Ways to propose one candidate for each table, one proposal after the other, and the ones that a
job names."""

# A proposer is what a job says of it (a ``ProposerSection``) and a generator: it yields a proposal
# and is sent the rating of its placement. It is a conversation, for a greedy walk with a threshold
# and larger caches go on from what came of the proposals before. The loop in search.py knows what
# was placed before, whoever proposed it, and answers a repeated proposal without placing it.

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.sharding import ShardingType
from shardwright.job.planner import ProposerSection
from shardwright.planner.search.watch import Watch
from shardwright.torchrec.candidate import Candidate, Offer, Proposals
from shardwright.torchrec.scaleup import larger_caches

MAX_CELLS = 50_000_000  # tables times bins; six bytes are kept for each

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _grid(section: ProposerSection, offer: Offer) -> Proposals:
    """All combinations, best options first and the last table's changing fastest; none at all if
    they are more than the cap."""
    count, most = math.prod(len(ways) for ways in offer.tables), section.max_proposals
    if count > most:
        number = f"{count:,}" if count < 10**9 else f"about 10^{math.log10(count):.0f}"
        return f"{number} combinations, more than max_proposals = {most:,}"
    # Counted before it is begun: a product of many tables has no end, and TorchRec gives up there
    # too.
    for proposal in itertools.product(*offer.by_score(use_depth=True)):  # noqa: UP028
        yield proposal  # not "yield from": a product takes no ratings
    return None


def _greedy(section: ProposerSection, offer: Offer) -> Proposals:
    """Starts with the best option of each table; then advances the table of the largest size.

    Size is the candidate's ``size_key``; a table of no size is never advanced. With a
    ``threshold`` it stops after more than so many plans in a row that are not the best. There is
    one proposal more than all options together less one for each table.
    """
    ways = offer.by_score(section.use_depth)
    current = [candidates[0] for candidates in ways]
    places = [0] * len(ways)
    # TorchRec looks for the largest table in all of them at every step; a heap whose ties go to the
    # lower index finds the same one.
    heap = [entry for index in range(len(ways)) if (entry := _entry(ways[index], 0, index))]
    heapq.heapify(heap)
    best, inferior = math.inf, 0
    while True:
        rating = yield tuple(current)
        # A proposal that does not fit has no rating and does not count as inferior.
        if section.threshold and rating:
            inferior = 0 if rating < best else inferior + 1
            best = min(best, rating)
            if inferior > section.threshold:
                return None
        if not heap:
            return None
        index = heap[0][1]
        places[index] += 1
        current[index] = ways[index][places[index]]
        if entry := _entry(ways[index], places[index], index):
            heapq.heapreplace(heap, entry)
        else:
            heapq.heappop(heap)


def _entry(
    ways: list[Candidate], place: int, index: int
) -> tuple[tuple[int, int, int, int], int] | None:
    """A table's place in the heap, largest first; None if it cannot advance."""
    a, b, c, d = ways[place].size_key
    if place + 1 == len(ways) or (a, b, c, d) <= (0, 0, 0, 0):
        return None
    return (-a, -b, -c, -d), index


def _uniform(section: ProposerSection, offer: Offer) -> Proposals:
    """For each sharding type that every table has the best option of that type of each, in the
    order in which the types first appear."""
    best: dict[ShardingType, list[Candidate]] = {}
    for ways in offer.by_score(section.use_depth):
        seen = set()
        for candidate in ways:
            sharding_type = candidate.choice.option.sharding_type
            if sharding_type not in seen:
                seen.add(sharding_type)
                best.setdefault(sharding_type, []).append(candidate)
    types = (c.choice.option.sharding_type for ways in offer.tables for c in ways)
    for sharding_type in dict.fromkeys(types):
        if len(best[sharding_type]) == len(offer.tables):
            yield tuple(best[sharding_type])
    return None


def _dynamic_programming(section: ProposerSection, offer: Offer) -> Proposals:
    """First the smallest options, then for each amount of HBM in bins the fastest choice.

    Fast is the sum over all shards, not the busiest rank. Proposals come from the most HBM to the
    least; there are ``bins_per_device`` bins for each rank.
    """
    # TorchRec goes through all options by HBM, and so meets tables by their smallest one.
    tables = _by_hbm(offer)
    yield tuple(ways[0] for ways in tables)
    bins = section.bins_per_device * len(offer.capacities)
    if offer.hbm <= 0:
        return "there is no HBM to cut into bins"
    if bins * len(tables) > MAX_CELLS:
        return f"{len(tables):,} tables by {bins:,} bins, more than {MAX_CELLS:,} cells"
    layers = _solve(tables, bins, offer.hbm / bins, offer.watch)
    if len(layers) < len(tables):
        return "out of time"
    last = layers[-1]
    for bin_ in np.flatnonzero(last.chosen >= 0)[::-1].tolist():
        yield _read(tables, layers, bin_)
    return None


@dataclass(frozen=True, slots=True)
class _Layer:
    """For each bin of HBM that the tables so far may fill: the option of the last one of them,
    -1 if none leads there, and the bin of those before it."""

    chosen: NDArray[np.int16]
    before: NDArray[np.int32]


def _by_hbm(offer: Offer) -> list[list[Candidate]]:
    """Options by total HBM; tables by their smallest option."""
    tables: dict[int, list[Candidate]] = {}
    every = [(candidate, index) for index, ways in enumerate(offer.tables) for candidate in ways]
    for candidate, index in sorted(every, key=lambda entry: entry[0].storage[0]):
        tables.setdefault(index, []).append(candidate)
    return list(tables.values())


def _solve(tables: list[list[Candidate]], bins: int, size: float, watch: Watch) -> list[_Layer]:
    """A layer for each table; fewer if time runs out. Options may use less than all bins."""
    layers: list[_Layer] = []
    time_at, fill_at = np.zeros(1), np.zeros(1)  # before the first table: nothing used
    before = np.zeros(1, dtype=np.int32)
    for ways in tables:
        if watch.over():
            break
        best, fill = np.full(bins, np.inf), np.zeros(bins)
        layer = _Layer(np.full(bins, -1, dtype=np.int16), np.full(bins, -1, dtype=np.int32))
        for number, candidate in enumerate(ways):
            filled = fill_at + candidate.storage[0] / size
            # States are in order of their fill, so those that still fit are the first ones.
            usable = int(np.searchsorted(filled, bins))
            spent = time_at[:usable] + candidate.sum_ms
            target, winner = _faster(filled[:usable], spent, best)
            best[target], fill[target] = spent[winner], filled[winner]
            layer.chosen[target], layer.before[target] = number, before[winner]
        layers.append(layer)
        reached = np.flatnonzero(layer.chosen >= 0)
        time_at, fill_at = best[reached], fill[reached]
        before = reached.astype(np.int32)
    return layers


def _faster(filled: Floats, spent: Floats, best: Floats) -> tuple[Ints, Ints]:
    """Bins in which a state is faster than the ``best`` so far, and the fastest state of each; the
    first of equals.

    ``filled`` ascends, so states that land in one bin are neighbours.
    """
    if not len(filled):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    where = filled.astype(np.int64)
    starts = np.flatnonzero(np.diff(where, prepend=-1))
    least = np.minimum.reduceat(spent, starts)
    counts = np.diff(starts, append=len(where))
    first = np.flatnonzero(spent == np.repeat(least, counts))
    first = first[np.flatnonzero(np.diff(where[first], prepend=-1))]
    winner = first[spent[first] < best[where[first]]]
    return where[winner], winner


def _read(tables: list[list[Candidate]], layers: list[_Layer], bin_: int) -> tuple[Candidate, ...]:
    """The options that lead to a bin of the last table."""
    found = []
    for ways, layer in zip(reversed(tables), reversed(layers), strict=True):
        found.append(ways[layer.chosen[bin_]])
        bin_ = int(layer.before[bin_])
    return tuple(reversed(found))


# A job's ``proposers`` by kind.
WALKS: dict[str, Callable[[ProposerSection, Offer], Proposals]] = {
    "grid": _grid,
    "greedy": _greedy,
    "uniform": _uniform,
    "dynamic_programming": _dynamic_programming,
    "scaleup": larger_caches,
}
# What TorchRec's planner tries by default, in its order.
DEFAULT = (
    ProposerSection("grid"),
    ProposerSection("greedy"),
    ProposerSection("greedy", use_depth=False),
    ProposerSection("uniform"),
)


def proposals(section: ProposerSection, offer: Offer) -> Proposals:
    """One proposal after the other; each is answered by its rating."""
    return WALKS[section.kind](section, offer)
