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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright.core.model import CacheSpec, TableSpec
from shardwright.core.option import Option
from shardwright.core.sharding import ShardingType
from shardwright.job.planner import ProposerSection
from shardwright.planner.search.watch import Watch
from shardwright.torchrec.candidate import Candidate, Offer, Proposals, candidate_of

# TorchRec works with torch tensors, float32 by default, so a load factor that is rounded otherwise
# is another cache, another price, and another rating: proposals would part after the first. So
# widths follow it operation by operation, and random probes are the very numbers that its generator
# draws.


CACHED = "fused_uvm_caching"
WHOLE = "fused"
LOW, HIGH = 0.1, 0.9  # load factors at which a table's bytes are looked at
ALMOST_ALL = 0.9999  # a load factor beyond which a table is kept whole
MAX_PASSES = 128  # of dealing out what is left over
PROBES = 16
UNKNOWN_COST = 1e99
SEED = 42
SHRINK = 0.95  # of the radius, after each improvement
DRAW_BITS = 24  # of a single-precision uniform number, the low ones of a draw of 32
MAX_DRAWS = 1_000  # for one probe; more are needed only where there is nothing left to probe

Singles = NDArray[np.float32]


def larger_caches(section: ProposerSection, offer: Offer) -> Proposals:
    """Cached options as they are; then larger caches in proportion to lookups and cacheability.

    How much memory to give is searched for, up to what is free or all that caches can use: one
    proposal for each probe of the search.
    """
    start = [_cached(ways) for ways in offer.by_score(section.use_depth)]
    if offer.price is None:
        yield tuple(start)
        return "there is nothing to price larger caches with"
    start = _promoted(offer, start)
    rating = yield tuple(start)
    if rating is None:
        return "the caches do not fit as they are"
    used = _hbm(start)
    model = _Model.of(offer, start)
    if model is None:
        return None
    ceiling = used + int(model.whole.sum()) - _hbm(start[i] for i in model.places)
    budget = min(offer.hbm - used, ceiling - used)
    search = LuusJaakola(0, budget, PROBES, rating)
    proposal = tuple(start)
    while True:
        if rating is None:
            # What did not fit bounds the search from above: nothing beyond it is probed again.
            search.shrink(_hbm(proposal) - used)
        # A cost beyond any real one for what does not fit, since the search compares numbers.
        probe = search.next(rating or UNKNOWN_COST)
        if probe is None:
            return None
        proposal = tuple(_scaled(offer, start, model, model.deal(int(probe))))
        rating = yield proposal


def _cached(ways: Sequence[Candidate]) -> Candidate:
    """The best cached option, or the best one if none is cached."""
    return next((c for c in ways if c.choice.option.compute_kernel == CACHED), ways[0])


def _hbm(candidates: Any) -> int:
    return sum(candidate.storage[0] for candidate in candidates)


def _case(candidate: Candidate, load_factor: float | None, kernel: str) -> tuple[TableSpec, Option]:
    """A candidate's table and option with another load factor and kernel."""
    table, option = candidate.choice.table, candidate.choice.option
    cache = msgspec.structs.replace(table.cache or CacheSpec(), load_factor=load_factor)
    return (
        msgspec.structs.replace(table, cache=cache),
        msgspec.structs.replace(option, compute_kernel=kernel),
    )


def _priced(offer: Offer, cases: list[tuple[TableSpec, Option]]) -> list[Candidate]:
    assert offer.price is not None
    return [candidate_of(choice, offer.known) for choice in offer.price(cases)]


def _promoted(offer: Offer, start: list[Candidate]) -> list[Candidate]:
    """Cached tables that take less HBM when they are kept whole are kept whole."""
    places = [i for i, c in enumerate(start) if c.choice.option.compute_kernel == CACHED]
    whole = _priced(offer, [_case(start[i], None, WHOLE) for i in places])
    found = list(start)
    for i, candidate in zip(places, whole, strict=True):
        # A small table's bookkeeping can be more than what its cache leaves out.
        if candidate.storage[0] < start[i].storage[0]:
            found[i] = candidate
    return found


def _need(candidate: Candidate) -> float:
    """How much a larger cache helps: cacheability by expected lookups."""
    cache = candidate.choice.table.cache
    if cache is None or cache.stats is None:
        return 0.0
    lookups, cacheability, _ = cache.stats
    return cacheability * lookups


def _load_factor(candidate: Candidate) -> float:
    cache = candidate.choice.table.cache
    return (cache.load_factor or 0.0) if cache else 0.0


def _scalable(candidate: Candidate) -> bool:
    cached = candidate.choice.option.compute_kernel == CACHED
    return cached and _need(candidate) * _load_factor(candidate) > 0


@dataclass(frozen=True, slots=True)
class _Model:
    """The tables whose caches can grow, as their ``places`` in a proposal.

    A table with load factor x takes ``slope`` * x + ``fixed`` bytes of HBM, and ``whole`` bytes
    when it is not cached; it has ``load`` and is dealt to in proportion to ``need``.
    """

    places: tuple[int, ...]
    slope: Singles
    fixed: Singles
    whole: NDArray[np.int64]
    load: Singles
    need: Singles

    @classmethod
    def of(cls, offer: Offer, start: Sequence[Candidate]) -> _Model | None:
        """None if no cache can grow."""
        places = tuple(i for i, candidate in enumerate(start) if _scalable(candidate))
        if not places:
            return None
        tables = [start[i] for i in places]
        low, high, whole = (
            np.array([c.storage[0] for c in _priced(offer, [_case(t, *to) for t in tables])])
            for to in ((LOW, CACHED), (HIGH, CACHED), (None, WHOLE))
        )
        slope = (high - low).astype(np.float32) / np.float32(HIGH - LOW)
        fixed = low.astype(np.float32) - slope * np.float32(LOW)
        load = np.array([_load_factor(table) for table in tables], dtype=np.float32)
        need = np.array([_need(table) for table in tables], dtype=np.float32)
        return cls(places, slope, fixed, whole, load, need)

    def deal(self, budget: float) -> list[float]:
        """Load factors that use ``budget`` more bytes, or all that caches can use."""
        least = self.fixed.astype(np.float64)
        most = (self.slope + self.fixed).astype(np.float64)
        cache = (self.slope * self.load + self.fixed).astype(np.float64) - least
        room = most - least
        for _ in range(MAX_PASSES):
            growing = least + cache < most
            if budget <= 1 or not growing.any():
                break
            need = np.where(growing, self.need, 0).astype(np.float64)
            larger = np.minimum(cache + budget * (need / need.sum()), room)
            budget -= float((larger - cache).sum())
            cache = larger
            # A cache that would take more than the whole table without one is set to all of its
            # rows, which is later kept without a cache; what that leaves over goes to the others in
            # the next pass.
            over = growing & (least + cache > self.whole)
            budget += float((least + cache - self.whole)[over].sum())
            cache[over] = room[over]
        share = np.divide(cache, room, out=self.load.astype(np.float64), where=room != 0)
        return [float(x) for x in share.astype(np.float32)]


def _scaled(
    offer: Offer, start: Sequence[Candidate], model: _Model, load_factors: Sequence[float]
) -> list[Candidate]:
    """``start`` with other load factors; a table that is cached all but whole is kept whole."""
    cases = [
        _case(start[i], None, WHOLE) if share > ALMOST_ALL else _case(start[i], share, CACHED)
        for i, share in zip(model.places, load_factors, strict=True)
    ]
    found = list(start)
    for i, candidate in zip(model.places, _priced(offer, cases), strict=True):
        found[i] = candidate
    return found


class LuusJaakola:
    """Looks for the smallest cost on [``left``, ``right``] with ``probes`` evaluations.

    A probe lies within a radius of the best point so far. A bound whose cost is known is not
    probed again.
    """

    def __init__(self, left: float, right: float, probes: int, left_cost: float | None) -> None:
        self._left, self._right = left, right
        self._left_known, self._right_known = left_cost is not None, False
        self._probes = probes
        self._asked = 0
        self._draws = np.random.RandomState(SEED)
        self._best = self._uniform(left, right)
        self._best_cost = 0.0
        self._probe = math.nan
        self._radius = right - left

    def shrink(self, right: float) -> None:
        """Move the right bound: from there on the cost is known to be infinite."""
        self._right, self._right_known = right, True
        self._radius = right - self._left
        self._best = self._clamp(self._best)

    def next(self, cost: float) -> float | None:
        """The next point to evaluate, given the cost of the one before; None at the end.

        The first call's cost is ignored.
        """
        self._asked += 1
        if self._asked == 1:
            return self._best
        if self._asked == 2:  # the first point was the best one by definition
            self._best_cost = cost
        elif self._asked > self._probes:
            return None
        elif cost <= self._best_cost:
            self._best, self._best_cost = self._probe, cost
            self._radius *= SHRINK
        if self._probe == self._left:
            self._left_known = True
        elif self._probe == self._right:
            self._right_known = True
        return self._draw()

    def _draw(self) -> float | None:
        for _ in range(MAX_DRAWS):
            probe = self._clamp(self._best + self._uniform(-self._radius, self._radius))
            known = (probe == self._left and self._left_known) or (
                probe == self._right and self._right_known
            )
            if not known:
                self._probe = probe
                return probe
        return None

    def _clamp(self, point: float) -> float:
        if point < self._left:
            return self._left
        return self._right if point > self._right else point

    def _uniform(self, low: float, high: float) -> float:
        """An even draw; the generator is MT19937, whose stream PyTorch has for the same seed."""
        bits = int(self._draws.randint(2**32, dtype=np.uint32)) & (2**DRAW_BITS - 1)
        # As torch.rand makes a float32 of 32 random bits: the low 24 of them, over 2^24.
        share: float = bits / 2**DRAW_BITS
        return low + (high - low) * share


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
