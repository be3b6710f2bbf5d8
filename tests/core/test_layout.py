from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.layout import ALIGNMENT, FlatLayout, flat_layout, unit_blocks, unit_layout
from shardwright.core.placement import Flat, Replicate
from shardwright.core.tensor import TensorSpec, element_bytes

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 400)),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
)
DTYPES = st.sampled_from(["fp64", "fp32", "bf16", "fp16", "fp8", "int64"])
WORLD_SIZES = st.one_of(st.integers(1, 9), st.integers(1, 512))


@st.composite
def _tensors(draw: st.DrawFn) -> list[TensorSpec]:
    shapes = draw(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=6))
    return [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(shapes)]


@st.composite
def layouts(draw: st.DrawFn) -> FlatLayout:
    return flat_layout(draw(_tensors()), draw(WORLD_SIZES))


@given(layouts())
@settings(deadline=None)
def test_tensors_do_not_overlap_and_start_aligned(layout: FlatLayout) -> None:
    end = 0
    for slot in sorted(layout.slots, key=lambda s: (s.offset, s.tensor.nbytes)):
        assert slot.offset % ALIGNMENT == 0
        assert slot.offset >= end
        end = slot.offset + slot.tensor.nbytes
    assert end <= layout.nbytes


@given(layouts())
@settings(deadline=None)
def test_a_segment_holds_one_dtype_and_divides_into_aligned_slices(layout: FlatLayout) -> None:
    offset = shard_offset = 0
    for segment in layout.segments:
        assert (segment.offset, segment.shard_offset) == (offset, shard_offset)
        assert segment.nbytes % (layout.world_size * ALIGNMENT) == 0
        mine = [s for s in layout.slots if s.tensor.dtype == segment.dtype]
        assert segment.payload == sum(s.tensor.nbytes for s in mine)
        for slot in mine:
            end = slot.offset + slot.tensor.nbytes
            assert segment.offset <= slot.offset <= end <= segment.offset + segment.nbytes
        offset += segment.nbytes
        shard_offset += segment.shard_bytes(layout.world_size)
    assert (offset, shard_offset) == (layout.nbytes, layout.shard_bytes)


@given(layouts())
@settings(deadline=None, max_examples=60)
def test_every_element_lies_on_exactly_one_rank(layout: FlatLayout) -> None:
    position = {slot.tensor.fqn: 0 for slot in layout.slots}
    for rank in range(layout.world_size):
        for piece in layout.pieces(rank):
            if piece.numel:
                assert piece.start == position[piece.tensor.fqn]
                position[piece.tensor.fqn] = piece.stop
    assert position == {slot.tensor.fqn: slot.tensor.numel for slot in layout.slots}


@given(layouts())
@settings(deadline=None, max_examples=60)
def test_pieces_of_a_rank_do_not_overlap_in_its_slice(layout: FlatLayout) -> None:
    for rank in {0, layout.world_size // 2, layout.world_size - 1}:
        spans = sorted(
            (p.shard_offset, p.shard_offset + p.numel * element_bytes(p.tensor.dtype))
            for p in layout.pieces(rank)
            if p.numel
        )
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start
        assert all(start >= 0 and end <= layout.shard_bytes for start, end in spans)


@given(layouts())
@settings(deadline=None)
def test_a_piece_lies_in_the_slice_where_the_whole_buffer_has_it(layout: FlatLayout) -> None:
    segments = {s.dtype: s for s in layout.segments}
    slots = {s.tensor.fqn: s for s in layout.slots}
    for rank in {0, layout.world_size - 1}:
        for piece in layout.pieces(rank):
            if piece.numel:
                segment = segments[piece.tensor.dtype]
                size = element_bytes(piece.tensor.dtype)
                inside = piece.shard_offset - segment.shard_offset
                whole = segment.offset + rank * segment.shard_bytes(layout.world_size) + inside
                assert whole == slots[piece.tensor.fqn].offset + piece.start * size


@given(layouts())
@settings(deadline=None, max_examples=60)
def test_padding_is_bounded_and_complete(layout: FlatLayout) -> None:
    padding = sum(layout.padding_bytes(rank) for rank in range(layout.world_size))
    assert padding == layout.nbytes - layout.payload_bytes
    per_segment = layout.world_size * ALIGNMENT * len(layout.segments)
    assert 0 <= padding <= ALIGNMENT * len(layout.slots) + per_segment


def test_segments_come_widest_element_first() -> None:
    tensors = [TensorSpec("a", (1,), "fp16"), TensorSpec("b", (1,)), TensorSpec("c", (1,), "bf16")]
    assert [s.dtype for s in flat_layout(tensors, 2).segments] == ["fp32", "bf16", "fp16"]


def test_a_cut_may_go_through_a_row() -> None:
    layout = flat_layout([TensorSpec("w", (3, 5))], 2)
    assert [(p.start, p.stop) for r in (0, 1) for p in layout.pieces(r)] == [(0, 8), (8, 15)]
    assert [layout.padding_bytes(rank) for rank in (0, 1)] == [0, 4]


def test_a_tensor_smaller_than_its_alignment_leaves_later_ranks_empty() -> None:
    layout = flat_layout([TensorSpec("bias", (2,))], 3)
    assert [p.numel for r in range(3) for p in layout.pieces(r)] == [2, 0, 0]
    assert layout.nbytes == 48


def test_tensors_without_elements_take_no_bytes() -> None:
    layout = flat_layout([TensorSpec("empty", (0, 8))], 4)
    assert (layout.nbytes, layout.shard_bytes) == (0, 0)


@pytest.mark.parametrize("ranks", [1, 5])
def test_a_replicated_unit_is_one_slice(ranks: int) -> None:
    tensors = [TensorSpec("w", (3, 5))]
    assert unit_layout(tensors, Replicate(), ranks) == flat_layout(tensors, 1)
    assert unit_layout(tensors, Flat(), ranks) == flat_layout(tensors, ranks)


def test_a_replicated_unit_has_every_tensor_whole_on_every_rank() -> None:
    tensors = [TensorSpec("w", (3, 5)), TensorSpec("b", (3,))]
    blocks = list(unit_blocks(tensors, Replicate(), "gradient", 3))
    assert [(b.tensor, b.role, b.offsets, b.sizes, b.rank) for b in blocks] == [
        (name, "gradient", (0,), (numel,), rank)
        for name, numel in (("w", 15), ("b", 3))
        for rank in range(3)
    ]
