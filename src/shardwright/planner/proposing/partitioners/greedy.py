"""Even shards first, then the largest tables, each to the ranks that have least to do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.core.cluster import Cluster
from shardwright.planner.proposing.candidate import Bytes, Candidate, in_turn
from shardwright.planner.proposing.partitioners.partitioner import (
    NoRoomError,
    OutOfTimeError,
    Ranks,
)
from shardwright.planner.proposing.partitioners.room import (
    Heap,
    Room,
    fill_uniformly,
    no_room,
    put_in_order,
    put_on_different_ranks,
    put_on_least_taken,
    put_side_by_side,
)


@dataclass(frozen=True, slots=True)
class GreedyPerf:
    """Tables go in descending order of their bytes (HBM, DDR, SSD) or of their time.

    With ``balance_modules`` those of small modules go first. A shard of a device goes to the rank
    with the least time that has room, those of a host to the first such host, those of several
    hosts to neighbours in that order.
    """

    sort_by: Literal["storage", "perf"] = "storage"
    balance_modules: bool = False

    def place(
        self,
        proposal: Sequence[Candidate],
        cluster: Cluster,
        capacities: Sequence[Bytes],
        deadline: float,
    ) -> list[Ranks]:
        """As in Partitioner."""
        room = Room(capacities)
        everyone = range(room.world_size)
        placed: list[Ranks] = [everyone] * len(proposal)
        fill_uniformly(room, [c for c in proposal if c.partition == "uniform"])
        hosts = _Hosts(room, cluster.group)
        heap: Heap | None = None
        for index in self._order(proposal):
            if time.monotonic() > deadline:
                raise OutOfTimeError
            candidate = proposal[index]
            if candidate.partition != "device":
                placed[index] = hosts.put(candidate)
                heap = None
            elif _needs_different_ranks(candidate):
                placed[index] = put_on_different_ranks(room, candidate, cluster.local_world_size)
                heap = None
            else:
                heap = heap or room.heap(everyone, cluster.local_world_size)
                placed[index] = put_on_least_taken(room, candidate, heap)
        return placed

    def _order(self, proposal: Sequence[Candidate]) -> list[int]:
        """What is not uniform, the largest first; ties stay in the order of the proposal."""
        rest = [i for i, candidate in enumerate(proposal) if candidate.partition != "uniform"]
        if self.sort_by == "storage":
            rest.sort(key=lambda i: proposal[i].storage, reverse=True)
        else:
            rest.sort(key=lambda i: proposal[i].sum_ms, reverse=True)
        if self.balance_modules:
            tables = Counter(candidate.module for candidate in proposal)
            rest.sort(key=lambda i: tables[proposal[i].module])
        return rest


def _needs_different_ranks(candidate: Candidate) -> bool:
    option = candidate.choice.option
    return option.compute_kernel == "key_value" and option.sharding_type == "column_wise"


class _Hosts:
    """Groups of neighbouring ranks, and the time that each group's ranks take together."""

    def __init__(self, room: Room, group: int) -> None:
        self._room = room
        starts = range(0, room.world_size - group + 1, group)
        self._ranks = [range(start, start + group) for start in starts]
        self._group = group

    def put(self, candidate: Candidate) -> Ranks:
        """Place on one host, or on several.

        :raises NoRoomError: there is no room on any.
        """
        totals = self._room.totals
        order = sorted(self._ranks, key=lambda ranks: in_turn(totals[ranks.start : ranks.stop]))
        if candidate.partition == "host":
            return self._put_on_one(candidate, order)
        return self._put_on_several(candidate, order)

    def _put_on_one(self, candidate: Candidate, order: Sequence[range]) -> Ranks:
        needed = candidate.storage
        closest: NoRoomError | None = None
        for ranks in order:
            free = self._room.free_of(ranks)
            if any(n > f for n, f in zip(needed, free, strict=True)):
                closest = _closer(closest, no_room(candidate, needed, ranks, free))
                continue
            if candidate.choice.option.sharding_type == "table_row_wise":
                error = put_side_by_side(self._room, candidate, ranks.start)
                if error is None:
                    return ranks
            else:
                try:
                    return self._put_by_device(candidate, ranks)
                except NoRoomError as found:
                    error = found
            closest = _closer(closest, error)
        raise closest or no_room(candidate, needed, (), (0, 0, 0))

    def _put_by_device(self, candidate: Candidate, ranks: range) -> Ranks:
        saved = self._room.save(ranks)
        try:
            heap = self._room.heap(ranks, self._group)
            return put_on_least_taken(self._room, candidate, heap)
        except NoRoomError:
            self._room.restore(saved)
            raise

    def _put_on_several(self, candidate: Candidate, order: Sequence[range]) -> Ranks:
        count, rest = divmod(len(candidate.loads), self._group)
        assert rest == 0
        if count >= len(order):  # all hosts, the first ones perhaps more than once
            windows = [[order[k % len(order)] for k in range(count)]] if order else []
        else:
            windows = [list(order[k : k + count]) for k in range(len(order) - count + 1)]
        closest: NoRoomError | None = None
        for window in windows:
            chosen = [rank for ranks in window for rank in ranks]
            error = put_in_order(self._room, candidate, chosen)
            if error is None:
                return chosen
            closest = _closer(closest, error)
        raise closest or no_room(candidate, candidate.storage, (), (0, 0, 0))


def _closer(a: NoRoomError | None, b: NoRoomError) -> NoRoomError:
    """The one that lacks fewer bytes."""
    if a is None or sum(b.shortfall.missing) < sum(a.shortfall.missing):
        return b
    return a
