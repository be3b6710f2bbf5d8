"""Where a part lies in its tensor: rectangles, row-major ranges, and what two of them share.

As in ``core/block.py`` a region with one offset on a tensor of another rank is a range of its
row-major elements. Ranges are taken apart into rectangles (at most 2N - 1 in N dimensions), so
that every question about two regions is one about rectangles.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardwright.core.errors import InputError, expected

MAX_DIMS = 12  # a tensor cut in all of them has 2**12 corners per part
MAX_ELEMENTS = 2**62

Ints = tuple[int, ...]


class Box(NamedTuple):
    """A rectangle of a tensor."""

    offsets: Ints
    sizes: Ints


class Part(NamedTuple):
    """A rectangle of a region that begins ``start`` elements into what the holder has of it."""

    box: Box
    start: int


class Shared(NamedTuple):
    """A rectangle that two regions have in common, and the part of each in which it lies."""

    box: Box
    first: Part
    second: Part


def is_range(shape: Ints, offsets: Ints) -> bool:
    """Whether ``offsets`` begin a range of row-major elements rather than a rectangle."""
    return len(offsets) == 1 and len(shape) != 1


def check_region(where: str, shape: Ints, offsets: Ints, sizes: Ints) -> None:
    """Raise InputError unless the region lies inside a tensor of ``shape``."""
    if len(shape) > MAX_DIMS or math.prod(shape) > MAX_ELEMENTS or min(shape, default=0) < 0:
        wanted = f"a shape of at most {MAX_DIMS} dimensions and 2^62 elements"
        raise InputError(expected(where, wanted, f"{shape}"))
    inside = (math.prod(shape),) if is_range(shape, offsets) else shape
    if not len(offsets) == len(sizes) == len(inside) or any(
        o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, inside, strict=True)
    ):
        found = f"offsets {offsets}, sizes {sizes}"
        raise InputError(expected(where, f"a part of a tensor of shape {shape}", found))


def as_range(shape: Ints, offsets: Ints, sizes: Ints) -> tuple[int, int] | None:
    """The row-major elements that a region begins and ends at, None where it is not one range."""
    if 0 in sizes:
        return 0, 0
    if is_range(shape, offsets):
        return offsets[0], offsets[0] + sizes[0]
    cut = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    if sizes[cut + 1 :] != shape[cut + 1 :]:
        return None
    begin = 0
    for extent, offset in zip(shape, offsets, strict=True):
        begin = begin * extent + offset
    return begin, begin + math.prod(sizes)


def blocks_of(shape: Ints, offsets: Ints, sizes: Ints, block: int) -> tuple[Ints, Box]:
    """How many blocks of so many row-major elements a tensor has, and those of a region, which is
    one range and cuts none of them."""
    found = as_range(shape, offsets, sizes)
    assert found is not None
    first, end = found[0] // block, -(-found[1] // block)
    return (-(-math.prod(shape) // block),), Box((first,), (end - first,))


def parts(shape: Ints, offsets: Ints, sizes: Ints) -> list[Part]:
    """The region as rectangles, in the order of its elements."""
    if not is_range(shape, offsets):
        return [Part(Box(offsets, sizes), 0)]
    found, start = [], 0
    for box in boxes_of_range(shape, offsets[0], offsets[0] + sizes[0]):
        found.append(Part(box, start))
        start += math.prod(box.sizes)
    return found


def boxes_of_range(shape: Ints, start: int, stop: int) -> Iterator[Box]:
    """The row-major elements ``start`` to ``stop`` of a tensor as rectangles, in their order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        yield from _in_row(shape, first, start - first * row, stop - first * row)
        return
    whole, end = -(-start // row), stop // row
    if start < whole * row:
        yield from _in_row(shape, first, start - first * row, row)
    if whole < end:
        rest = len(shape) - 1
        yield Box((whole, *(0,) * rest), (end - whole, *shape[1:]))
    if end * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Ints, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


def shared(shape: Ints, first: Box, second: Box) -> Iterator[Shared]:
    """What two regions of one tensor have in common; two ranges as ranges."""
    if is_range(shape, first.offsets) and is_range(shape, second.offsets):
        shape = (math.prod(shape),)
    theirs = parts(shape, *second)
    for part in parts(shape, *first):
        for other in theirs:
            box = _intersection(part.box, other.box)
            if box is not None:
                yield Shared(box, part, other)


def _intersection(first: Box, second: Box) -> Box | None:
    offsets = tuple(map(max, first.offsets, second.offsets))
    ends = (
        min(o + s, p + t)
        for o, s, p, t in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    )
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return None if min(sizes, default=1) <= 0 else Box(offsets, sizes)


def tiles(shape: Ints, regions: Iterable[Box]) -> bool:
    """Whether the regions, none of them empty, hold every element of the tensor exactly once.

    How many regions hold an element is a function on a grid, and a function is its corners: +1
    and -1, in turn, at the corners of every rectangle. The sum of the parts' corners is that of
    the whole tensor exactly if their counts are one everywhere. No two parts are compared, so a
    list made to be slow is not.
    """
    cuts = list(regions)
    if all(is_range(shape, region.offsets) for region in cuts):
        shape = (math.prod(shape),)
    boxes = [part.box for region in cuts for part in parts(shape, *region)]
    cut = [d for d, n in enumerate(shape) if any(box.sizes[d] != n for box in boxes)]
    if not cut:
        return len(boxes) == 1
    corners: Counter[Ints] = Counter()
    for box in boxes:
        _add_corners(corners, [(box.offsets[d], box.offsets[d] + box.sizes[d]) for d in cut], 1)
    _add_corners(corners, [(0, shape[d]) for d in cut], -1)
    return not any(corners.values())


def _add_corners(corners: Counter[Ints], ends: list[tuple[int, int]], count: int) -> None:
    for which in itertools.product((0, 1), repeat=len(ends)):
        point = tuple(end[side] for end, side in zip(ends, which, strict=True))
        corners[point] += -count if sum(which) % 2 else count
