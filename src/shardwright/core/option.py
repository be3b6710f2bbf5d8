"""A way to shard one table, before it is decided which ranks get the shards."""

from __future__ import annotations

import itertools

import msgspec

from shardwright.core.amount import ceil_div
from shardwright.core.block import Block
from shardwright.core.model import ShardingType, TableSpec

DEFAULT_MIN_PARTITION = 4  # columns; the narrowest column shard tried when a job names none


class ShardShape(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of the table: first row, first column, rows, columns. Rows may be 0."""

    row: int
    column: int
    rows: int
    columns: int


class Option(msgspec.Struct, frozen=True):
    """A table, a sharding type, a compute kernel, and the shards in order."""

    table: str
    sharding_type: ShardingType
    compute_kernel: str
    shards: tuple[ShardShape, ...]


def shard_shapes(
    table: TableSpec, sharding_type: ShardingType, world_size: int
) -> tuple[ShardShape, ...]:
    """The shards of ``table`` under ``sharding_type``; row cuts are ceiling chunks."""
    match sharding_type:
        case "data_parallel":
            return (ShardShape(0, 0, table.rows, table.dim),) * world_size
        case "table_wise":
            return (ShardShape(0, 0, table.rows, table.dim),)
        case "row_wise":
            return row_shards(table.rows, table.dim, world_size)
        case "column_wise":
            width = column_width(table)
            return tuple(ShardShape(0, c, table.rows, width) for c in range(0, table.dim, width))
        case _:
            raise AssertionError(f"no shard shapes for {sharding_type}")


def row_shards(rows: int, columns: int, parts: int) -> tuple[ShardShape, ...]:
    """``parts`` row shards of ``ceil(rows / parts)`` rows; the last ones hold less or nothing."""
    chunk = ceil_div(rows, parts)
    starts = [min(k * chunk, rows) for k in range(parts + 1)]
    return tuple(
        ShardShape(start, 0, stop - start, columns) for start, stop in itertools.pairwise(starts)
    )


def column_width(table: TableSpec) -> int:
    """The narrowest width of at least ``min_partition`` columns that divides ``dim`` and 4."""
    floor = table.min_partition or max(DEFAULT_MIN_PARTITION, table.dim // 2)
    widths = (w for w in range(floor, table.dim) if table.dim % w == 0 and w % 4 == 0)
    return next(widths, table.dim)


def place(option: Option, ranks: tuple[int, ...], table: TableSpec) -> tuple[Block, ...]:
    """The parameter blocks of an option whose shard *k* goes to ``ranks[k]``."""
    return tuple(
        Block(table.tensor.fqn, "parameter", (s.row, s.column), (s.rows, s.columns), rank)
        for s, rank in zip(option.shards, ranks, strict=True)
        if s.rows * s.columns
    )
