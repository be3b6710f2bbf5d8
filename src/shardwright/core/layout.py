"""The flat buffer of a unit: pure arithmetic, no data.

Tensors of one dtype form a segment; each starts at a multiple of ``ALIGNMENT`` bytes. A segment is
padded so that it divides into ``world_size`` equal, aligned slices, and slice *r* of every segment
belongs to rank *r*. Padding is at most ``ALIGNMENT`` bytes per tensor plus ``ALIGNMENT`` per rank
and segment; it never depends on a common multiple of row sizes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shardwright.core.amount import ceil_div
from shardwright.core.block import Block, Role
from shardwright.core.placement import Placement, Replicate
from shardwright.core.tensor import TensorSpec, element_bytes

ALIGNMENT = 16


class Slot(msgspec.Struct, frozen=True):
    """A tensor's place in the unsharded buffer, in bytes."""

    tensor: TensorSpec
    offset: int


class Segment(msgspec.Struct, frozen=True):
    """A stretch of one dtype, cut evenly on its own; offsets in bytes."""

    dtype: str
    offset: int
    shard_offset: int
    nbytes: int
    payload: int

    def shard_bytes(self, world_size: int) -> int:
        """Bytes of one rank's slice of this segment."""
        return self.nbytes // world_size


class Piece(msgspec.Struct, frozen=True):
    """The elements ``start:stop`` (row-major) of a tensor that lie in one rank's slice."""

    tensor: TensorSpec
    start: int
    stop: int
    shard_offset: int

    @property
    def numel(self) -> int:
        """Elements of the tensor on this rank, possibly 0."""
        return self.stop - self.start


class FlatLayout(msgspec.Struct, frozen=True):
    """Slots and segments of a unit's buffer for ``world_size`` ranks."""

    world_size: int
    slots: tuple[Slot, ...]
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded buffer, padding included."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's slice, padding included; equal on every rank."""
        return sum(segment.shard_bytes(self.world_size) for segment in self.segments)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors themselves."""
        return sum(slot.tensor.nbytes for slot in self.slots)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What ``rank`` holds of every tensor, in buffer order; empty pieces included."""
        return tuple(self._piece(slot, rank) for slot in self.slots)

    def _piece(self, slot: Slot, rank: int) -> Piece:
        segment = next(s for s in self.segments if s.dtype == slot.tensor.dtype)
        size = element_bytes(slot.tensor.dtype)
        share = segment.shard_bytes(self.world_size)
        low = segment.offset + rank * share
        begin = min(max(low, slot.offset), slot.offset + slot.tensor.nbytes)
        end = min(max(low + share, slot.offset), slot.offset + slot.tensor.nbytes)
        if begin >= end:
            return Piece(slot.tensor, 0, 0, segment.shard_offset)
        first, last = (begin - slot.offset) // size, (end - slot.offset) // size
        return Piece(slot.tensor, first, last, segment.shard_offset + begin - low)

    def padding_bytes(self, rank: int) -> int:
        """Bytes of ``rank``'s slice that belong to no tensor."""
        held = sum(p.numel * element_bytes(p.tensor.dtype) for p in self.pieces(rank))
        return self.shard_bytes - held

    def blocks(self, role: Role) -> Iterable[Block]:
        """The layout as blocks, tensor by tensor, rank by rank."""
        for slot in self.slots:
            for rank in range(self.world_size):
                piece = self._piece(slot, rank)
                if piece.numel:
                    yield Block(slot.tensor.fqn, role, (piece.start,), (piece.numel,), rank)


def flat_layout(tensors: Iterable[TensorSpec], world_size: int) -> FlatLayout:
    """Lay ``tensors`` out for an even cut over ``world_size`` ranks.

    Segments come widest element first, tensors inside a segment in the given order.
    """
    by_dtype: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    slots: list[Slot] = []
    segments: list[Segment] = []
    offset = shard_offset = 0
    for dtype in sorted(by_dtype, key=lambda name: (-element_bytes(name), name)):
        start = offset
        for tensor in by_dtype[dtype]:
            slots.append(Slot(tensor, offset))
            offset += ceil_div(tensor.nbytes, ALIGNMENT) * ALIGNMENT
        step = world_size * ALIGNMENT
        nbytes = ceil_div(offset - start, step) * step
        payload = sum(tensor.nbytes for tensor in by_dtype[dtype])
        segments.append(Segment(dtype, start, shard_offset, nbytes, payload))
        offset = start + nbytes
        shard_offset += nbytes // world_size
    return FlatLayout(world_size, tuple(slots), tuple(segments))


def unit_layout(tensors: Iterable[TensorSpec], placement: Placement, world_size: int) -> FlatLayout:
    """The buffer of a unit: cut over all ranks, or one slice if every rank keeps the whole."""
    return flat_layout(tensors, 1 if isinstance(placement, Replicate) else world_size)


def unit_blocks(
    tensors: Iterable[TensorSpec], placement: Placement, role: Role, world_size: int
) -> Iterable[Block]:
    """The blocks of a unit under ``placement``; a replica is the same range on every rank."""
    layout = unit_layout(tensors, placement, world_size)
    if not isinstance(placement, Replicate):
        yield from layout.blocks(role)
        return
    for slot in layout.slots:
        for rank in range(world_size if slot.tensor.numel else 0):
            yield Block(slot.tensor.fqn, role, (0,), (slot.tensor.numel,), rank)
