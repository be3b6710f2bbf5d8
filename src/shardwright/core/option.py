"""A way to shard one table, before it is decided which ranks get the shards.

Every sharding type becomes rectangles here. Those that are alike are kept together as a
:class:`ShardRun`, so an option costs the same to describe on 8 ranks and on 8,000.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from shardwright.core.block import MAX_RUN, Block
from shardwright.core.model import TableSpec
from shardwright.core.sharding import Partition, ShardingType, Traits, traits

DEFAULT_MIN_PARTITION = 4  # columns; the narrowest column shard tried when a job names none


class ShardShape(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of the table: first row, first column, rows, columns. Rows may be 0."""

    row: int
    column: int
    rows: int
    columns: int


class ShardRun(msgspec.Struct, frozen=True, array_like=True):
    """``count`` rectangles of ``rows`` x ``columns``, the first at (``row``, ``column``), each
    next one ``row_step`` rows and ``column_step`` columns further on."""

    rows: int
    columns: int
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_RUN)] = 1
    row: int = 0
    column: int = 0
    row_step: int = 0
    column_step: int = 0

    def shapes(self) -> Iterator[ShardShape]:
        """The rectangles in order."""
        for k in range(self.count):
            row, column = self.row + k * self.row_step, self.column + k * self.column_step
            yield ShardShape(row, column, self.rows, self.columns)


class Option(msgspec.Struct, frozen=True):
    """A table, a sharding type, a compute kernel, and the shards in order."""

    table: str
    sharding_type: ShardingType
    compute_kernel: str
    runs: tuple[ShardRun, ...]

    @property
    def traits(self) -> Traits:
        """What its sharding type does."""
        return traits(self.sharding_type)

    @property
    def partition(self) -> Partition:
        """Which ranks the shards may go to."""
        return self.traits.partition

    @property
    def count(self) -> int:
        """Number of shards."""
        runs, times = self.column_block
        return sum(run.count for run in runs) * times

    @property
    def column_block(self) -> tuple[tuple[ShardRun, ...], int]:
        """The runs of one block of columns, and how many blocks of a grid are cut like it."""
        if self.partition != "multi_host":
            return self.runs, 1
        last = self.runs[-1]
        blocks = last.column // last.columns + 1
        return self.runs[: len(self.runs) // blocks], blocks

    @property
    def shards(self) -> tuple[ShardShape, ...]:
        """Every shard, one by one."""
        return tuple(shape for run in self.runs for shape in run.shapes())


# Which rank gets which shard is not said here: that is the search's. Shards of no rows stay in the
# list where a type fixes rank by rank, so that shard k is rank k's.
def shard_runs(
    table: TableSpec, sharding_type: ShardingType, world_size: int, group: int, width: int
) -> tuple[ShardRun, ...]:
    """The shards of ``table``: row cuts are ceiling chunks over all ranks, or over the ``group``
    ranks of a host; column cuts are ``width`` wide, which must divide ``dim``."""
    rows, dim = table.rows, table.dim
    assert dim % width == 0
    kind = traits(sharding_type)
    if kind.replicated:
        return (ShardRun(rows, dim, world_size),)
    if not kind.cuts_columns:
        width = dim
    if not kind.cuts_rows:
        step = width if kind.cuts_columns else 0
        return (ShardRun(rows, width, dim // width, column_step=step),)
    own = row_runs(rows, width, kind.row_parts(world_size, group))
    return tuple(
        ShardRun(run.rows, width, run.count, run.row, column, run.row_step)
        for column in range(0, dim, width)
        for run in own
    )


def row_runs(rows: int, columns: int, parts: int) -> tuple[ShardRun, ...]:
    """``parts`` row shards of ``ceil(rows / parts)`` rows; the last ones hold less or nothing."""
    # Ceiling chunks as torch.chunk and TorchRec cut: even shards would put other rows on other
    # ranks than the runtime that carries the plan out.
    chunk = -(-rows // parts)
    full = rows // chunk
    runs = [ShardRun(chunk, columns, full, 0, 0, chunk if full > 1 else 0)]
    if rest := rows - full * chunk:
        runs.append(ShardRun(rest, columns, 1, full * chunk))
    # Shards of no rows are kept: a type that fixes rank by rank counts shards by rank.
    empty = parts - full - bool(rest)
    if empty:
        runs.append(ShardRun(0, columns, empty, rows))
    return tuple(runs)


def column_width(table: TableSpec, least: int) -> int:
    """The narrowest width of at least ``least`` columns that divides ``dim`` and 4, or ``dim``."""
    widths = (w for w in range(max(least, 1), table.dim) if table.dim % w == 0 and w % 4 == 0)
    return next(widths, table.dim)


def column_widths(table: TableSpec) -> tuple[int, ...]:
    """Every width of equal column shards, widest first: it divides ``dim``, is a multiple of 4 and
    at least ``min_partition``."""
    least = table.min_partition or DEFAULT_MIN_PARTITION
    divisors = [d for d in range(1, math.isqrt(table.dim) + 1) if table.dim % d == 0]
    widths = {table.dim // d for d in divisors} | set(divisors)
    cuts = (w for w in widths if w % 4 == 0 and least <= w < table.dim)
    return tuple(sorted(cuts, reverse=True))


def place(option: Option, ranks: Iterable[int], table: TableSpec) -> tuple[Block, ...]:
    """The parameter blocks of an option whose shard *k* goes to ``ranks[k]``."""
    return tuple(
        Block(table.tensor.fqn, "parameter", (s.row, s.column), (s.rows, s.columns), rank)
        for s, rank in zip(option.shards, ranks, strict=True)
        if s.rows * s.columns
    )
