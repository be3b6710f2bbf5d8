"""Ways to propose one candidate for each table, one proposal after the other, and the ones that a
job names."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.sharding import ShardingType
from shardwright.job.planner import ProposerSection
from shardwright.torchrec.candidate import Candidate, Offer, Proposals, Proposer
from shardwright.torchrec.dynamic_programming import DynamicProgramming
from shardwright.torchrec.scaleup import Scaleup


@dataclass(frozen=True, slots=True)
class Grid:
    """All combinations, best options first; none at all if they are more than the cap."""

    max_proposals: int = 10_000
    name: str = "grid"

    def proposals(self, offer: Offer) -> Proposals:
        """The product of all options, the last table's changing fastest."""
        count = math.prod(len(ways) for ways in offer.tables)
        if count > self.max_proposals:
            number = f"{count:,}" if count < 10**9 else f"about 10^{math.log10(count):.0f}"
            return f"{number} combinations, more than max_proposals = {self.max_proposals:,}"
        for proposal in itertools.product(*offer.by_score(use_depth=True)):  # noqa: UP028
            yield proposal  # not "yield from": a product takes no verdicts
        return None


@dataclass(frozen=True, slots=True)
class Greedy:
    """Starts with the best option of each table; then advances the table of the largest size.

    Size is the candidate's ``size_key``; a table of no size is never advanced. With a
    ``threshold`` it stops after more than so many plans in a row that are not the best.
    """

    use_depth: bool = True
    threshold: int | None = None
    name: str = "greedy"

    def proposals(self, offer: Offer) -> Proposals:
        """One more than all options together less one for each table."""
        ways = offer.by_score(self.use_depth)
        current = [candidates[0] for candidates in ways]
        places = [0] * len(ways)
        heap = [entry for index in range(len(ways)) if (entry := _entry(ways[index], 0, index))]
        heapq.heapify(heap)
        best, inferior = math.inf, 0
        while True:
            verdict = yield tuple(current)
            if self.threshold and verdict.rating:
                inferior = 0 if verdict.rating < best else inferior + 1
                best = min(best, verdict.rating)
                if inferior > self.threshold:
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


@dataclass(frozen=True, slots=True)
class Uniform:
    """For each sharding type that every table has: the best option of that type of each."""

    use_depth: bool = True
    name: str = "uniform"

    def proposals(self, offer: Offer) -> Proposals:
        """One for each type, in the order in which the types first appear."""
        best: dict[ShardingType, list[Candidate]] = {}
        for ways in offer.by_score(self.use_depth):
            seen = set()
            for candidate in ways:
                sharding_type = candidate.choice.option.sharding_type
                if sharding_type not in seen:
                    seen.add(sharding_type)
                    best.setdefault(sharding_type, []).append(candidate)
        for sharding_type in _in_order(offer):
            if len(best[sharding_type]) == len(offer.tables):
                yield tuple(best[sharding_type])
        return None


def _in_order(offer: Offer) -> dict[ShardingType, None]:
    return dict.fromkeys(c.choice.option.sharding_type for ways in offer.tables for c in ways)


# What TorchRec's planner tries by default, in its order.
DEFAULT: tuple[Proposer, ...] = (Grid(), Greedy(use_depth=True), Greedy(use_depth=False), Uniform())


def make_proposers(sections: Sequence[ProposerSection]) -> tuple[Proposer, ...]:
    """A proposer for each section; TorchRec's default list where a job names none."""
    return tuple(_make(section) for section in sections) or DEFAULT


def _make(section: ProposerSection) -> Proposer:
    match section.kind:
        case "greedy":
            return Greedy(section.use_depth, section.threshold)
        case "uniform":
            return Uniform(section.use_depth)
        case "grid":
            return Grid(section.max_proposals)
        case "dynamic_programming":
            return DynamicProgramming(section.bins_per_device)
        case "scaleup":
            return Scaleup(section.use_depth)
