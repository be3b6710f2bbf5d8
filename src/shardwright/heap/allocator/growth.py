"""What the caching allocator holds of a device that never runs out: its blocks, found quicker."""

# Most replays give nothing back to the device, and nobody asks them for more than what they hold in
# the end. Then a block is two numbers: where it begins and how long it is. Neighbours that are free
# are found by where they end or begin, the smallest that is large enough in a sorted list; segments
# lie one behind another with a gap, so that none touches the next. What must stay true: which block
# is taken and whether its rest is cut off are the comparisons of ``Allocator``, in its order; tests
# hold both against each other. It is one loop, for a call costs more than what a request does.

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

from shardwright.heap.allocator.settings import MIN_BLOCK, SMALL_REQUEST, AllocatorSettings

Requests = Sequence[tuple[int, int, int, int]]
_SMALL = SMALL_REQUEST // MIN_BLOCK
_LENGTH = 40  # bits of a place; a free block is its length, then its place, in blocks of 512 bytes
_PLACE = 2**_LENGTH - 1  # of 512 TiB


def grown(
    requests: Requests,
    settings: AllocatorSettings,
    enough: int | None = None,
) -> int | None:
    """Bytes that are held in the end, of storages that have numbers; as soon as that is more than
    ``enough``, as much.

    None by settings with which segments grow or are given back, and of more than 512 TiB: then
    ``replay`` tells.
    """
    s = settings
    if s.expandable_segments or s.max_split_size is not None or s.garbage_collection_threshold:
        return None
    most = math.inf if enough is None else enough
    small: defaultdict[int, list[int]] = defaultdict(list)
    large: defaultdict[int, list[int]] = defaultdict(list)  # free blocks of every stream
    lengths: dict[int, int] = {}  # of free blocks, by their begins
    begins: dict[int, int] = {}  # of free blocks, by their ends
    sizes: dict[int, int] = {}
    held: dict[int, tuple[list[int], int, int]] = {}
    total = top = 0
    for number, nbytes, stream, _ in requests:
        if nbytes > 0:
            size = sizes.get(nbytes)
            if size is None:
                size = sizes[nbytes] = s.rounded(nbytes) // MIN_BLOCK
            free, kept = (small[stream], 0) if size <= _SMALL else (large[stream], _SMALL)
            at = bisect_left(free, size << _LENGTH)
            if at < len(free):
                block = free.pop(at)
                length, begin = block >> _LENGTH, block & _PLACE
                del lengths[begin]
                del begins[begin + length]
            else:
                segment = s.segment(size * MIN_BLOCK)
                total += segment
                if total > most:
                    return total
                length, begin = segment // MIN_BLOCK, top
                top += length + 1
                if top > _PLACE:
                    return None
            rest = length - size
            if rest > kept:
                behind = begin + size
                lengths[behind], begins[begin + length] = rest, behind
                insort(free, rest << _LENGTH | behind)
                length = size
            held[number] = free, begin, length
        elif nbytes:
            free, begin, length = held.pop(number)
            behind = begin + length
            more = lengths.pop(behind, 0)
            if more:
                del free[bisect_left(free, more << _LENGTH | behind)]
                length += more
            first = begins.pop(begin, -1)
            if first >= 0:
                less = begin - first
                del free[bisect_left(free, less << _LENGTH | first)]
                begin, length = first, length + less
            lengths[begin], begins[begin + length] = length, begin
            insort(free, length << _LENGTH | begin)
    return total
