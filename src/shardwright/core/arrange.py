"""How tensors of one dtype and one way of being cut are arranged in their segment."""

# The arithmetic here decides bytes on every rank, and planner, heap and runtime all rest on it.
# What must hold: a share begins at a multiple of ALIGNMENT bytes on every rank, also once it is
# gathered in a dtype half as wide; all ranks' shares of a segment are as long as each other, for
# collectives take one length; and padding is at most an alignment a tensor and one share, never a
# multiple of row sizes, which for odd vocabularies would be more than the tensor.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from shardwright.core.amount import ceil_div
from shardwright.core.errors import InputError
from shardwright.core.optimizer_states import is_large
from shardwright.core.placement import (
    BlockShard,
    Flat,
    Owned,
    Placement,
    Replicate,
    Shard,
    describe,
)
from shardwright.core.tensor import TensorSpec, element_bytes

ALIGNMENT = 32  # bytes; 16 remain where an fp32 buffer is gathered in a dtype of two bytes

Cut = Literal["flat", "owned", "chunks", "replicated"]
CUT_ORDER: tuple[Cut, ...] = ("flat", "owned", "chunks", "replicated")  # in the buffer
CUTS: dict[type[Placement], Cut] = {
    Flat: "flat",
    Owned: "owned",
    Shard: "chunks",
    BlockShard: "chunks",
    Replicate: "replicated",
}


class Slot(msgspec.Struct, frozen=True):
    """A tensor's place in its segment, in elements.

    ``start`` counts in the unsharded segment, ``inner`` in the share of every rank that holds some
    of it (of a flat cut that differs from rank to rank and is 0 here). ``chunk`` is how far a
    rank's chunk reaches along the dimension that is cut.
    """

    tensor: TensorSpec
    placement: Placement
    start: int
    inner: int = 0
    chunk: int = 0


Members = list[tuple[TensorSpec, Placement]]
Arranged = tuple[tuple[Slot, ...], int, int]


def place(tensor: TensorSpec, block: int) -> tuple[bool, bool]:
    """The order of tensors in a segment: what is quantized, then matrices, then the others."""
    return block > 1 and not is_large(tensor.numel), len(tensor.shape) < 2


def aligned(numel: int, dtype: str, block: int = 1) -> int:
    """``numel`` rounded up to a multiple of the alignment and of a block, in elements."""
    step = math.lcm(ALIGNMENT // element_bytes(dtype), block)
    return -(-numel // step) * step


def _room(tensor: TensorSpec, numel: int, dtype: str, block: int) -> int:
    """What ``numel`` elements of a tensor take, so that what follows is aligned."""
    return aligned(numel, dtype, block if is_large(tensor.numel) else 1)


def _share(members: Members, numel: int, dtype: str, block: int) -> int:
    """A share that has room for ``numel`` elements; every share begins between blocks."""
    large = any(is_large(tensor.numel) for tensor, _ in members)
    return aligned(numel, dtype, block if large else 1)


def _flat(members: Members, dtype: str, world_size: int, block: int) -> Arranged:
    slots = []
    start = 0
    for tensor, placement in members:
        slots.append(Slot(tensor, placement, start))
        start += _room(tensor, tensor.numel, dtype, block)
    share = _share(members, ceil_div(start, world_size), dtype, block)
    return tuple(slots), share, share * world_size


def _owned(members: Members, dtype: str, world_size: int, block: int) -> Arranged:
    filled = [0] * world_size
    inner = []
    for tensor, placement in members:
        assert isinstance(placement, Owned)
        inner.append(filled[placement.rank])
        filled[placement.rank] += _room(tensor, tensor.numel, dtype, block)
    # As long as the fullest rank's: an all-gather takes equal shares, and offsets of all ranks'
    # tensors then follow from their owner alone.
    share = _share(members, max(filled), dtype, block)
    slots = tuple(
        Slot(tensor, placement, placement.rank * share + at, at)
        for (tensor, placement), at in zip(members, inner, strict=True)
        if isinstance(placement, Owned)
    )
    return slots, share, share * world_size


def _chunks(members: Members, dtype: str, world_size: int, block: int) -> Arranged:
    slots = []
    start = inner = 0
    for tensor, placement in members:
        assert isinstance(placement, Shard | BlockShard)
        extent = tensor.shape[placement.dim]
        rows = placement.size if isinstance(placement, BlockShard) else 1
        chunk = ceil_div(ceil_div(extent, rows), world_size) * rows
        if block > 1 and is_large(tensor.numel):
            _check_blocks(tensor, placement, chunk, block)
        slots.append(Slot(tensor, placement, start, inner, chunk))
        start += _room(tensor, tensor.numel, dtype, block)
        # Ranks at the end hold less or nothing, but have room for a whole chunk: every rank's
        # tensor begins at the same place of its share.
        held = tensor.numel // extent * chunk if extent else 0
        inner += _room(tensor, held, dtype, block)
    return tuple(slots), _share(members, inner, dtype, block), start


def _check_blocks(
    tensor: TensorSpec, placement: Shard | BlockShard, chunk: int, block: int
) -> None:
    """InputError unless chunks of a tensor are whole blocks, counted from its first element."""
    before, after = (
        math.prod(part)
        for part in (tensor.shape[: placement.dim], tensor.shape[placement.dim + 1 :])
    )
    if chunk >= tensor.shape[placement.dim] or (before == 1 and chunk * after % block == 0):
        return
    least = block // math.gcd(math.prod(tensor.shape[1:]), block)
    wanted = f"cuts between blocks of {block} elements, which an optimizer quantizes together"
    remedy = f"Use shard_strategy='flat', Owned(rank) or BlockShard({least})."
    raise InputError(tensor.fqn, wanted, f"{describe(placement)} of shape {tensor.shape}", remedy)


def _replicated(members: Members, dtype: str, world_size: int, block: int) -> Arranged:
    slots = []
    start = 0
    for tensor, placement in members:
        slots.append(Slot(tensor, placement, start, start))
        start += _room(tensor, tensor.numel, dtype, block)
    share = _share(members, start, dtype, block)
    return tuple(slots), share, share


ARRANGE: dict[Cut, Callable[[Members, str, int, int], Arranged]] = {
    "flat": _flat,
    "owned": _owned,
    "chunks": _chunks,
    "replicated": _replicated,
}
