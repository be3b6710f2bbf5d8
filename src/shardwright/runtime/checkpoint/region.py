"""What a rank holds of a tensor and where it lies: rectangles, row-major ranges, what two share.

As in ``core/block.py`` a region with one offset on a tensor of another rank is a range of its
row-major elements. Ranges are taken apart into rectangles (at most 2N - 1 in N dimensions), so
that every question about two regions is one about rectangles.
"""

# A checkpoint is read under any cut, so every question is about two regions of one tensor, and
# those may be rectangles (rows, columns) or ranges of elements (flat cuts). A list in a checkpoint
# is input like any other: one made to be slow, with thousands of tiny parts, must not be, so
# coverage is counted by corners and no two parts are compared.

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from shardwright.core.errors import InputError, MismatchError

MAX_DIMS = 12  # a tensor cut in all of them has 2**12 corners per part
MAX_ELEMENTS = 2**62

Ints = tuple[int, ...]


class Box(NamedTuple):
    """A rectangle of a tensor."""

    offsets: Ints
    sizes: Ints


class BoxAt(NamedTuple):
    """A rectangle of a region that begins ``start`` elements into what the holder has of it."""

    box: Box
    start: int


class Shared(NamedTuple):
    """A rectangle that two regions have in common, and the part of each in which it lies."""

    box: Box
    first: BoxAt
    second: BoxAt


def is_range(shape: Ints, offsets: Ints) -> bool:
    """Whether ``offsets`` begin a range of row-major elements rather than a rectangle."""
    return len(offsets) == 1 and len(shape) != 1


def check_region(where: str, shape: Ints, offsets: Ints, sizes: Ints) -> None:
    """Raise InputError unless the region lies inside a tensor of ``shape``."""
    if len(shape) > MAX_DIMS or math.prod(shape) > MAX_ELEMENTS or min(shape, default=0) < 0:
        wanted = f"a shape of at most {MAX_DIMS} dimensions and 2^62 elements"
        raise InputError(where, wanted, f"{shape}")
    inside = (math.prod(shape),) if is_range(shape, offsets) else shape
    if not len(offsets) == len(sizes) == len(inside) or any(
        o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, inside, strict=True)
    ):
        found = f"offsets {offsets}, sizes {sizes}"
        raise InputError(where, f"a part of a tensor of shape {shape}", found)


def as_range(shape: Ints, offsets: Ints, sizes: Ints) -> tuple[int, int] | None:
    """The row-major elements that a region begins and ends at, None where it is not one range."""
    if 0 in sizes:
        return 0, 0
    if is_range(shape, offsets):
        return offsets[0], offsets[0] + sizes[0]
    # One range if everything behind the first dimension that has more than one element is whole.
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


def parts(shape: Ints, offsets: Ints, sizes: Ints) -> list[BoxAt]:
    """The region as rectangles, in the order of its elements."""
    if not is_range(shape, offsets):
        return [BoxAt(Box(offsets, sizes), 0)]
    found, start = [], 0
    for box in boxes_of_range(shape, offsets[0], offsets[0] + sizes[0]):
        found.append(BoxAt(box, start))
        start += math.prod(box.sizes)
    return found


def boxes_of_range(shape: Ints, start: int, stop: int) -> Iterator[Box]:
    """The row-major elements ``start`` to ``stop`` of a tensor as rectangles, in their order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    # A range is the end of a row, whole rows, and the beginning of a row; the two ends are ranges
    # of one dimension less.
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
    # Two ranges have one range in common; as rectangles of all dimensions it would be up to 2N - 1.
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
        # As ranges, where all of them are: their rectangles would have corners in every dimension.
        shape = (math.prod(shape),)
    boxes = [part.box for region in cuts for part in parts(shape, *region)]
    # Only dimensions in which some part is not whole: each more doubles the corners of every part.
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


# torch's name and safetensors' code
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in CODES}


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """torch's name of a dtype that can be stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(where, f"a dtype of {', '.join(DTYPES)}", name)
    return name


def dtype_of(name: str, where: str) -> torch.dtype:
    """The dtype that a manifest names."""
    if name not in DTYPES:
        raise InputError(where, f"a dtype of {', '.join(DTYPES)}", f"'{name}'")
    return DTYPES[name]


def check_readable(
    where: str, saved: torch.dtype, wanted: torch.dtype, allow_smaller: bool
) -> None:
    """Raise MismatchError unless ``wanted`` holds every value of ``saved``.

    A smaller floating-point dtype rounds and has to be asked for; an integer is never narrowed.
    """
    floating = saved.is_floating_point and wanted.is_floating_point
    if _is_exact(saved, wanted) or (floating and allow_smaller):
        return
    remedy = "Pass allow_smaller_dtype=True to round." if floating else ""
    raise MismatchError(
        where, f"a dtype that holds every value of {_name(saved)}", _name(wanted), remedy
    )


def _is_exact(saved: torch.dtype, wanted: torch.dtype) -> bool:
    if saved == wanted:
        return True
    if saved.is_floating_point and wanted.is_floating_point:
        small, large = torch.finfo(saved), torch.finfo(wanted)
        return (
            large.eps <= small.eps
            and large.max >= small.max
            and large.tiny * large.eps <= small.tiny * small.eps  # the smallest subnormal
        )
    if torch.bool in (saved, wanted) or saved.is_floating_point or wanted.is_floating_point:
        return False
    return (
        torch.iinfo(wanted).min <= torch.iinfo(saved).min
        and torch.iinfo(wanted).max >= torch.iinfo(saved).max
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class TensorPart(NamedTuple):
    """This rank's part of a tensor of ``shape``.

    ``offsets`` and ``sizes`` are a rectangle, or with one offset on a tensor of another rank a
    range of its row-major elements. ``tensor`` has prod(sizes) elements, is of shape ``sizes`` or
    contiguous, on any device; its dtype is the tensor's.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def region(self) -> Box:
        """Where the part lies."""
        return Box(self.offsets, self.sizes)


def whole(name: str, tensor: torch.Tensor) -> TensorPart:
    """A tensor that is held in full."""
    shape = tuple(tensor.shape)
    return TensorPart(name, shape, (0,) * len(shape), shape, tensor)


def checked(held: Sequence[TensorPart]) -> list[TensorPart]:
    """The parts that have elements; a tensor without any is kept once, as a whole.

    Raises InputError for a part outside its tensor, with another number of elements, of a dtype
    that cannot be stored, or listed twice.
    """
    kept: dict[tuple[str, Box], TensorPart] = {}
    looks: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    # Sizes come from users' own code as torch.Size or numpy integers, which would be written into
    # JSON as something else, or not at all.
    for part in map(_plain, held):
        _check(part)
        look = (part.shape, part.tensor.dtype)
        if looks.setdefault(part.name, look) != look:
            raise InputError(part.name, f"one shape and dtype, {looks[part.name]}", f"{look}")
        if 0 in part.shape:
            empty = (0,) * len(part.shape)
            whole_part = part._replace(
                offsets=empty, sizes=part.shape, tensor=part.tensor.detach().reshape(part.shape)
            )
            kept.setdefault((part.name, whole_part.region), whole_part)
        elif 0 not in part.sizes:
            if (part.name, part.region) in kept:
                found = f"offsets {part.offsets}, sizes {part.sizes} twice"
                raise InputError(part.name, "each part once per rank", found)
            kept[part.name, part.region] = part
    return list(kept.values())


def _plain(part: TensorPart) -> TensorPart:
    shape, offsets, sizes = (tuple(map(int, numbers)) for numbers in part[1:4])
    return TensorPart(part.name, shape, offsets, sizes, part.tensor)


def _check(part: TensorPart) -> None:
    name, tensor = part.name, part.tensor
    if not name or not name.isprintable():
        raise InputError("tensor", "a name of printable characters", repr(name))
    check_region(name, part.shape, part.offsets, part.sizes)
    dtype_name(tensor.dtype, name)
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        found = f"one on {tensor.device}, {tensor.layout}"
        raise InputError(name, "a dense tensor with data", found)
    if tensor.numel() != math.prod(part.sizes):
        wanted = f"a tensor of {math.prod(part.sizes)} elements"
        raise InputError(name, wanted, f"one of {tensor.numel()}")
    if not tensor.is_contiguous() and tuple(tensor.shape) != part.sizes:
        raise InputError(name, f"a contiguous tensor or one of shape {part.sizes}", "a strided one")


def window(tensor: torch.Tensor, part: BoxAt, box: Box) -> torch.Tensor:
    """A view of ``box``, which lies in ``part``, in the tensor that holds the part's region."""
    tensor = tensor.detach()
    sizes = part.box.sizes
    if part.start or tensor.shape != sizes:
        # A rectangle of a range is a stretch of what the holder has, in its own shape.
        tensor = tensor.view(-1).narrow(0, part.start, math.prod(sizes)).view(sizes)
    for dim, (offset, origin) in enumerate(zip(box.offsets, part.box.offsets, strict=True)):
        tensor = tensor.narrow(dim, offset - origin, box.sizes[dim])
    return tensor
