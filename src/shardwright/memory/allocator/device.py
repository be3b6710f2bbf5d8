"""The memory of a device: how much of it is reserved, by which pools, and at most."""

from __future__ import annotations

from shardwright.memory.allocator.blocks import Pool

_APART = 2**50  # addresses between segments: they never touch


class DeviceMemory:
    """What the device gives: at most ``capacity`` bytes, or any number."""

    __slots__ = ("_segments", "at_peak", "by_pool", "capacity", "limit", "peak", "reserved")

    def __init__(self, capacity: int | None, fraction: float | None) -> None:
        self.capacity = capacity
        self.limit = None if capacity is None or fraction is None else int(fraction * capacity)
        self.reserved = 0
        self.peak = 0
        self.by_pool: dict[Pool, int] = {}
        self.at_peak: dict[Pool, int] = {}
        self._segments = 0

    def take(self, pool: Pool, nbytes: int) -> bool:
        """Reserve, if there is room."""
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.by_pool[pool] = self.by_pool.get(pool, 0) + nbytes
        if self.reserved > self.peak:
            self.peak = self.reserved
            self.at_peak = dict(self.by_pool)
        return True

    def give_back(self, pool: Pool, nbytes: int) -> None:
        """Reserve no more."""
        self.reserved -= nbytes
        self.by_pool[pool] -= nbytes

    def address(self) -> int:
        """Where the next segment begins."""
        self._segments += 1
        return self._segments * _APART

    @property
    def address_space(self) -> int:
        """Bytes of an expandable segment: an eighth more than the device has."""
        return _APART // 2 if self.capacity is None else self.capacity * 9 // 8
