"""Fastest options first, then the largest table is moved on, one option at a time."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from shardwright.planner.proposing.candidate import Candidate
from shardwright.planner.proposing.proposers.proposer import Offer, Proposals


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
