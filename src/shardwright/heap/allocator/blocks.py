"""Blocks of device memory, free ones of a stream in order of size, and how much is reserved."""

from __future__ import annotations

from bisect import bisect_left, insort


class Block:
    """A stretch of a segment. ``prev`` and ``next`` are its neighbours there.

    ``busy`` from its allocation until its memory may be used again. A block of an expandable
    segment may be without memory: not ``mapped``. ``born`` is the age of its pool when it was last
    freed.
    """

    __slots__ = ("address", "born", "busy", "expandable", "mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: Pool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.busy = False
        self.mapped = True
        self.expandable: Expandable | None = None
        self.prev: Block | None = None
        self.next: Block | None = None
        self.born = 0

    @property
    def whole(self) -> bool:
        """Whether it is a segment of its own."""
        return self.prev is None and self.next is None

    def split(self, size: int) -> Block:
        """Cut the first ``size`` bytes off as a block of their own."""
        head = Block(self.pool, self.address, size)
        head.expandable = self.expandable
        head.mapped = self.mapped
        head.prev, head.next = self.prev, self
        if self.prev is not None:
            self.prev.next = head
        self.prev = head
        self.address += size
        self.size -= size
        return head

    def absorb(self, other: Block) -> None:
        """Take a neighbour in; it is in no list any more."""
        if self.prev is other:
            self.address = other.address
            self.prev = other.prev
            if self.prev is not None:
                self.prev.next = self
        else:
            self.next = other.next
            if self.next is not None:
                self.next.prev = self
        self.size += other.size


class Expandable:
    """Address space of ``size`` bytes; pages of ``page`` bytes are mapped as they are needed."""

    __slots__ = ("page", "size", "start")

    def __init__(self, start: int, size: int, page: int) -> None:
        self.start = start
        self.size = size
        self.page = page


class Age:
    """How often a pool was searched, all streams together."""

    __slots__ = ("searches",)

    def __init__(self) -> None:
        self.searches = 0


class Pool:
    """The free blocks of one stream and one range of sizes.

    ``free`` is sorted by size and address, ``unmapped`` by address.
    """

    __slots__ = ("age", "free", "small", "stream", "unmapped")

    def __init__(self, small: bool, stream: int | str, age: Age) -> None:
        self.small = small
        self.stream = stream
        self.age = age
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        """A block that is free from now on."""
        block.born = self.age.searches
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """A block that is free no more, before its size or address changes."""
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def add_unmapped(self, block: Block) -> None:
        """A block that has no memory from now on."""
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """A block that gets memory, or a part of it, before its size or address changes."""
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def merge(self, block: Block, other: Block | None) -> None:
        """Take a neighbour in if it is free as well and of the same state."""
        if other is None or other.busy or other.mapped is not block.mapped:
            return
        if other.mapped:
            self.remove(other)
        else:
            self.remove_unmapped(other)
        block.absorb(other)


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
