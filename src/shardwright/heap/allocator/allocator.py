"""The caching allocator itself: finds blocks, cuts and merges them, asks the device for segments.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (``malloc``, ``get_free_block``,
``should_split``, ``free_block``, ``release_cached_blocks``, ``garbage_collect_cached_blocks``) at
PyTorch's commit 001074d25, with the constants and settings of torch 2.13's headers. Not modelled:
private pools of CUDA graphs, memory shared between processes. New segments have rising addresses,
which decides between free blocks of one size.
"""

# Why the rules of torch's allocator are followed and not approximated: what it holds beyond live
# bytes depends on the order of sizes alone, and no share of the peak stands for it. Which free
# block is taken, whether its rest is cut off, and when cached segments are given back decide it,
# so each of these is the same comparison as in CUDACachingAllocator.cpp, in the same order.

from __future__ import annotations

from bisect import bisect_left, insort

from shardwright.heap.allocator.settings import (
    MIN_BLOCK,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    AllocatorSettings,
)


class CachedBlock:
    """A stretch of a segment. ``prev`` and ``next`` are its neighbours there.

    ``busy`` from its allocation until its memory may be used again. A block of an expandable
    segment may be without memory: not ``mapped``. ``born`` is the age of its pool when it was last
    freed.
    """

    __slots__ = ("address", "born", "busy", "expandable", "mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: BlockPool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.busy = False
        self.mapped = True
        self.expandable: Expandable | None = None
        self.prev: CachedBlock | None = None
        self.next: CachedBlock | None = None
        self.born = 0

    @property
    def whole(self) -> bool:
        """Whether it is a segment of its own."""
        return self.prev is None and self.next is None

    def split(self, size: int) -> CachedBlock:
        """Cut the first ``size`` bytes off as a block of their own."""
        head = CachedBlock(self.pool, self.address, size)
        head.expandable = self.expandable
        head.mapped = self.mapped
        head.prev, head.next = self.prev, self
        if self.prev is not None:
            self.prev.next = head
        self.prev = head
        self.address += size
        self.size -= size
        return head

    def absorb(self, other: CachedBlock) -> None:
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


class BlockPool:
    """The free blocks of one stream and one range of sizes.

    ``free`` is sorted by size and address, ``unmapped`` by address.
    """

    __slots__ = ("age", "free", "small", "stream", "unmapped")

    def __init__(self, small: bool, stream: int | str, age: Age) -> None:
        self.small = small
        self.stream = stream
        self.age = age
        self.free: list[tuple[int, int, CachedBlock]] = []
        self.unmapped: list[tuple[int, CachedBlock]] = []

    def add(self, block: CachedBlock) -> None:
        """A block that is free from now on."""
        block.born = self.age.searches
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: CachedBlock) -> None:
        """A block that is free no more, before its size or address changes."""
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def add_unmapped(self, block: CachedBlock) -> None:
        """A block that has no memory from now on."""
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: CachedBlock) -> None:
        """A block that gets memory, or a part of it, before its size or address changes."""
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def merge(self, block: CachedBlock, other: CachedBlock | None) -> None:
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
        self.by_pool: dict[BlockPool, int] = {}
        self.at_peak: dict[BlockPool, int] = {}
        self._segments = 0

    def take(self, pool: BlockPool, nbytes: int) -> bool:
        """Reserve, if there is room."""
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.by_pool[pool] = self.by_pool.get(pool, 0) + nbytes
        if self.reserved > self.peak:
            self.peak = self.reserved
            self.at_peak = dict(self.by_pool)
        return True

    def give_back(self, pool: BlockPool, nbytes: int) -> None:
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


def expand(
    device: DeviceMemory, pool: BlockPool, size: int, settings: AllocatorSettings
) -> CachedBlock | None:
    """A block of at least ``size`` bytes where address space is free, at the lowest address, with
    memory mapped to what of it has none. None if the device has too little."""
    page = SMALL_SEGMENT if pool.small else settings.large_segment
    block = _room(pool, size) or _new_range(device, pool, page)
    # Pages that were mapped before the device ran out stay mapped and free, as in torch: what is
    # asked for next may use them.
    if not block.mapped and not _map(device, block, min(block.size, size)):
        return None
    while block.size < size:
        # the block is followed by one without memory, which takes it in when it gets some
        behind = block.next
        assert behind is not None
        if not _map(device, behind, min(size - block.size, behind.size)):
            return None
        block = behind
    pool.remove(block)
    return block


def unmap(device: DeviceMemory, block: CachedBlock) -> None:
    """Give back the pages that lie wholly in a free block."""
    segment = block.expandable
    assert segment is not None
    # Pages are counted from the segment's begin, not the block's: only those that lie in it whole
    # have nothing else on them.
    before = -(block.address - segment.start) % segment.page
    pages = (block.size - before) // segment.page if block.size > before else 0
    if not pages:
        return
    pool = block.pool
    pool.remove(block)
    if before:
        pool.add(block.split(before))
    middle = block
    if block.size > pages * segment.page:
        middle = block.split(pages * segment.page)
        pool.add(block)
    device.give_back(pool, middle.size)
    middle.mapped = False
    pool.merge(middle, middle.prev)
    pool.merge(middle, middle.next)
    if not middle.whole:
        pool.add_unmapped(middle)


def _room(pool: BlockPool, size: int) -> CachedBlock | None:
    """The first of the blocks one behind another that are free or unmapped and large enough."""
    # torch looks at unmapped stretches by address and takes the first that is large enough together
    # with the free block in front of it.
    for _, unmapped in pool.unmapped:
        first = unmapped
        if first.prev is not None and not first.prev.busy:
            first = first.prev
        room, block = 0, first
        while True:
            room += block.size
            if room >= size:
                return first
            if block.next is None or block.next.busy:
                break
            block = block.next
    return None


def _new_range(device: DeviceMemory, pool: BlockPool, page: int) -> CachedBlock:
    start = device.address()
    size = -(-device.address_space // page) * page
    block = CachedBlock(pool, start, size)
    block.expandable = Expandable(start, size, page)
    block.mapped = False
    pool.add_unmapped(block)
    return block


def _map(device: DeviceMemory, block: CachedBlock, size: int) -> bool:
    """Map whole pages to the beginning of a block; it becomes free and takes its neighbours in."""
    segment = block.expandable
    assert segment is not None
    nbytes = -(-size // segment.page) * segment.page
    pool = block.pool
    if not device.take(pool, nbytes):
        return False
    pool.remove_unmapped(block)
    if nbytes < block.size:
        _keep_behind(block, nbytes)
    block.mapped = True
    pool.merge(block, block.prev)
    pool.merge(block, block.next)
    pool.add(block)
    return True


def _keep_behind(block: CachedBlock, nbytes: int) -> None:
    """Shorten a block; what is behind stays unmapped."""
    rest = CachedBlock(block.pool, block.address + nbytes, block.size - nbytes)
    rest.expandable = block.expandable
    rest.mapped = False
    rest.prev, rest.next = block, block.next
    if block.next is not None:
        block.next.prev = rest
    block.next = rest
    block.size = nbytes
    block.pool.add_unmapped(rest)


Stream = int | str


class Allocator:
    """Hands out blocks and takes them back."""

    def __init__(self, settings: AllocatorSettings, capacity: int | None = None) -> None:
        self.settings = settings
        self.device = DeviceMemory(capacity, settings.memory_fraction)
        self.retries = 0
        self.late: list[tuple[int, CachedBlock]] = []
        self._ages = (Age(), Age())
        self._pools: dict[tuple[bool, Stream], BlockPool] = {}
        self._most = settings.max_split_size or 2**63
        self._collects = settings.garbage_collection_threshold > 0 and (
            self.device.limit is not None
        )

    def take(self, size: int, stream: Stream) -> CachedBlock | None:
        """A block of at least ``size`` bytes (rounded already), or None: out of memory."""
        small = size <= SMALL_REQUEST
        pool = self._pools.get((small, stream)) or self._new_pool(small, stream)
        if self._collects:
            pool.age.searches += 1
        block = self._cached(pool, size) or self._new(pool, size)
        if block is None:
            return None
        rest = block.size - size
        if rest >= MIN_BLOCK:
            # torch's should_split: rests of small blocks, and of segments that can grow, are of use
            # from 512 bytes on; a large block's rest only above 1 MiB, and none where the request
            # is as large as max_split_size.
            if pool.small or self.settings.expandable_segments:
                splits = True
            else:
                splits = rest > SMALL_REQUEST and size < self._most
            if splits:
                head = block.split(size)
                pool.add(block)
                block = head
        block.busy = True
        return block

    def free(self, block: CachedBlock) -> None:
        """Cache a block: merged with its free neighbours it serves other requests."""
        block.busy = False
        pool = block.pool
        pool.merge(block, block.prev)
        pool.merge(block, block.next)
        pool.add(block)

    def pools(self) -> list[BlockPool]:
        """Every pool, the large ones first."""
        return sorted(self._pools.values(), key=lambda pool: pool.small)

    def release_cached(self) -> None:
        """Give back every segment (or page) that is wholly free, after waiting for late frees."""
        for _, block in self.late:
            self.free(block)
        self.late.clear()
        for pool in self.pools():
            expandable = [block for _, _, block in pool.free if block.expandable is not None]
            for _, _, block in list(pool.free):
                if block.expandable is None and block.whole:
                    self._release(block)
            for block in expandable:
                unmap(self.device, block)

    def _new_pool(self, small: bool, stream: Stream) -> BlockPool:
        pool = BlockPool(small, stream, self._ages[small])
        self._pools[small, stream] = pool
        return pool

    def _cached(self, pool: BlockPool, size: int) -> CachedBlock | None:
        """The smallest free block that is large enough; one that can still grow counts as if it
        had, so it is taken last."""
        free = pool.free
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        block = free[at][2]
        # An expandable segment has address space behind it far beyond any request. By its bytes
        # alone it would always be taken first; torch compares what each could grow to.
        if block.expandable is not None:
            while at + 1 < len(free) and _can_be(free[at + 1][2]) < _can_be(block):
                at += 1
                block = free[at][2]
        # What is too large to be split would serve a small request whole and be lost to the large
        # ones that it is kept for.
        if size < self._most <= block.size:
            return None
        if size >= self._most and block.size >= size + self.settings.max_non_split_rounding:
            return None
        del free[at]
        return block

    def _new(self, pool: BlockPool, size: int) -> CachedBlock | None:
        """A block of new memory; when there is none left, cached segments are given back first."""
        if self._collects:
            self._collect()
        block = self._ask(pool, size)
        # In this order, each only where the one before was in vain: the last one gives everything
        # back and waits for the device, which costs a program most, and is counted as a retry.
        if block is None and self._release_oversize(pool, size):
            block = self._ask(pool, size)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._ask(pool, size)
        return block

    def _ask(self, pool: BlockPool, size: int) -> CachedBlock | None:
        segment = self.settings.segment(size)
        limit = self.device.limit
        if limit is not None and self.device.reserved + segment > limit:
            return None
        if self.settings.expandable_segments:
            return expand(self.device, pool, size, self.settings)
        if not self.device.take(pool, segment):
            return None
        return CachedBlock(pool, self.device.address(), segment)

    def _release(self, block: CachedBlock) -> None:
        block.pool.remove(block)
        self.device.give_back(block.pool, block.size)

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Give back cached blocks that are too large to be split, as many as the request needs."""
        if self.settings.max_split_size is None:
            return False
        wanted = max(size, self._most)
        # One block that is large enough does it alone; else several from the largest down, which
        # are given back for nothing if they are not enough together, as torch does it.
        at = bisect_left(pool.free, (wanted,))
        if at < len(pool.free) and pool.free[at][2].expandable is None:
            self._release(pool.free[at][2])
            return True
        released = 0
        for nbytes, _, block in reversed(pool.free[:at]):
            if released >= wanted or nbytes < self._most or block.expandable is not None:
                break
            released += nbytes
            self._release(block)
        return released >= wanted

    def _collect(self) -> None:
        """Give back the large segments that have been free the longest, down to the threshold."""
        assert self.device.limit is not None
        threshold = int(self.settings.garbage_collection_threshold * self.device.limit)
        target = self.device.reserved - threshold
        if target <= 0:
            return
        candidates = [
            block
            for pool in self.pools()
            if not pool.small
            for _, _, block in pool.free
            if block.whole and block.expandable is None
        ]
        searches = self._ages[False].searches
        reclaimed = 0
        while candidates and reclaimed < target:
            # Blocks at least as old as the mean go in each round, so that a few rounds suffice and
            # what was used just now goes last.
            mean = sum(searches - block.born for block in candidates) / len(candidates)
            old = [block for block in candidates if searches - block.born >= mean]
            candidates = [block for block in candidates if searches - block.born < mean]
            for block in old:
                reclaimed += block.size
                self._release(block)


def _can_be(block: CachedBlock) -> int:
    """Bytes of a block with the address space behind it."""
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)
