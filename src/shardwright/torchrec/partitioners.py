"""The ways to give the shards of a proposal to ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from shardwright.core.cluster import Cluster
from shardwright.core.sharding import traits
from shardwright.job.planner import PartitionerSection
from shardwright.planner.search.watch import Watch
from shardwright.torchrec.candidate import MS_PER_SECOND, Bytes, Candidate, in_turn
from shardwright.torchrec.room import (
    Heap,
    NoRoomError,
    Room,
    fill_uniformly,
    no_room,
    put_in_order,
    put_on_different_ranks,
    put_on_least_taken,
    put_side_by_side,
)

CLOSE_ENOUGH = 10 * 2**20  # bytes between the bounds of the search for less HBM

Ranks = Sequence[int]  # the rank of each shard of one candidate


class OutOfTimeError(Exception):
    """The time was over while shards were being placed."""


def place(
    section: PartitionerSection,
    proposal: Sequence[Candidate],
    cluster: Cluster,
    capacities: Sequence[Bytes],
    watch: Watch,
) -> list[Ranks]:
    """The ranks of every candidate's shards, in the order of the proposal, as ``section`` asks.

    :raises NoRoomError: they do not fit into ``capacities``, the bytes of each rank.
    :raises OutOfTimeError: the time of ``watch`` is over.
    """
    if section.kind == "greedy":
        return _greedy(section, proposal, cluster, capacities, watch)
    return _memory_balanced(section, proposal, cluster, capacities, watch)


def _greedy(
    section: PartitionerSection,
    proposal: Sequence[Candidate],
    cluster: Cluster,
    capacities: Sequence[Bytes],
    watch: Watch,
) -> list[Ranks]:
    """Even shards first, then the largest tables.

    A shard of a device goes to the rank with the least time that has room, those of a host to the
    first such host, those of several hosts to neighbours in that order.
    """
    room = Room(capacities)
    everyone = range(room.world_size)
    placed: list[Ranks] = [everyone] * len(proposal)
    fill_uniformly(room, [c for c in proposal if c.partition == "uniform"])
    hosts = _Hosts(room, cluster.group)
    heap: Heap | None = None
    for index in _order(section, proposal):
        if watch.over():
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


def _order(section: PartitionerSection, proposal: Sequence[Candidate]) -> list[int]:
    """What is not uniform by its bytes (HBM, DDR, SSD) or its time, the largest first; ties stay in
    the order of the proposal. With ``balance_modules`` tables of small modules go before."""
    rest = [i for i, candidate in enumerate(proposal) if candidate.partition != "uniform"]
    if section.sort_by == "storage":
        rest.sort(key=lambda i: proposal[i].storage, reverse=True)
    else:
        rest.sort(key=lambda i: proposal[i].sum_ms, reverse=True)
    if section.balance_modules:
        tables = Counter(candidate.module for candidate in proposal)
        rest.sort(key=lambda i: tables[proposal[i].module])
    return rest


def _needs_different_ranks(candidate: Candidate) -> bool:
    option = candidate.choice.option
    kind = traits(option.sharding_type)
    return option.compute_kernel == "key_value" and kind.cuts_columns and kind.partition == "device"


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
            if traits(candidate.choice.option.sharding_type).cuts_rows:
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


def _memory_balanced(
    section: PartitionerSection,
    proposal: Sequence[Candidate],
    cluster: Cluster,
    capacities: Sequence[Bytes],
    watch: Watch,
) -> list[Ranks]:
    """Greedy by time; then at most ``max_search_count`` further tries with less HBM on each rank.

    A try counts if its busiest rank takes at most ``tolerance`` more time than in the first
    placement. Limits are halved between the mean need and the most that the first one needs.
    """
    by_time = msgspec.structs.replace(section, sort_by="perf")
    best = _greedy(by_time, proposal, cluster, capacities, watch)
    limit = max(rank_ms(proposal, best, len(capacities))) * (1 + section.tolerance)
    used = _hbm_by_rank(proposal, best, len(capacities))
    largest = max(candidate.size_key[0] for candidate in proposal)
    low, high = max(int(sum(used) / len(used)), largest), max(used)
    for _ in range(section.max_search_count):
        if low + CLOSE_ENOUGH >= high:
            break
        middle = (high + low) // 2
        tried = [(min(middle, hbm), ddr, ssd) for hbm, ddr, ssd in capacities]
        try:
            found = _greedy(by_time, proposal, cluster, tried, watch)
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


def rank_ms(proposal: Sequence[Candidate], placed: Sequence[Ranks], world_size: int) -> list[float]:
    """Milliseconds of each rank: the totals of its shards in the order of the proposal."""
    found = [0.0] * world_size
    for candidate, ranks in zip(proposal, placed, strict=True):
        if candidate.same_times and len(ranks) == world_size and candidate.partition == "uniform":
            total = candidate.runs[0][1].total
            found = [ms + total for ms in found]
        else:
            for load, rank in zip(candidate.loads, ranks, strict=True):
                found[rank] += load.total
    shared = in_turn(candidate.choice.everywhere for candidate in proposal) * MS_PER_SECOND
    return [ms + shared for ms in found] if shared else found
