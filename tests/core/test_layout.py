from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.block import check_tiling
from shardwright.core.layout import (
    ALIGNMENT,
    Segment,
    ShardPiece,
    UnitLayout,
    balanced_owners,
    unit_layout,
)
from shardwright.core.placement import BlockShard, Flat, Owned, Placement, Replicate, Shard, Zero
from shardwright.core.tensor import TensorSpec, element_bytes

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 400)),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
)
DTYPES = st.sampled_from(["fp64", "fp32", "bf16", "fp16", "fp8", "int64"])
WORLD_SIZES = st.one_of(st.integers(1, 9), st.integers(1, 512))
KINDS = ("flat", "shard", "block_shard", "owned", "replicate")


@st.composite
def _tensors(draw: st.DrawFn) -> list[TensorSpec]:
    shapes = draw(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=6))
    return [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(shapes)]


@st.composite
def _placement(draw: st.DrawFn, tensor: TensorSpec, world_size: int, kind: str) -> Placement:
    dims = max(1, len(tensor.shape))
    match kind:
        case "shard":
            return Shard(draw(st.integers(0, dims - 1)))
        case "block_shard":
            return BlockShard(draw(st.integers(1, 9)), draw(st.integers(0, dims - 1)))
        case "owned":
            return Owned(draw(st.integers(0, world_size - 1)))
        case "replicate":
            return Replicate()
        case _:
            return Flat()


@st.composite
def layouts(draw: st.DrawFn, world_sizes: st.SearchStrategy[int] = WORLD_SIZES) -> UnitLayout:
    """One placement for all, or one for each; some tensors frozen."""
    tensors = draw(_tensors())
    world_size = draw(world_sizes)
    one_for_all = draw(st.sampled_from((*KINDS, None, None)))
    placements = {
        t.fqn: draw(_placement(t, world_size, one_for_all or draw(st.sampled_from(KINDS))))
        for t in tensors
    }
    frozen = draw(st.sets(st.sampled_from([t.fqn for t in tensors])))
    return unit_layout(tensors, placements, world_size, frozen)


def _ranks(layout: UnitLayout) -> list[int]:
    """All of few ranks, some of many."""
    size = layout.world_size
    return sorted({*range(min(size, 9)), size // 2, size - 1})


@pytest.mark.slow
@given(layouts())
def test_every_tensor_has_one_slot_and_slots_start_aligned_without_overlap(
    layout: UnitLayout,
) -> None:
    names = [slot.tensor.fqn for slot in layout.slots]
    assert len(names) == len(set(names))
    for segment in layout.segments:
        size = element_bytes(segment.dtype)
        end = 0
        for slot in sorted(segment.slots, key=lambda s: (s.start, s.tensor.numel)):
            assert slot.tensor.dtype == segment.dtype
            assert slot.start * size % ALIGNMENT == 0
            assert slot.inner * size % ALIGNMENT == 0
            assert slot.start >= end
            end = slot.start + slot.tensor.numel
        assert end <= segment.whole


@pytest.mark.slow
@given(layouts())
def test_segments_follow_each_other_aligned_in_both_buffers(layout: UnitLayout) -> None:
    offset = shard_offset = 0
    for segment in layout.segments:
        assert (segment.offset, segment.shard_offset) == (offset, shard_offset)
        assert segment.whole_bytes % ALIGNMENT == segment.share_bytes % ALIGNMENT == 0
        if segment.in_rank_order:
            assert segment.whole == layout.world_size * segment.share
        offset += segment.whole_bytes
        shard_offset += segment.share_bytes
    assert (offset, shard_offset) == (layout.nbytes, layout.shard_bytes)


@given(layouts())
def test_pieces_of_a_rank_do_not_overlap_in_its_buffer_and_lie_in_it(layout: UnitLayout) -> None:
    for rank in _ranks(layout):
        spans = sorted(
            (p.shard_offset, p.shard_offset + p.numel * element_bytes(p.tensor.dtype))
            for p in layout.pieces(rank)
            if p.numel
        )
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start
        assert all(start >= 0 and end <= layout.shard_bytes for start, end in spans)


@pytest.mark.slow
@given(layouts())
def test_a_piece_starts_at_a_multiple_of_its_element_even_in_a_buffer_of_half_the_bytes(
    layout: UnitLayout,
) -> None:
    for rank in _ranks(layout):
        for piece in layout.pieces(rank):
            assert piece.shard_offset % element_bytes(piece.tensor.dtype) == 0
    for segment in layout.segments:
        assert segment.offset % ALIGNMENT == segment.shard_offset % ALIGNMENT == 0


@pytest.mark.slow
@given(layouts())
def test_every_element_lies_exactly_once_on_its_owners(layout: UnitLayout) -> None:
    """The block list tiles every tensor: once, or once on every rank where it is replicated."""
    specs = [slot.tensor for slot in layout.slots if slot.tensor.numel]
    for replicated in (False, True):
        these = {
            slot.tensor.fqn
            for segment in layout.segments
            for slot in segment.slots
            if (segment.cut == "replicated") is replicated
        }
        blocks = [b for b in layout.blocks("parameter") if b.tensor in these]
        held: dict[str, int] = dict.fromkeys(these, 0)
        for block in blocks:
            held[block.tensor] += math.prod(block.sizes)
        copies = layout.world_size if replicated else 1
        for spec in specs:
            if spec.fqn in these:
                assert held[spec.fqn] == copies * spec.numel
        check_tiling(blocks, [spec for spec in specs if spec.fqn in these], layout.world_size)


def _elements(piece: ShardPiece) -> Iterator[int]:
    """The elements of the tensor that a piece has, in the order in which it has them."""
    shape = piece.tensor.shape
    if len(piece.offsets) != len(shape) or not shape:
        first = piece.offsets[0] if piece.offsets else 0
        yield from range(first, first + piece.numel)
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    spans = [range(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True)]
    for index in itertools.product(*spans):
        yield sum(i * stride for i, stride in zip(index, strides, strict=True))


def _shares(layout: UnitLayout, segment: Segment) -> list[list[object]]:
    """Every rank's share of a segment, each element told by its tensor and number."""
    size = element_bytes(segment.dtype)
    made = []
    for rank in range(layout.world_size):
        share: list[object] = [None] * segment.share
        for slot in segment.slots:
            piece = segment.piece(slot, rank)
            if piece.numel:
                begin = (piece.shard_offset - segment.shard_offset) // size
                found = [(slot.tensor.fqn, element) for element in _elements(piece)]
                assert share[begin : begin + len(found)] == [None] * len(found)
                share[begin : begin + len(found)] = found
        made.append(share)
    return made


@pytest.mark.slow
@given(layouts(st.integers(1, 9)))
def test_gathered_shares_put_together_are_the_tensors(layout: UnitLayout) -> None:
    for segment in layout.segments:
        shares = _shares(layout, segment)
        in_order = list(itertools.chain.from_iterable(shares))
        for slot in segment.slots:
            wanted = [(slot.tensor.fqn, element) for element in range(slot.tensor.numel)]
            if segment.in_rank_order:
                assert in_order[slot.start : slot.start + slot.tensor.numel] == wanted
            elif segment.cut == "replicated":
                for share in shares:
                    assert share[slot.start : slot.start + slot.tensor.numel] == wanted
            else:
                found: set[object] = set()
                for rank, share in enumerate(shares):
                    numel = segment.piece(slot, rank).numel
                    part = share[slot.inner : slot.inner + numel]
                    assert found.isdisjoint(part)
                    found.update(part)
                assert found == set(wanted)


@pytest.mark.slow
@given(layouts())
def test_a_block_is_never_cut_and_chunks_are_equal_but_for_the_last(layout: UnitLayout) -> None:
    for segment in layout.segments:
        for slot in segment.slots:
            match slot.placement:
                case Shard(dim):
                    block = 1
                case BlockShard(block, dim):
                    pass
                case _:
                    continue
            extent = slot.tensor.shape[dim]
            lengths = []
            for rank in _ranks(layout):
                piece = segment.piece(slot, rank)
                first, length = piece.offsets[dim], piece.sizes[dim]
                assert first % block == 0 or not length
                assert length % block == 0 or first + length == extent
                lengths.append(length)
            assert lengths == sorted(lengths, reverse=True)
            assert slot.chunk * layout.world_size >= extent


@given(layouts())
def test_padding_is_what_no_piece_needs_and_is_bounded_without_common_multiples(
    layout: UnitLayout,
) -> None:
    for segment in layout.segments:
        payload = sum(slot.tensor.nbytes for slot in segment.slots)
        size, ranks = element_bytes(segment.dtype), layout.world_size
        match segment.cut:
            case "flat":
                bound = ALIGNMENT * (len(segment.slots) + ranks + 1)
                assert segment.whole_bytes - payload <= bound
            case "chunks":
                assert segment.whole_bytes - payload <= ALIGNMENT * len(segment.slots)
                for slot in segment.slots:
                    placement = slot.placement
                    assert isinstance(placement, Shard | BlockShard)
                    block = placement.size if isinstance(placement, BlockShard) else 1
                    extent = slot.tensor.shape[placement.dim]
                    assert slot.chunk < extent / ranks + block or not extent
                chunks = sum(
                    slot.tensor.numel // max(1, slot.tensor.shape[slot.placement.dim]) * slot.chunk
                    for slot in segment.slots
                    if isinstance(slot.placement, Shard | BlockShard)
                )
                assert segment.share_bytes <= chunks * size + ALIGNMENT * len(segment.slots)
            case "replicated":
                assert segment.share == segment.whole
                assert segment.whole_bytes - payload <= ALIGNMENT * len(segment.slots)
            case "owned":
                fullest = max(
                    sum(
                        s.tensor.nbytes + ALIGNMENT
                        for s in segment.slots
                        if s.placement == Owned(rank)
                    )
                    for rank in {s.placement.rank for s in segment.slots}  # type: ignore[union-attr]
                )
                assert segment.share_bytes <= fullest
    for padding in layout.paddings(stored=False):
        assert 0 <= padding <= layout.shard_bytes


def _paddings(layout: UnitLayout, kept: bool) -> list[int]:
    """Of each rank, from every piece of every rank, empty ones too."""
    ranks = range(layout.world_size)
    own = [
        [sum(s.piece(slot, r).numel for slot in s.slots) * element_bytes(s.dtype) for r in ranks]
        for s in layout.segments
    ]
    found = []
    for rank in ranks:
        total = layout.stored_bytes if kept else layout.shard_bytes
        for segment, held in zip(layout.segments, own, strict=True):
            total -= sum(held[other] for other in (segment.keepers(rank) if kept else [rank]))
        found.append(total)
    return found


def _check_paddings(layout: UnitLayout) -> None:
    """Of shares, and of all that a rank keeps."""
    for stored in (False, True):
        assert list(layout.paddings(stored=stored)) == _paddings(layout, stored)


@given(layouts(st.integers(1, 40)))
def test_ranks_that_hold_nothing_of_a_tensor_are_not_its_holders(layout: UnitLayout) -> None:
    ranks = range(layout.world_size)
    for segment in layout.segments:
        for slot in segment.slots:
            holders = segment.holders(slot, ranks)
            assert set(holders) <= set(ranks)
            assert {r for r in ranks if segment.piece(slot, r).numel} <= set(holders)
    _check_paddings(layout)
    held = [0] * layout.world_size
    for block in layout.blocks("parameter"):
        held[block.rank] += block.numel
    assert held == [sum(piece.numel for piece in layout.pieces(rank)) for rank in ranks]


@given(_tensors(), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_padding_of_ranks_that_keep_several_shares(
    tensors: list[TensorSpec], kept: int, groups: int, zero: Zero
) -> None:
    layout = unit_layout(tensors, Flat(), kept * groups, zero=zero, kept=kept)
    _check_paddings(layout)


DLRM = [(512, 13), (512,), (256, 512), (256,), (64, 256), (64,)]
DLRM += [(512, 415), (512,), (512, 512), (512,), (256, 512), (256,), (1, 256), (1,)]


@pytest.mark.parametrize(("ranks", "percent"), [(8, 0.01), (64, 0.03), (512, 0.5)])
def test_the_two_stacks_of_a_dlrm_in_one_flat_unit_grow_by_little(
    ranks: int, percent: float
) -> None:
    """Rows of 13, 415, 256 and 512 elements: a common multiple of them is in the millions."""
    tensors = [TensorSpec(f"t{i}", shape) for i, shape in enumerate(DLRM)]
    layout = unit_layout(tensors, Flat(), ranks)
    assert layout.nbytes <= layout.payload_bytes * (1 + percent / 100)


@pytest.mark.slow
def test_a_flat_unit_is_cut_evenly_for_any_number_of_ranks() -> None:
    tensors = [TensorSpec("w", (37, 29)), TensorSpec("b", (37,)), TensorSpec("s", (), "bf16")]
    for ranks in range(1, 513):
        layout = unit_layout(tensors, Flat(), ranks)
        assert layout.nbytes == ranks * layout.shard_bytes
        held = [sum(p.numel for p in layout.pieces(rank)) for rank in range(ranks)]
        assert sum(held) == 37 * 29 + 37 + 1


@given(_tensors(), st.integers(1, 512))
def test_balanced_owners_are_within_one_tensor_of_even(
    tensors: list[TensorSpec], ranks: int
) -> None:
    owners = balanced_owners(tensors, ranks)
    filled = [0] * ranks
    for tensor in tensors:
        placement = owners[tensor.fqn]
        assert isinstance(placement, Owned)
        filled[placement.rank] += tensor.nbytes
    largest = max(tensor.nbytes for tensor in tensors)
    padding = ALIGNMENT * len(tensors)
    assert max(filled) <= sum(filled) / ranks + largest + padding


def test_the_largest_tensor_has_its_owner_first_wherever_it_stands() -> None:
    """The small ones fill the other rank: given away as they stand, they would leave 6 and 2."""
    tensors = [TensorSpec(f"t{i}", (256 * n,)) for i, n in enumerate([1, 1, 1, 1, 4])]
    owners = balanced_owners(tensors, 2)
    assert [owners[f"t{i}"] for i in range(4)] == [Owned(1)] * 4
    assert owners["t4"] == Owned(0)


def test_segments_come_cut_by_cut_and_widest_element_first() -> None:
    tensors = [TensorSpec("a", (1,), "fp16"), TensorSpec("b", (1,)), TensorSpec("c", (1,), "bf16")]
    tensors.append(TensorSpec("d", (2, 2), "fp16"))
    placements: dict[str, Placement] = {"a": Flat(), "b": Flat(), "c": Flat(), "d": Shard(0)}
    segments = unit_layout(tensors, placements, 2).segments
    assert [(s.cut, s.dtype) for s in segments] == [
        ("flat", "fp32"),
        ("flat", "bf16"),
        ("flat", "fp16"),
        ("chunks", "fp16"),
    ]


def test_matrices_come_before_vectors_so_that_groups_of_an_optimizer_are_stretches() -> None:
    tensors = [TensorSpec("b1", (3,)), TensorSpec("w1", (3, 5)), TensorSpec("b2", (2,))]
    tensors.append(TensorSpec("w2", (2, 3)))
    layout = unit_layout(tensors, Flat(), 2)
    assert [slot.tensor.fqn for slot in layout.slots] == ["w1", "w2", "b1", "b2"]


def test_frozen_tensors_have_a_segment_of_their_own_without_gradient() -> None:
    tensors = [TensorSpec("a", (4,)), TensorSpec("b", (4,))]
    segments = unit_layout(tensors, Flat(), 2, frozen={"b"}).segments
    assert [(s.trainable, s.slots[0].tensor.fqn) for s in segments] == [(True, "a"), (False, "b")]


def test_a_flat_cut_may_go_through_a_row() -> None:
    layout = unit_layout([TensorSpec("w", (3, 5))], Flat(), 2)
    assert [p.offsets + p.sizes for r in (0, 1) for p in layout.pieces(r)] == [(0, 8), (8, 7)]
    assert layout.paddings(stored=False) == (0, 4)


def test_ceiling_chunks_leave_the_last_ranks_less_or_nothing() -> None:
    layout = unit_layout([TensorSpec("w", (5, 3))], Shard(0), 4)
    assert [p.sizes for r in range(4) for p in layout.pieces(r)] == [(2, 3), (2, 3), (1, 3), (0, 3)]


def test_blocks_of_rows_stay_together() -> None:
    layout = unit_layout([TensorSpec("w", (10, 2))], BlockShard(4), 2)
    assert [p.sizes for r in (0, 1) for p in layout.pieces(r)] == [(8, 2), (2, 2)]


def test_an_owned_tensor_is_whole_on_its_owner_and_empty_elsewhere() -> None:
    layout = unit_layout([TensorSpec("w", (3, 5))], Owned(1), 3)
    assert [p.sizes for r in range(3) for p in layout.pieces(r)] == [(0, 5), (3, 5), (0, 5)]


def test_a_scalar_is_replicated_unless_the_cut_is_flat() -> None:
    scalar = [TensorSpec("s", ())]
    assert [s.cut for s in unit_layout(scalar, Shard(0), 3).segments] == ["replicated"]
    layout = unit_layout(scalar, Flat(), 3)
    assert [p.numel for r in range(3) for p in layout.pieces(r)] == [1, 0, 0]


def test_tensors_without_elements_take_no_bytes() -> None:
    for placement in (Flat(), Shard(0), BlockShard(2), Owned(1), Replicate()):
        layout = unit_layout([TensorSpec("empty", (0, 8))], placement, 4)
        assert (layout.nbytes, layout.shard_bytes) == (0, 0)


@pytest.mark.parametrize("ranks", [1, 5])
def test_a_replicated_unit_is_whole_on_every_rank(ranks: int) -> None:
    tensors = [TensorSpec("w", (3, 5)), TensorSpec("b", (3,))]
    layout = unit_layout(tensors, Replicate(), ranks)
    assert layout.nbytes == layout.shard_bytes
    blocks = list(layout.blocks("gradient"))
    assert [(b.tensor, b.role, b.offsets, b.sizes, b.rank) for b in blocks] == [
        (name, "gradient", (0,) * len(shape), shape, rank)
        for name, shape in (("w", (3, 5)), ("b", (3,)))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("placement", [Flat(), Replicate(), Owned(0)], ids=str)
def test_large_tensors_are_cut_between_blocks_and_small_ones_anywhere(
    ranks: int, placement: Placement
) -> None:
    shapes = ((7,), (80, 64), (17, 257), (4095,), (4099,), (3, 5))
    tensors = [TensorSpec(f"t{k}", shape) for k, shape in enumerate(shapes)]
    layout = unit_layout(tensors, placement, ranks, block=256)
    (segment,) = layout.segments
    assert [slot.tensor.numel >= 4096 for slot in segment.slots] == [True] * 3 + [False] * 3
    found = [layout.elements(rank) for rank in range(ranks)]
    for rank, (own, padding) in enumerate(found):
        for slot in segment.slots[: segment.quantized]:
            piece = segment.piece(slot, rank)
            first = piece.offsets[0] if len(piece.offsets) == 1 else 0
            last = first + piece.numel
            assert first % 256 == 0
            assert last % 256 == 0 or last == slot.tensor.numel
            assert segment.begin(piece) % 256 == 0 or not piece.numel
        quantized, rest = segment.stretches(rank)
        assert (quantized % 256, quantized + rest) == (0, segment.share)
        assert own.quantized + padding.quantized == quantized == 256 * (own.blocks + padding.blocks)
        assert own.whole + padding.whole == rest
    copies = ranks if placement == Replicate() else 1
    assert sum(own.quantized for own, _ in found) == copies * (80 * 64 + 17 * 257 + 4099)
    assert sum(own.whole for own, _ in found) == copies * (7 + 4095 + 15)
    least = min(segment.stretches(rank)[0] for rank in range(ranks))
    assert segment.stretches(layout.fullest())[0] == least
