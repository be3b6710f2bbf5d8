"""The state of all ranks while shards are placed: bytes that are free, and time that is taken."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwright.torchrec.candidate import (
    NO_PARTS,
    Bytes,
    Candidate,
    Load,
    Parts,
    add_parts,
    total_of,
)

# Ranks by their time, then by their number on the host, then by number.
Heap = list[tuple[float, int, int]]
_Saved = tuple[int, int, int, int, Parts, float]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A shard, or all shards of a table for one host, that found no room.

    ``ranks`` is the rank or the host that came closest: it had ``available`` bytes by tier left of
    the ``needed`` ones.
    """

    table: str
    sharding_type: str
    ranks: tuple[int, ...]
    needed: Bytes
    available: Bytes

    @property
    def missing(self) -> Bytes:
        """Bytes by tier that were not there."""
        a, b, c = (max(0, n - a) for n, a in zip(self.needed, self.available, strict=True))
        return a, b, c


class NoRoomError(Exception):
    """A proposal does not fit."""

    def __init__(self, shortfall: Shortfall) -> None:
        super().__init__(f"no room for {shortfall.table}")
        self.shortfall = shortfall


class Room:
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


def no_room(candidate: Candidate, needed: Bytes, ranks: Iterable[int], free: Bytes) -> NoRoomError:
    """The error that says so."""
    option = candidate.choice.option
    shortfall = Shortfall(candidate.table, option.sharding_type, tuple(ranks), needed, free)
    return NoRoomError(shortfall)


def fill_uniformly(room: Room, candidates: Sequence[Candidate]) -> None:
    """Place shard k of every candidate on rank k; ``room`` is empty before.

    :raises NoRoomError: some shard does not fit.
    """
    if not candidates:
        return
    size = room.world_size
    tiers = (room.hbm, room.ddr, room.ssd)
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
        raise _first_that_does_not_fit(room, candidates)
    room.hbm, room.ddr, room.ssd = left
    if all(candidate.same_times for candidate in candidates):
        parts = NO_PARTS
        for candidate in candidates:
            parts = add_parts(parts, candidate.runs[0][1].parts)
        room.parts = [parts] * size
    else:
        for candidate in candidates:
            loads = zip(room.parts, candidate.loads, strict=True)
            room.parts = [add_parts(parts, load.parts) for parts, load in loads]
    room.totals = [total_of(parts) for parts in room.parts]


def _first_that_does_not_fit(room: Room, candidates: Sequence[Candidate]) -> NoRoomError:
    for candidate in candidates:
        rank = _first_without_room(room, candidate, 0)
        if rank is not None:
            return no_room(candidate, candidate.loads[rank].storage, (rank,), room.free(rank))
        _take_bytes(room, candidate, 0)
    raise AssertionError("everything fits")


def _first_without_room(room: Room, candidate: Candidate, start: int) -> int | None:
    """The first of the ranks from ``start`` on that has no room for its shard, one on each."""
    for count, load in candidate.runs:
        part = slice(start, start + count)
        free = room.hbm[part], room.ddr[part], room.ssd[part]
        if any(map(operator.gt, load[:3], map(min, free))):
            return next(r for r in range(part.start, part.stop) if not room.fits(load, r))
        start = part.stop
    return None


def _take_bytes(room: Room, candidate: Candidate, start: int) -> None:
    """Take the bytes of one shard on each of the ranks from ``start`` on."""
    for count, load in candidate.runs:
        part = slice(start, start + count)
        for tier, nbytes in zip((room.hbm, room.ddr, room.ssd), load.storage, strict=True):
            if nbytes:
                tier[part] = [free - nbytes for free in tier[part]]
        start = part.stop


def put_on_least_taken(room: Room, candidate: Candidate, heap: Heap) -> list[int]:
    """Place each shard on the first rank of ``heap`` that has room, and keep the heap.

    :raises NoRoomError: a shard fits nowhere; earlier ones are placed, and the heap is spoilt.
    """
    ranks = []
    for load in candidate.loads:
        full: Heap = []
        while heap:
            _, local, rank = heap[0]
            if room.fits(load, rank):
                room.put(load, rank)
                heapq.heapreplace(heap, (room.totals[rank], local, rank))
                ranks.append(rank)
                break
            full.append(heapq.heappop(heap))
        else:
            roomiest = max((entry[2] for entry in full), key=room.free)
            raise no_room(candidate, load.storage, (roomiest,), room.free(roomiest))
        for entry in full:
            heapq.heappush(heap, entry)
    return ranks


def put_on_different_ranks(room: Room, candidate: Candidate, local: int) -> list[int]:
    """Place each shard on the least taken rank that has room and none of the other shards.

    :raises NoRoomError: a shard fits nowhere, or there are more shards than ranks.
    """
    ranks: list[int] = []
    for load in candidate.loads:
        others = [rank for rank in range(room.world_size) if rank not in ranks]
        usable = [rank for rank in others if room.fits(load, rank)]
        if not usable:
            roomiest = max(others or ranks, key=room.free)
            free = room.free(roomiest) if others else (0, 0, 0)
            raise no_room(candidate, load.storage, (roomiest,), free)
        rank = min(usable, key=lambda r: (room.totals[r], r % local, r))
        room.put(load, rank)
        ranks.append(rank)
    return ranks


def put_side_by_side(room: Room, candidate: Candidate, start: int) -> NoRoomError | None:
    """Place each shard on the rank after that of the one before, the first on ``start``.

    An error, and nothing placed, if one does not fit.
    """
    rank = _first_without_room(room, candidate, start)
    if rank is not None:
        needed = candidate.loads[rank - start].storage
        return no_room(candidate, needed, (rank,), room.free(rank))
    _take_bytes(room, candidate, start)
    for count, load in candidate.runs:
        part = slice(start, start + count)
        before = room.parts[part]
        if before == [before[0]] * count:  # all ranks alike, as long as no shard is on one alone
            after = add_parts(before[0], load.parts)
            room.parts[part], room.totals[part] = [after] * count, [total_of(after)] * count
        else:
            room.parts[part] = different = [add_parts(parts, load.parts) for parts in before]
            room.totals[part] = [total_of(parts) for parts in different]
        start = part.stop
    return None


def put_in_order(room: Room, candidate: Candidate, ranks: Sequence[int]) -> NoRoomError | None:
    """Place shard k on the k-th of ``ranks``, which may repeat.

    An error, and nothing placed, if one does not fit.
    """
    saved = room.save(ranks)
    for load, rank in zip(candidate.loads, ranks, strict=True):
        if not room.fits(load, rank):
            error = no_room(candidate, load.storage, (rank,), room.free(rank))
            room.restore(saved)
            return error
        room.put(load, rank)
    return None
