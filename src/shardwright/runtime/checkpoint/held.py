"""What a rank holds of a tensor, checked before it is written or filled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwright.core.errors import InputError, expected
from shardwright.runtime.checkpoint.dtypes import dtype_name
from shardwright.runtime.checkpoint.region import Box, Part, check_region


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
