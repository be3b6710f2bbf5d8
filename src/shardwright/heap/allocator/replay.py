"""Requests for device memory, played through the caching allocator."""

# What an allocator holds follows from sizes, streams and their order alone, so requests are all
# that is played. A name that is taken twice, or freed without being held, is refused: the replay
# would go on with sums that mean nothing.

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import msgspec

from shardwright.core.errors import InputError, expected
from shardwright.heap.allocator.allocator import Allocator, BlockPool, CachedBlock, Stream
from shardwright.heap.allocator.settings import AllocatorSettings

# What a figure of a replay rests on, for the list of assumptions.
ASSUMPTION = "reserved memory follows PyTorch's allocator by its source; not compared with a device"


class AllocatorRequest(NamedTuple):
    """Take ``bytes`` under a name, or with bytes below 0 free what the name holds.

    Blocks are cached for their stream alone. What another stream still uses when it is freed
    (``record_stream``) can be used again only after ``late`` further requests, or as soon as the
    allocator has to wait for the device.
    """

    name: Hashable
    bytes: int
    stream: Stream = 0
    late: int = 0


class PoolBytes(msgspec.Struct, frozen=True, array_like=True):
    """What is reserved for the small (up to 1 MiB) or large requests of one stream."""

    stream: Stream
    small: bool
    bytes: int


class Replay(msgspec.Struct, frozen=True):
    """What the allocator did. All in bytes, blocks with their rounding.

    ``allocated`` is what the program holds, ``active`` also what is not yet free for another use,
    ``reserved`` what was taken from the device. ``pools`` is the state when ``reserved`` was
    highest. ``retries`` counts requests for which all cached segments were given back;
    ``out_of_memory`` is the request, by its place, that failed even so and ended the replay.
    """

    reserved_peak: int
    reserved_end: int
    allocated_peak: int
    allocated_end: int
    active_peak: int
    requested_peak: int
    active_at_reserved_peak: int
    pools: tuple[PoolBytes, ...]
    retries: int
    out_of_memory: int | None = None

    @property
    def fragmentation(self) -> float:
        """The part of what is reserved that is in no active block when most is reserved."""
        return 1 - self.active_at_reserved_peak / self.reserved_peak if self.reserved_peak else 0.0


def replay(
    requests: Iterable[tuple[Hashable, int, Stream, int]],
    settings: AllocatorSettings | None = None,
    capacity: int | None = None,
    enough: int | None = None,
) -> Replay:
    """Play ``requests`` in order. With ``capacity`` the device has no more bytes than that for the
    allocator; without it never runs out. Takes of no bytes are ignored, as in PyTorch.

    It may end once more than ``enough`` bytes are reserved: then any device that runs out later
    holds more, too, unless garbage is collected.
    """
    player = _Player(settings or AllocatorSettings(), capacity)
    collects = player.allocator.settings.garbage_collection_threshold > 0
    player.play(requests, math.inf if enough is None or collects else enough)
    return player.result()


class _Player:
    """The allocator, what it handed out under which name, and the sums."""

    def __init__(self, settings: AllocatorSettings, capacity: int | None) -> None:
        self.allocator = Allocator(settings, capacity)
        self.held: dict[Hashable, tuple[CachedBlock, int]] = {}
        self.sizes: dict[int, int] = {}
        self.requested = self.requested_peak = 0
        self.allocated = self.allocated_peak = 0
        self.active = self.active_peak = self.active_at_peak = 0
        self.failed: int | None = None

    def play(self, requests: Iterable[tuple[Hashable, int, Stream, int]], enough: float) -> None:
        """As far as they could be served and no more than ``enough`` was reserved."""
        allocator, held, sizes = self.allocator, self.held, self.sizes
        device, rounded = allocator.device, allocator.settings.rounded
        for place, (name, nbytes, stream, late) in enumerate(requests):
            if nbytes < 0:
                self._free(place, name, late)
                continue
            if not nbytes:
                continue
            if name in held:
                raise InputError(expected(f"request {place}", "a new name", f"{name!r} again"))
            if allocator.late:
                self._finish_late(place)
            # The same sizes come again and again.
            size = sizes.get(nbytes)
            if size is None:
                size = sizes[nbytes] = rounded(nbytes)
            peak, waiting = device.peak, bool(allocator.late)
            block = allocator.take(size, stream)
            # The allocator had to wait for the device: every block that another stream still used
            # is free now, so what is active is what is allocated.
            if waiting and not allocator.late:
                self.active = self.allocated
            if block is None:
                self.failed = place
                return
            held[name] = (block, nbytes)
            self._count(block.size, nbytes)
            if device.peak > peak:
                self.active_at_peak = self.active
                if device.peak > enough:
                    return

    def _count(self, size: int, nbytes: int) -> None:
        self.requested += nbytes
        self.allocated += size
        self.active += size
        if self.requested > self.requested_peak:
            self.requested_peak = self.requested
        if self.allocated > self.allocated_peak:
            self.allocated_peak = self.allocated
        if self.active > self.active_peak:
            self.active_peak = self.active

    def result(self) -> Replay:
        """The sums so far."""
        device = self.allocator.device
        order = sorted(
            device.at_peak.items(), key=lambda item: (str(item[0].stream), item[0].small)
        )
        return Replay(
            reserved_peak=device.peak,
            reserved_end=device.reserved,
            allocated_peak=self.allocated_peak,
            allocated_end=self.allocated,
            active_peak=self.active_peak,
            requested_peak=self.requested_peak,
            active_at_reserved_peak=self.active_at_peak,
            pools=tuple(_pool_bytes(pool, nbytes) for pool, nbytes in order if nbytes),
            retries=self.allocator.retries,
            out_of_memory=self.failed,
        )

    def _free(self, place: int, name: Hashable, late: int) -> None:
        held = self.held.pop(name, None)
        if held is None:
            raise InputError(expected(f"request {place}", "a name that is held", repr(name)))
        block, nbytes = held
        self.requested -= nbytes
        self.allocated -= block.size
        if late:
            self.allocator.late.append((place + late, block))
            return
        self.active -= block.size
        self.allocator.free(block)

    def _finish_late(self, place: int) -> None:
        """Cache the blocks whose other stream is done by now."""
        waiting = []
        for due, block in self.allocator.late:
            if due <= place:
                self.active -= block.size
                self.allocator.free(block)
            else:
                waiting.append((due, block))
        self.allocator.late = waiting


def _pool_bytes(pool: BlockPool, nbytes: int) -> PoolBytes:
    return PoolBytes(pool.stream, pool.small, nbytes)
