from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.block import Block
from shardwright.core.model import ShardingType, TableSpec
from shardwright.core.option import (
    Option,
    ShardShape,
    column_width,
    place,
    row_shards,
    shard_shapes,
)


def test_five_rows_on_four_ranks_are_cut_into_two_two_one_and_none() -> None:
    shards = row_shards(5, 8, 4)
    assert [(s.row, s.rows) for s in shards] == [(0, 2), (2, 2), (4, 1), (5, 0)]


@given(st.integers(1, 10_000), st.integers(1, 600))
@settings(deadline=None)
def test_row_shards_follow_one_another_in_ceiling_chunks(rows: int, parts: int) -> None:
    shards = row_shards(rows, 4, parts)
    assert len(shards) == parts
    end = 0
    for shard in shards:
        assert shard.row == end
        end += shard.rows
    assert end == rows
    sizes = [shard.rows for shard in shards]
    assert sizes == sorted(sizes, reverse=True)
    assert (max(sizes) - 1) * parts < rows


@pytest.mark.parametrize(
    ("dim", "min_partition", "width"),
    [
        (16, 0, 8),  # half, where nothing is said
        (16, 4, 4),
        (16, 5, 8),
        (16, 16, 16),
        (24, 0, 12),
        (4, 0, 4),  # too narrow to cut
        (6, 0, 6),  # no divisor is a multiple of 4
        (20, 4, 4),
        (20, 0, 20),
        (128, 32, 32),
    ],
)
def test_column_shards_have_the_narrowest_allowed_width(
    dim: int, min_partition: int, width: int
) -> None:
    assert column_width(TableSpec("t", 3, dim, min_partition=min_partition)) == width


@given(st.integers(1, 200), st.integers(0, 200))
@settings(deadline=None)
def test_a_column_width_divides_the_table_and_is_wide_enough(dim: int, floor: int) -> None:
    width = column_width(TableSpec("t", 3, dim, min_partition=min(floor, dim)))
    assert dim % width == 0
    assert width >= min(floor, dim)
    assert width % 4 == 0 or width == dim


@pytest.mark.parametrize(
    ("kind", "shards"),
    [
        ("data_parallel", [(0, 0, 5, 8)] * 3),
        ("table_wise", [(0, 0, 5, 8)]),
        ("row_wise", [(0, 0, 2, 8), (2, 0, 2, 8), (4, 0, 1, 8)]),
        ("column_wise", [(0, 0, 5, 4), (0, 4, 5, 4)]),
    ],
)
def test_a_sharding_type_has_its_shards(
    kind: ShardingType, shards: list[tuple[int, int, int, int]]
) -> None:
    assert shard_shapes(TableSpec("t", 5, 8), kind, 3) == tuple(ShardShape(*s) for s in shards)


def test_a_type_without_shards_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="grid_shard"):
        shard_shapes(TableSpec("t", 5, 8), "grid_shard", 3)


def test_empty_shards_have_no_block() -> None:
    table = TableSpec("t", 1, 8, fqn="tables.t.weight")
    option = Option("t", "row_wise", "fused", shard_shapes(table, "row_wise", 3))
    assert place(option, (0, 1, 2), table) == (
        Block("tables.t.weight", "parameter", (0, 0), (1, 8), 0),
    )


def test_two_column_shards_may_lie_on_one_rank() -> None:
    table = TableSpec("t", 3, 8)
    option = Option("t", "column_wise", "fused", shard_shapes(table, "column_wise", 2))
    assert [(b.offsets, b.rank) for b in place(option, (1, 1), table)] == [((0, 0), 1), ((0, 4), 1)]


def test_every_shard_needs_a_rank() -> None:
    table = TableSpec("t", 3, 8)
    option = Option("t", "table_wise", "fused", shard_shapes(table, "table_wise", 2))
    with pytest.raises(ValueError, match="zip"):
        place(option, (0, 1), table)
