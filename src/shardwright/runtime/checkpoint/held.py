"""What a rank holds of a tensor, checked before it is written or filled; dtypes that are stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwright.core.errors import InputError, MismatchError, expected
from shardwright.runtime.checkpoint.region import Box, Part, check_region

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
        raise InputError(expected(where, f"a dtype of {', '.join(DTYPES)}", name))
    return name


def dtype_of(name: str, where: str) -> torch.dtype:
    """The dtype that a manifest names."""
    if name not in DTYPES:
        raise InputError(expected(where, f"a dtype of {', '.join(DTYPES)}", f"'{name}'"))
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
        expected(where, f"a dtype that holds every value of {_name(saved)}", _name(wanted), remedy)
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


class Held(NamedTuple):
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


def whole(name: str, tensor: torch.Tensor) -> Held:
    """A tensor that is held in full."""
    shape = tuple(tensor.shape)
    return Held(name, shape, (0,) * len(shape), shape, tensor)


def checked(held: Sequence[Held]) -> list[Held]:
    """The parts that have elements; a tensor without any is kept once, as a whole.

    Raises InputError for a part outside its tensor, with another number of elements, of a dtype
    that cannot be stored, or listed twice.
    """
    kept: dict[tuple[str, Box], Held] = {}
    looks: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for part in map(_plain, held):
        _check(part)
        look = (part.shape, part.tensor.dtype)
        if looks.setdefault(part.name, look) != look:
            raise InputError(
                expected(part.name, f"one shape and dtype, {looks[part.name]}", f"{look}")
            )
        if 0 in part.shape:
            empty = (0,) * len(part.shape)
            whole_part = part._replace(
                offsets=empty, sizes=part.shape, tensor=part.tensor.detach().reshape(part.shape)
            )
            kept.setdefault((part.name, whole_part.region), whole_part)
        elif 0 not in part.sizes:
            if (part.name, part.region) in kept:
                found = f"offsets {part.offsets}, sizes {part.sizes} twice"
                raise InputError(expected(part.name, "each part once per rank", found))
            kept[part.name, part.region] = part
    return list(kept.values())


def _plain(part: Held) -> Held:
    shape, offsets, sizes = (tuple(map(int, numbers)) for numbers in part[1:4])
    return Held(part.name, shape, offsets, sizes, part.tensor)


def _check(part: Held) -> None:
    name, tensor = part.name, part.tensor
    if not name or not name.isprintable():
        raise InputError(expected("tensor", "a name of printable characters", repr(name)))
    check_region(name, part.shape, part.offsets, part.sizes)
    dtype_name(tensor.dtype, name)
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        found = f"one on {tensor.device}, {tensor.layout}"
        raise InputError(expected(name, "a dense tensor with data", found))
    if tensor.numel() != math.prod(part.sizes):
        wanted = f"a tensor of {math.prod(part.sizes)} elements"
        raise InputError(expected(name, wanted, f"one of {tensor.numel()}"))
    if not tensor.is_contiguous() and tuple(tensor.shape) != part.sizes:
        raise InputError(
            expected(name, f"a contiguous tensor or one of shape {part.sizes}", "a strided one")
        )


def window(tensor: torch.Tensor, part: Part, box: Box) -> torch.Tensor:
    """A view of ``box``, which lies in ``part``, in the tensor that holds the part's region."""
    tensor = tensor.detach()
    sizes = part.box.sizes
    if part.start or tensor.shape != sizes:
        tensor = tensor.view(-1).narrow(0, part.start, math.prod(sizes)).view(sizes)
    for dim, (offset, origin) in enumerate(zip(box.offsets, part.box.offsets, strict=True)):
        tensor = tensor.narrow(dim, offset - origin, box.sizes[dim])
    return tensor
