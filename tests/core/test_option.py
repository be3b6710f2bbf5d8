from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.block import Block
from shardwright.core.model import TableSpec
from shardwright.core.option import (
    Option,
    ShardRun,
    ShardShape,
    column_width,
    column_widths,
    place,
    row_runs,
    shard_runs,
)
from shardwright.core.sharding import ShardingType

TYPES: tuple[ShardingType, ...] = get_args(ShardingType)


def _shapes(runs: tuple[ShardRun, ...]) -> list[ShardShape]:
    return [shape for run in runs for shape in run.shapes()]


def test_a_run_is_its_rectangles_one_step_apart() -> None:
    run = ShardRun(2, 4, 3, row=1, column=8, row_step=2, column_step=0)
    assert list(run.shapes()) == [ShardShape(row, 8, 2, 4) for row in (1, 3, 5)]


def test_five_rows_on_four_ranks_are_cut_into_two_two_one_and_none() -> None:
    shards = _shapes(row_runs(5, 8, 4))
    assert [(s.row, s.rows) for s in shards] == [(0, 2), (2, 2), (4, 1), (5, 0)]


@given(st.integers(1, 10_000), st.integers(1, 600))
def test_row_shards_follow_one_another_in_ceiling_chunks(rows: int, parts: int) -> None:
    shards = _shapes(row_runs(rows, 4, parts))
    assert len(shards) == parts
    end = 0
    for shard in shards:
        assert shard.row == end
        end += shard.rows
    assert end == rows
    sizes = [shard.rows for shard in shards]
    assert sizes == sorted(sizes, reverse=True)
    assert (max(sizes) - 1) * parts < rows


@given(st.integers(1, 2**40), st.integers(1, 10**6))
def test_a_cut_by_rows_is_shown_in_three_runs_at_most(rows: int, parts: int) -> None:
    runs = row_runs(rows, 4, parts)
    assert len(runs) <= 3
    assert sum(run.count for run in runs) == parts
    assert sum(run.count * run.rows for run in runs) == rows


@pytest.mark.parametrize(
    ("dim", "least", "width"),
    [
        (16, 8, 8),
        (16, 4, 4),
        (16, 5, 8),
        (16, 16, 16),
        (16, 99, 16),  # wider than the table: not cut
        (24, 12, 12),
        (4, 4, 4),  # too narrow to cut
        (6, 4, 6),  # no divisor is a multiple of 4
        (20, 4, 4),
        (20, 10, 20),
        (128, 32, 32),
        (192, 128, 192),  # none from 128 to 191
        (256, 128, 128),
        (8, 0, 4),
    ],
)
def test_column_shards_have_the_narrowest_allowed_width(dim: int, least: int, width: int) -> None:
    assert column_width(TableSpec("t", 3, dim), least) == width


@given(st.integers(1, 200), st.integers(0, 200))
def test_a_column_width_divides_the_table_and_is_wide_enough(dim: int, least: int) -> None:
    width = column_width(TableSpec("t", 3, dim), least)
    assert dim % width == 0
    assert width >= min(least, dim)
    assert width % 4 == 0 or width == dim


@pytest.mark.parametrize(
    ("dim", "least", "widths"),
    [
        (64, None, (32, 16, 8, 4)),
        (64, 0, (32, 16, 8, 4)),
        (64, 16, (32, 16)),
        (64, 64, ()),
        (4, None, ()),
        (6, None, ()),
        (24, None, (12, 8, 4)),  # 6 is no multiple of 4
        (100, None, (20, 4)),
        (200, None, (100, 40, 20, 8, 4)),
        (200, 30, (100, 40)),
        (65_536, 16_384, (32_768, 16_384)),
    ],
)
def test_a_table_is_cut_evenly_into_multiples_of_four_columns(
    dim: int, least: int | None, widths: tuple[int, ...]
) -> None:
    assert column_widths(TableSpec("t", 3, dim, min_partition=least)) == widths


@given(st.integers(1, 3000), st.integers(0, 200))
def test_no_width_of_an_even_cut_is_left_out(dim: int, least: int) -> None:
    narrowest = max(least, 4)
    wanted = [w for w in range(dim - 1, narrowest - 1, -1) if dim % w == 0 and w % 4 == 0]
    assert column_widths(TableSpec("t", 3, dim, min_partition=least)) == tuple(wanted)


@pytest.mark.parametrize(
    ("kind", "shards"),
    [
        ("data_parallel", [(0, 0, 5, 8)] * 4),
        ("table_wise", [(0, 0, 5, 8)]),
        ("row_wise", [(0, 0, 2, 8), (2, 0, 2, 8), (4, 0, 1, 8), (5, 0, 0, 8)]),
        ("column_wise", [(0, 0, 5, 4), (0, 4, 5, 4)]),
        ("table_row_wise", [(0, 0, 3, 8), (3, 0, 2, 8)]),
        ("table_column_wise", [(0, 0, 5, 4), (0, 4, 5, 4)]),
        ("grid_shard", [(0, 0, 3, 4), (3, 0, 2, 4), (0, 4, 3, 4), (3, 4, 2, 4)]),
    ],
)
def test_a_sharding_type_has_its_shards(
    kind: ShardingType, shards: list[tuple[int, int, int, int]]
) -> None:
    option = Option("t", kind, "fused", shard_runs(TableSpec("t", 5, 8), kind, 4, 2, 4))
    assert option.shards == tuple(ShardShape(*s) for s in shards)
    assert option.count == len(shards)


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_says_which_ranks_its_shards_may_go_to(kind: ShardingType) -> None:
    option = Option("t", kind, "fused", shard_runs(TableSpec("t", 5, 8), kind, 4, 2, 4))
    assert {"uniform": 4, "host": 2}.get(option.partition, option.count) == option.count


@pytest.mark.parametrize("kind", ["data_parallel", "row_wise"])
def test_an_option_is_as_short_on_a_million_ranks_as_on_two(kind: ShardingType) -> None:
    assert len(shard_runs(TableSpec("t", 10**9, 8), kind, 10**6, 8, 8)) <= 3


def test_a_width_that_does_not_divide_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        shard_runs(TableSpec("t", 5, 8), "column_wise", 3, 3, 3)


def test_empty_shards_have_no_block() -> None:
    table = TableSpec("t", 1, 8, fqn="tables.t.weight")
    option = Option("t", "row_wise", "fused", shard_runs(table, "row_wise", 3, 3, 8))
    assert place(option, (0, 1, 2), table) == (
        Block("tables.t.weight", "parameter", (0, 0), (1, 8), 0),
    )


def test_two_column_shards_may_lie_on_one_rank() -> None:
    table = TableSpec("t", 3, 8)
    option = Option("t", "column_wise", "fused", shard_runs(table, "column_wise", 2, 2, 4))
    assert [(b.offsets, b.rank) for b in place(option, (1, 1), table)] == [((0, 0), 1), ((0, 4), 1)]


def test_every_shard_needs_a_rank() -> None:
    table = TableSpec("t", 3, 8)
    option = Option("t", "table_wise", "fused", shard_runs(table, "table_wise", 2, 2, 8))
    with pytest.raises(ValueError, match="zip"):
        place(option, (0, 1), table)


@given(
    kind=st.sampled_from(TYPES),
    rows=st.integers(1, 60),
    blocks=st.sampled_from([1, 2, 4, 8]),
    hosts=st.integers(1, 4),
)
def test_blocks_of_columns_are_cut_alike(
    kind: ShardingType, rows: int, blocks: int, hosts: int
) -> None:
    table = TableSpec("t", rows, 32)
    option = Option("t", kind, "fused", shard_runs(table, kind, hosts * 4, 4, 32 // blocks))
    runs, times = option.column_block
    assert option.count == len(option.shards)
    assert [(r.rows, r.columns, r.count) for r in runs] * times == [
        (r.rows, r.columns, r.count) for r in option.runs
    ]
