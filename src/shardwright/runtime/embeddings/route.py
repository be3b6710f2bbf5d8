"""From blocks to a route: which rank holds which piece of which table, and where in its store.

A *piece* is a column range of a table. Its rows are cut into equal chunks, one part per chunk, so
the part of an id is ``id // chunk``. Pieces of equal width form a group: on every rank a group's
rows lie in one tensor, and a requester computes an id's row in it, so ids travel as row numbers
and need no further bookkeeping. Pieces with a single part are *fixed*: all their ids go to one
rank. They come first in a group, in the order of owners, so that only the others have to be sorted.
Pure arithmetic; every rank computes the same route.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.core.amount import ceil_div
from shardwright.core.block import Block
from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.plan import TablePlan
from shardwright.core.sharding import traits


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns ``column : column + width`` of feature ``feature``; part k starts at row k*chunk."""

    feature: int
    column: int
    width: int
    chunk: int
    owners: tuple[int, ...]
    bases: tuple[int, ...]  # the first row of each part in its owner's group tensor


@dataclass(frozen=True, slots=True)
class Held:
    """A block on one rank: ``rows`` rows of its group's tensor from ``base``."""

    block: Block
    feature: int
    base: int

    @property
    def rows(self) -> int:
        """Rows of the block."""
        return self.block.sizes[0]


@dataclass(frozen=True, slots=True)
class Group:
    """All pieces of one width, the ``fixed`` ones first, and what each rank holds of them."""

    width: int
    fixed: int
    pieces: tuple[Piece, ...]
    held: dict[int, tuple[Held, ...]]


@dataclass(frozen=True, slots=True)
class Route:
    """Groups of routed pieces by width, and the features whose tables every rank replicates."""

    groups: tuple[Group, ...]
    replicated: tuple[Held, ...]


def make_route(tables: tuple[TablePlan, ...], blocks: Iterable[Block], world_size: int) -> Route:
    """The route of ``tables`` (one feature each, in order) from a plan's parameter blocks."""
    by_table: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        if block.role == "parameter":
            by_table[block.tensor].append(block)
    replicated: list[Held] = []
    rows = 0
    pieces: list[tuple[int, TablePlan, list[Block]]] = []
    for feature, table in enumerate(tables):
        own = by_table[table.fqn]
        if traits(table.sharding_type).replicated:
            replicated.append(Held(own[0], feature, rows))
            rows += table.rows
        else:
            columns: dict[tuple[int, int], list[Block]] = defaultdict(list)
            for block in own:
                columns[block.offsets[1], block.sizes[1]].append(block)
            pieces.extend((feature, table, columns[key]) for key in sorted(columns))
    members: dict[int, list[tuple[int, TablePlan, list[Block]]]] = defaultdict(list)
    for piece in pieces:
        members[piece[2][0].sizes[1]].append(piece)
    groups = tuple(_group(width, members[width], world_size) for width in sorted(members))
    return Route(groups, tuple(replicated))


def _group(width: int, members: list[tuple[int, TablePlan, list[Block]]], world_size: int) -> Group:
    whole = [member for member in members if len(member[2]) == 1]
    whole.sort(key=lambda member: member[2][0].rank)
    members = whole + [member for member in members if len(member[2]) > 1]
    filled = [0] * world_size
    held: dict[int, list[Held]] = {rank: [] for rank in range(world_size)}
    pieces = []
    for feature, table, blocks in members:
        blocks = sorted(blocks, key=lambda block: block.offsets[0])
        chunk = blocks[0].sizes[0]
        bases = []
        for part, block in enumerate(blocks):
            _check_chunk(table, block, part, chunk)
            bases.append(filled[block.rank])
            held[block.rank].append(Held(block, feature, filled[block.rank]))
            filled[block.rank] += block.sizes[0]
        owners = tuple(block.rank for block in blocks)
        column = blocks[0].offsets[1]
        pieces.append(Piece(feature, column, width, chunk, owners, tuple(bases)))
    kept = {rank: tuple(items) for rank, items in held.items()}
    return Group(width, len(whole), tuple(pieces), kept)


def _check_chunk(table: TablePlan, block: Block, part: int, chunk: int) -> None:
    whole = block.sizes[0] == chunk or block.offsets[0] + block.sizes[0] == table.rows
    parts = ceil_div(table.rows, chunk)
    if block.offsets[0] != part * chunk or not whole or part >= parts:
        raise UnsupportedError(
            expected(
                f"blocks of {table.fqn}",
                f"row cuts at multiples of {chunk}",
                f"a cut at row {block.offsets[0]}",
                "This version runs even row cuts only.",
            )
        )
