"""The ways to give the shards of a proposal to ranks."""

# TorchRec's partitioner breaks ties by the time that ranks have taken so far, in doubles. A sum
# that is rounded otherwise sends the next shard to another rank, and from there on every placement
# is another one. So what ranks take is kept part by part, each part is added to in the order of
# the proposal, and a total is made of the five parts anew: never a difference, never ``sum``,
# which may round but once. Shortcuts (one addition for many like ranks, a heap that is kept
# between tables) are taken only where they round alike. Why a proposal had no room is not kept:
# TorchRec's message names a shard, but ours are of :mod:`shardwright.planner.shortage`, which
# looks at the job.

from __future__ import annotations

import contextlib
import heapq
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from shardwright.core.cluster import Cluster
from shardwright.core.sharding import traits
from shardwright.job.planner import PartitionerSection
from shardwright.planner.search.watch import Watch
from shardwright.torchrec.candidate import (
    MS_PER_SECOND,
    NO_PARTS,
    Bytes,
    Candidate,
    Load,
    Parts,
    add_parts,
    in_turn,
    total_of,
)

# Ranks by their time, then by their number on the host, then by number.
Heap = list[tuple[float, int, int]]
_Saved = tuple[int, int, int, int, Parts, float]


class NoRoomError(Exception):
    """A proposal does not fit."""


class RankBudgets:
    """Free bytes by tier and taken milliseconds of every rank; a shard fits if no tier lacks."""

    def __init__(self, capacities: Sequence[Bytes]) -> None:
        self.hbm = [capacity[0] for capacity in capacities]
        self.ddr = [capacity[1] for capacity in capacities]
        self.ssd = [capacity[2] for capacity in capacities]
        self.parts: list[Parts] = [NO_PARTS] * len(capacities)
        self.totals = [0.0] * len(capacities)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hbm)

    def free(self, rank: int) -> Bytes:
        """Bytes by tier that a rank has left."""
        return self.hbm[rank], self.ddr[rank], self.ssd[rank]

    def free_of(self, ranks: range) -> Bytes:
        """Bytes by tier that consecutive ranks have left together."""
        part = slice(ranks.start, ranks.stop)
        return sum(self.hbm[part]), sum(self.ddr[part]), sum(self.ssd[part])

    def fits(self, load: Load, rank: int) -> bool:
        """Whether a shard fits on a rank."""
        return (
            load.hbm <= self.hbm[rank] and load.ddr <= self.ddr[rank] and load.ssd <= self.ssd[rank]
        )

    def put(self, load: Load, rank: int) -> None:
        """Place a shard on a rank."""
        self.hbm[rank] -= load.hbm
        self.ddr[rank] -= load.ddr
        self.ssd[rank] -= load.ssd
        a, b, c, d, e = self.parts[rank]  # add_parts and total_of, without the calls
        a2, b2, c2, d2, e2 = load.parts
        self.parts[rank] = a, b, c, d, e = a + a2, b + b2, c + c2, d + d2, e + e2
        self.totals[rank] = a + b + c + d + e

    def save(self, ranks: Iterable[int]) -> list[_Saved]:
        """The state of ranks, to go back to."""
        return [(r, *self.free(r), self.parts[r], self.totals[r]) for r in ranks]

    def restore(self, saved: Iterable[_Saved]) -> None:
        """Go back to a saved state."""
        for rank, hbm, ddr, ssd, parts, total in saved:
            self.hbm[rank], self.ddr[rank], self.ssd[rank] = hbm, ddr, ssd
            self.parts[rank], self.totals[rank] = parts, total

    def heap(self, ranks: Iterable[int], local: int) -> Heap:
        """Ranks with the least taken time first."""
        found = [(self.totals[rank], rank % local, rank) for rank in ranks]
        heapq.heapify(found)
        return found


def fill_uniformly(budgets: RankBudgets, candidates: Sequence[Candidate]) -> None:
    """Place shard k of every candidate on rank k; ``budgets`` is empty before.

    :raises NoRoomError: some shard does not fit.
    """
    if not candidates:
        return
    size = budgets.world_size
    # Bytes may be added in any order, for they are ints; milliseconds below may not.
    tiers = (budgets.hbm, budgets.ddr, budgets.ssd)
    taken = [[0] * (size + 1) for _ in tiers]  # what changes from rank to rank
    for candidate in candidates:
        start = 0
        for count, load in candidate.runs:
            for changes, nbytes in zip(taken, load[:3], strict=True):
                if nbytes:
                    changes[start] += nbytes
                    changes[start + count] -= nbytes
            start += count
        assert start == size
    left = [
        [free - used for free, used in zip(tier, accumulate(changes[:-1]), strict=True)]
        for tier, changes in zip(tiers, taken, strict=True)
    ]
    if any(min(tier) < 0 for tier in left):
        raise NoRoomError
    budgets.hbm, budgets.ddr, budgets.ssd = left
    if all(candidate.same_times for candidate in candidates):
        parts = NO_PARTS
        for candidate in candidates:
            parts = add_parts(parts, candidate.runs[0][1].parts)
        budgets.parts = [parts] * size
    else:
        for candidate in candidates:
            loads = zip(budgets.parts, candidate.loads, strict=True)
            budgets.parts = [add_parts(parts, load.parts) for parts, load in loads]
    budgets.totals = [total_of(parts) for parts in budgets.parts]


def _has_room(budgets: RankBudgets, candidate: Candidate, start: int) -> bool:
    """Whether each rank from ``start`` on has room for its shard, one on each."""
    for count, load in candidate.runs:
        part = slice(start, start + count)
        free = budgets.hbm[part], budgets.ddr[part], budgets.ssd[part]
        if any(map(operator.gt, load[:3], map(min, free))):
            return False
        start = part.stop
    return True


def _take_bytes(budgets: RankBudgets, candidate: Candidate, start: int) -> None:
    """Take the bytes of one shard on each of the ranks from ``start`` on."""
    for count, load in candidate.runs:
        part = slice(start, start + count)
        for tier, nbytes in zip((budgets.hbm, budgets.ddr, budgets.ssd), load.storage, strict=True):
            if nbytes:
                tier[part] = [free - nbytes for free in tier[part]]
        start = part.stop


def put_on_least_taken(budgets: RankBudgets, candidate: Candidate, heap: Heap) -> list[int]:
    """Place each shard on the first rank of ``heap`` that has room, and keep the heap.

    :raises NoRoomError: a shard fits nowhere; earlier ones are placed, and the heap is spoilt.
    """
    ranks = []
    for load in candidate.loads:
        full: Heap = []
        while heap:
            _, local, rank = heap[0]
            if budgets.fits(load, rank):
                budgets.put(load, rank)
                heapq.heapreplace(heap, (budgets.totals[rank], local, rank))
                ranks.append(rank)
                break
            full.append(heapq.heappop(heap))
        else:
            raise NoRoomError
        for entry in full:
            heapq.heappush(heap, entry)
    return ranks


def put_on_different_ranks(budgets: RankBudgets, candidate: Candidate, local: int) -> list[int]:
    """Place each shard on the least taken rank that has room and none of the other shards.

    :raises NoRoomError: a shard fits nowhere, or there are more shards than ranks.
    """
    ranks: list[int] = []
    for load in candidate.loads:
        others = [rank for rank in range(budgets.world_size) if rank not in ranks]
        usable = [rank for rank in others if budgets.fits(load, rank)]
        if not usable:
            raise NoRoomError
        rank = min(usable, key=lambda r: (budgets.totals[r], r % local, r))
        budgets.put(load, rank)
        ranks.append(rank)
    return ranks


def put_side_by_side(budgets: RankBudgets, candidate: Candidate, start: int) -> bool:
    """Place each shard on the rank after that of the one before, the first on ``start``.

    False, and nothing placed, if one does not fit.
    """
    if not _has_room(budgets, candidate, start):
        return False
    _take_bytes(budgets, candidate, start)
    for count, load in candidate.runs:
        part = slice(start, start + count)
        before = budgets.parts[part]
        if before == [before[0]] * count:  # all ranks alike, as long as no shard is on one alone
            after = add_parts(before[0], load.parts)
            budgets.parts[part], budgets.totals[part] = [after] * count, [total_of(after)] * count
        else:
            budgets.parts[part] = different = [add_parts(parts, load.parts) for parts in before]
            budgets.totals[part] = [total_of(parts) for parts in different]
        start = part.stop
    return True


def put_in_order(budgets: RankBudgets, candidate: Candidate, ranks: Sequence[int]) -> bool:
    """Place shard k on the k-th of ``ranks``, which may repeat.

    False, and nothing placed, if one does not fit.
    """
    # What has no room is left as it was, to the last bit: adding and taking away again would not
    # give the same doubles.
    saved = budgets.save(ranks)
    for load, rank in zip(candidate.loads, ranks, strict=True):
        if not budgets.fits(load, rank):
            budgets.restore(saved)
            return False
        budgets.put(load, rank)
    return True


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
    budgets = RankBudgets(capacities)
    everyone = range(budgets.world_size)
    placed: list[Ranks] = [everyone] * len(proposal)
    fill_uniformly(budgets, [c for c in proposal if c.partition == "uniform"])
    hosts = _Hosts(budgets, cluster.group)
    heap: Heap | None = None
    for index in _order(section, proposal):
        if watch.over():
            raise OutOfTimeError
        candidate = proposal[index]
        if candidate.partition != "device":
            placed[index] = hosts.put(candidate)
            # Hosts change what ranks have taken behind the heap's back.
            heap = None
        elif _needs_different_ranks(candidate):
            placed[index] = put_on_different_ranks(budgets, candidate, cluster.local_world_size)
            heap = None
        else:
            heap = heap or budgets.heap(everyone, cluster.local_world_size)
            placed[index] = put_on_least_taken(budgets, candidate, heap)
    return placed


def _order(section: PartitionerSection, proposal: Sequence[Candidate]) -> list[int]:
    """What is not uniform by its bytes (HBM, DDR, SSD) or its time, the largest first; ties stay in
    the order of the proposal. With ``balance_modules`` tables of small modules go before."""
    rest = [i for i, candidate in enumerate(proposal) if candidate.partition != "uniform"]
    if section.sort_by == "storage":
        # Stable with reverse=True, too: equals stay in the proposal's order.
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

    def __init__(self, budgets: RankBudgets, group: int) -> None:
        self._budgets = budgets
        starts = range(0, budgets.world_size - group + 1, group)
        self._ranks = [range(start, start + group) for start in starts]
        self._group = group

    def put(self, candidate: Candidate) -> Ranks:
        """Place on one host, or on several.

        :raises NoRoomError: there is no room on any.
        """
        totals = self._budgets.totals
        order = sorted(self._ranks, key=lambda ranks: in_turn(totals[ranks.start : ranks.stop]))
        if candidate.partition == "host":
            return self._put_on_one(candidate, order)
        return self._put_on_several(candidate, order)

    def _put_on_one(self, candidate: Candidate, order: Sequence[range]) -> Ranks:
        cuts_rows = traits(candidate.choice.option.sharding_type).cuts_rows
        for ranks in order:
            free = self._budgets.free_of(ranks)
            if any(n > f for n, f in zip(candidate.storage, free, strict=True)):
                continue
            if not cuts_rows:
                with contextlib.suppress(NoRoomError):
                    return self._put_by_device(candidate, ranks)
            elif put_side_by_side(self._budgets, candidate, ranks.start):
                return ranks
        raise NoRoomError

    def _put_by_device(self, candidate: Candidate, ranks: range) -> Ranks:
        saved = self._budgets.save(ranks)
        try:
            heap = self._budgets.heap(ranks, self._group)
            return put_on_least_taken(self._budgets, candidate, heap)
        except NoRoomError:
            self._budgets.restore(saved)
            raise

    def _put_on_several(self, candidate: Candidate, order: Sequence[range]) -> Ranks:
        count, rest = divmod(len(candidate.loads), self._group)
        assert rest == 0
        if count >= len(order):  # all hosts, the first ones perhaps more than once
            windows = [[order[k % len(order)] for k in range(count)]] if order else []
        else:
            windows = [list(order[k : k + count]) for k in range(len(order) - count + 1)]
        for window in windows:
            chosen = [rank for ranks in window for rank in ranks]
            if put_in_order(self._budgets, candidate, chosen):
                return chosen
        raise NoRoomError


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
    # No limit below the largest single shard, which has to lie somewhere, nor below the mean.
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
