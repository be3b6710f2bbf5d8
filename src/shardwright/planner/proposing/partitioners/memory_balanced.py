"""A placement that is hardly slower and needs less memory on the fullest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.cluster import Cluster
from shardwright.planner.proposing.candidate import Bytes, Candidate
from shardwright.planner.proposing.partitioners.greedy import GreedyPerf
from shardwright.planner.proposing.partitioners.partitioner import (
    NoRoomError,
    OutOfTimeError,
    Ranks,
    rank_ms,
)

CLOSE_ENOUGH = 10 * 2**20  # bytes between the bounds of the search


@dataclass(frozen=True, slots=True)
class MemoryBalanced:
    """Greedy by time; then at most ``max_search_count`` further tries with less HBM on each rank.

    A try counts if its busiest rank takes at most ``tolerance`` more time than in the first
    placement. Limits are halved between the mean need and the most that the first one needs.
    """

    max_search_count: int = 10
    tolerance: float = 0.02
    balance_modules: bool = False

    def place(
        self,
        proposal: Sequence[Candidate],
        cluster: Cluster,
        capacities: Sequence[Bytes],
        deadline: float,
    ) -> list[Ranks]:
        """As in Partitioner."""
        greedy = GreedyPerf("perf", self.balance_modules)
        best = greedy.place(proposal, cluster, capacities, deadline)
        limit = max(rank_ms(proposal, best, len(capacities))) * (1 + self.tolerance)
        used = _hbm_by_rank(proposal, best, len(capacities))
        largest = max(candidate.size_key[0] for candidate in proposal)
        low, high = max(int(sum(used) / len(used)), largest), max(used)
        for _ in range(self.max_search_count):
            if low + CLOSE_ENOUGH >= high:
                break
            middle = (high + low) // 2
            tried = [(min(middle, hbm), ddr, ssd) for hbm, ddr, ssd in capacities]
            try:
                found = greedy.place(proposal, cluster, tried, deadline)
            except NoRoomError:
                low = middle
                continue
            except OutOfTimeError:
                break
            if max(rank_ms(proposal, found, len(capacities))) > limit:
                low = middle
            else:
                best, high = found, middle
        return best


def _hbm_by_rank(
    proposal: Sequence[Candidate], placed: Sequence[Ranks], world_size: int
) -> list[int]:
    used = [0] * world_size
    for candidate, ranks in zip(proposal, placed, strict=True):
        for load, rank in zip(candidate.loads, ranks, strict=True):
            used[rank] += load.hbm
    return used
