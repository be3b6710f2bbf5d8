"""Segments that grow: one address range per stream and pool, memory mapped to it page by page."""

from __future__ import annotations

from shardwright.memory.allocator.blocks import Block, Expandable, Pool
from shardwright.memory.allocator.device import DeviceMemory
from shardwright.memory.allocator.settings import SMALL_SEGMENT, AllocatorSettings


def expand(
    device: DeviceMemory, pool: Pool, size: int, settings: AllocatorSettings
) -> Block | None:
    """A block of at least ``size`` bytes where address space is free, at the lowest address, with
    memory mapped to what of it has none. None if the device has too little."""
    page = SMALL_SEGMENT if pool.small else settings.large_segment
    block = _room(pool, size) or _new_range(device, pool, page)
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


def unmap(device: DeviceMemory, block: Block) -> None:
    """Give back the pages that lie wholly in a free block."""
    segment = block.expandable
    assert segment is not None
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


def _room(pool: Pool, size: int) -> Block | None:
    """The first of the blocks one behind another that are free or unmapped and large enough."""
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


def _new_range(device: DeviceMemory, pool: Pool, page: int) -> Block:
    start = device.address()
    size = -(-device.address_space // page) * page
    block = Block(pool, start, size)
    block.expandable = Expandable(start, size, page)
    block.mapped = False
    pool.add_unmapped(block)
    return block


def _map(device: DeviceMemory, block: Block, size: int) -> bool:
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


def _keep_behind(block: Block, nbytes: int) -> None:
    """Shorten a block; what is behind stays unmapped."""
    rest = Block(block.pool, block.address + nbytes, block.size - nbytes)
    rest.expandable = block.expandable
    rest.mapped = False
    rest.prev, rest.next = block, block.next
    if block.next is not None:
        block.next.prev = rest
    block.next = rest
    block.size = nbytes
    block.pool.add_unmapped(rest)
