from __future__ import annotations

import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.block import Block, BlockRun, Role, check_tiling, decode, encode
from shardwright.core.errors import InputError
from shardwright.core.layout import unit_layout
from shardwright.core.model import TableSpec
from shardwright.core.option import Option, column_widths, place, shard_runs
from shardwright.core.placement import Flat, Replicate
from shardwright.core.sharding import ShardingType
from shardwright.core.tensor import TensorSpec

ROLES: tuple[Role, ...] = ("parameter", "gradient", "optimizer_state")
TYPES: tuple[ShardingType, ...] = get_args(ShardingType)


@st.composite
def _block(draw: st.DrawFn) -> Block:
    dims = draw(st.integers(0, 2))
    few = st.integers(0, 3)
    return Block(
        draw(st.sampled_from(["a", "b"])),
        draw(st.sampled_from(ROLES)),
        tuple(draw(few) for _ in range(dims)),
        tuple(draw(few) for _ in range(dims)),
        draw(st.integers(0, 3)),
    )


@pytest.mark.slow
@given(st.lists(_block(), max_size=30))
def test_any_list_of_blocks_comes_back_from_its_encoding(blocks: list[Block]) -> None:
    assert list(decode(encode(blocks))) == blocks


@given(st.integers(1, 600), st.integers(1, 600), st.integers(0, 9), st.integers(-4, 4))
def test_evenly_moving_blocks_are_one_run(
    count: int, size: int, first_rank: int, step: int
) -> None:
    blocks = [
        Block("w", "parameter", (5000 + k * step,), (size,), first_rank + k) for k in range(count)
    ]
    runs = encode(blocks)
    assert len(runs) == 1
    assert list(decode(runs)) == blocks


def test_a_run_ends_where_the_ranks_do_not_continue() -> None:
    blocks = [Block("w", "parameter", (0,), (4,), rank) for rank in (0, 1, 3)]
    assert encode(blocks) == (
        BlockRun("w", "parameter", (0,), (4,), 0, 2, (0,)),
        BlockRun("w", "parameter", (0,), (4,), 3),
    )


@given(
    st.sampled_from(TYPES),
    st.integers(1, 40),
    st.sampled_from([4, 8, 16, 24]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_the_shards_of_every_type_tile_their_table_wherever_they_lie(
    kind: ShardingType, rows: int, dim: int, hosts: int, group: int, random_: random.Random
) -> None:
    table = TableSpec("t", rows, dim)
    width = random_.choice([dim, *column_widths(table)])
    ranks = hosts * group
    option = Option("t", kind, "fused", shard_runs(table, kind, ranks, group, width))
    placed = place(option, _somewhere(option, ranks, group, random_), table)
    check_tiling(placed, [table.tensor], ranks)


def _somewhere(option: Option, ranks: int, group: int, random_: random.Random) -> list[int]:
    """Ranks that the shards of an option may have."""
    match option.partition:
        case "uniform":
            return list(range(ranks))
        case "device":
            return [random_.randrange(ranks) for _ in option.shards]
        case "host":
            first = random_.randrange(ranks // group) * group
            return [first + k % group for k in range(option.count)]
        case "multi_host":
            hosts = [random_.randrange(ranks // group) for _ in range(option.count // group)]
            return [host * group + k for host in hosts for k in range(group)]


@pytest.mark.parametrize("placement", [Flat(), Replicate()])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
def test_the_blocks_of_a_unit_tile_its_tensors(placement: Flat | Replicate, ranks: int) -> None:
    tensors = [
        TensorSpec("w", (5, 3)),
        TensorSpec("scalar", (), "fp16"),
        TensorSpec("empty", (0, 4)),
        TensorSpec("bias", (7,), "bf16"),
    ]
    check_tiling(unit_layout(tensors, placement, ranks).blocks("parameter"), tensors, ranks)


W = TensorSpec("w", (4, 6))


def _part(offsets: tuple[int, ...], sizes: tuple[int, ...], rank: int = 0) -> Block:
    return Block("w", "parameter", offsets, sizes, rank)


WHOLE = [_part((0, 0), (2, 6)), _part((2, 0), (2, 3), 1), _part((2, 3), (2, 3), 1)]


def test_distinct_blocks_that_cover_a_tensor_once_are_accepted() -> None:
    check_tiling(WHOLE, [W], 2)


def test_replicas_on_several_ranks_are_accepted() -> None:
    check_tiling([_part((0, 0), (4, 6), rank) for rank in range(3)], [W], 3)


def test_ranges_of_elements_are_accepted() -> None:
    check_tiling([_part((0,), (13,)), _part((13,), (11,), 1)], [W], 2)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            WHOLE[:2],
            "blocks of w: expected every one of 24 elements exactly once, got blocks of 18 "
            "elements in all. Make the plan again with `shardwright plan`.",
        ),
        (
            [],
            "blocks of w: expected every one of 24 elements exactly once, got blocks of 0 "
            "elements in all. Make the plan again with `shardwright plan`.",
        ),
        (
            [_part((0, 0), (2, 6)), _part((1, 0), (2, 6))],
            "blocks of w: expected every one of 24 elements exactly once, got an overlap. "
            "Make the plan again with `shardwright plan`.",
        ),
        (
            [_part((0,), (12,)), _part((11,), (12,), 1)],
            "blocks of w: expected every one of 24 elements exactly once, got an overlap. "
            "Make the plan again with `shardwright plan`.",
        ),
        (
            [_part((0, 0), (4, 6)), _part((0, 0), (4, 6))],
            "blocks of w: expected each block once per rank, got one listed twice.",
        ),
        (
            [_part((0, 0), (4, 6), 2)],
            "blocks of w: expected ranks below 2, got rank 2.",
        ),
        (
            [_part((0, 0), (4, 6), -1)],
            "blocks of w: expected ranks below 2, got rank -1.",
        ),
        (
            [_part((0, 1), (4, 6))],
            "blocks of w: expected blocks inside (4, 6), got offsets (0, 1), sizes (4, 6).",
        ),
        (
            [_part((-1, 0), (4, 6))],
            "blocks of w: expected blocks inside (4, 6), got offsets (-1, 0), sizes (4, 6).",
        ),
        (
            [*WHOLE, _part((0, 0), (0, 6))],
            "blocks of w: expected blocks inside (4, 6), got offsets (0, 0), sizes (0, 6).",
        ),
        (
            [_part((0, 0), (2,)), _part((2, 0), (2, 6))],
            "blocks of w: expected blocks inside (4, 6), got offsets (0, 0), sizes (2,).",
        ),
        (
            [_part((0,), (12,)), _part((2, 0), (2, 6))],
            "blocks of w: expected blocks inside (24,), got offsets (2, 0), sizes (2, 6).",
        ),
        (
            [*WHOLE, Block("v", "parameter", (0,), (1,), 0)],
            "blocks: expected only tensors of the model, got 'v'.",
        ),
    ],
)
def test_blocks_that_do_not_tile_are_refused(blocks: list[Block], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_tiling(blocks, [W], 2)
    assert str(caught.value) == message


@given(st.data())
def test_a_tiling_with_one_block_moved_is_refused(data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 20))
    cut = data.draw(st.integers(1, rows - 1))
    by = data.draw(st.integers(1, cut))
    tensor = TensorSpec("w", (rows, 4))
    blocks = [_part((0, 0), (cut, 4)), _part((cut, 0), (rows - cut, 4), 1)]
    check_tiling(blocks, [tensor], 2)
    blocks[1] = _part((cut - by, 0), (rows - cut, 4), 1)
    with pytest.raises(InputError, match=r"every one of .* elements exactly once"):
        check_tiling(blocks, [tensor], 2)


def test_a_block_counts_its_elements() -> None:
    assert _part((0, 0), (4, 6)).numel == 24
    assert Block("scalar", "parameter", (), (), 0).numel == 1
