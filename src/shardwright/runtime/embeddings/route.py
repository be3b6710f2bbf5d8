"""From blocks to a route: which rank holds which piece of which table, and where in its store.

A *piece* is a column range of a feature's table; its rows are cut into parts at any places. Pieces
whose rows are kept and updated alike (``GroupKey``) form a group: on every rank its rows lie in
one tensor, and a requester computes an id's row in it, so ids travel as row numbers and need no
further bookkeeping. Pieces with a single part are *fixed*: all their ids go to one rank. They come
first in a group, in the order of owners, so that only the others have to be sorted. Pure
arithmetic; every rank computes the same route.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.block import Block, GroupKey, counted_dim
from shardwright.core.errors import InputError
from shardwright.core.model import DENSE, ON_DISK
from shardwright.core.optimizers import BY_ROW
from shardwright.core.recording import Pooling
from shardwright.core.sharding import traits
from shardwright.job.plan import TablePlan


@dataclass(frozen=True, slots=True)
class Table:
    """What is looked up in a table, and how its rows are kept and learn.

    A bag of one of its features is pooled to one row, or with ``none`` is a row for each id. Where
    it is ``replicated`` every rank has all of it, and learns from a dense gradient or ``by_rows``,
    those that ranks looked up. ``cache`` are bytes of memory for each of its blocks, by offsets,
    where its rows lie on disk. With ``dedup`` a row travels once to a rank that asks for it several
    times, where every id gets a row of its own.
    """

    fqn: str
    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    optimizer: str = "sgd"
    pooling: Pooling = "sum"
    dtype: str = "fp32"
    output_dtype: str = "fp32"
    replicated: bool = False
    by_rows: bool = False
    cache: Mapping[tuple[int, ...], int] | None = None
    dedup: bool = False

    @staticmethod
    def of(planned: TablePlan) -> Table:
        """A table with one feature of its own name."""
        return Table(
            planned.fqn,
            planned.name,
            planned.rows,
            planned.dim,
            (planned.name,),
            planned.optimizer,
            replicated=traits(planned.sharding_type).replicated,
            by_rows=is_by_rows(planned),
            cache=cache_of(planned),
            dedup=planned.dedup is True,
        )


def is_by_rows(planned: TablePlan) -> bool:
    """Whether every rank has all of it and rows are exchanged: its kernel is not the dense one."""
    return traits(planned.sharding_type).replicated and planned.compute_kernel != DENSE


def cache_of(planned: TablePlan) -> dict[tuple[int, ...], int] | None:
    """Bytes of memory of every block of a table on disk, by its offsets."""
    if planned.compute_kernel != ON_DISK:
        return None
    return {
        (shape.row, shape.column): (shard.hbm | shard.ddr).get("cache", 0)
        for shard in planned.shards
        for shape in shard.run.shapes()
    }


@dataclass(frozen=True, slots=True)
class TablePiece:
    """Columns ``column : column + width`` of feature ``feature``, whose table has ``rows``; part k
    has those from ``starts[k]`` on."""

    feature: int
    column: int
    width: int
    rows: int
    starts: tuple[int, ...]
    owners: tuple[int, ...]
    bases: tuple[int, ...]  # the first row of each part in its owner's group tensor


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block on one rank: ``rows`` rows of its group's tensor from ``base``; of one on disk,
    ``cache`` bytes are for rows in memory."""

    block: Block
    base: int
    cache: int = 0

    @property
    def rows(self) -> int:
        """Rows of the block."""
        return self.block.sizes[0]


@dataclass(frozen=True, slots=True)
class TableGroup:
    """All pieces kept alike, the ``fixed`` ones first, and what each rank holds of them."""

    key: GroupKey
    fixed: int
    pieces: tuple[TablePiece, ...]
    held: dict[int, tuple[HeldBlock, ...]]


@dataclass(frozen=True, slots=True)
class Strip:
    """``rows`` of a table from ``row`` on, whose columns lie in several blocks and whose updates
    need sums over all of these: ``members`` are (rank, group, first row in the group's tensor)."""

    fqn: str
    row: int
    rows: int
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Route:
    """Groups whose ids travel, groups of what every rank replicates, and strips of the former."""

    groups: tuple[TableGroup, ...]
    replicas: tuple[TableGroup, ...]
    strips: tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class _Columns:
    """A column range of a table: its blocks in the order of rows."""

    table: Table
    features: tuple[int, ...]
    blocks: tuple[Block, ...]


def make_route(tables: Sequence[Table], blocks: Iterable[Block], world_size: int) -> Route:
    """The route of ``tables`` from a plan's parameter blocks; features count through the tables.

    InputError where the blocks of a table are not column ranges, each cut into row ranges.
    """
    by_table: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        if block.role == "parameter":
            by_table[block.tensor].append(block)
    routed: dict[GroupKey, list[_Columns]] = defaultdict(list)
    replicated: dict[GroupKey, list[_Columns]] = defaultdict(list)
    first = 0
    for table in tables:
        features = tuple(range(first, first + len(table.features)))
        first += len(features)
        own = by_table[table.fqn]
        members = replicated if table.replicated else routed
        for part in [own[:1]] if table.replicated else _column_ranges(table, own):
            members[_key(table, part[0].sizes[1])].append(_Columns(table, features, tuple(part)))
    groups = tuple(_group(key, routed[key], world_size) for key in sorted(routed))
    # Sorted, as ranks exchange groups in this order: all have to come to the same one.
    return Route(
        groups,
        tuple(_group(key, replicated[key], world_size) for key in sorted(replicated)),
        tuple(_strips([t for t in tables if t.optimizer in BY_ROW], groups)),
    )


def _key(table: Table, width: int) -> GroupKey:
    return GroupKey(
        width,
        table.optimizer,
        table.dtype,
        counted_dim(table.dim, width, table.optimizer),
        on_disk=table.cache is not None,
        by_rows=table.by_rows,
        dedup=table.dedup and not table.replicated,
    )


def _column_ranges(table: Table, blocks: list[Block]) -> list[list[Block]]:
    columns: dict[tuple[int, int], list[Block]] = defaultdict(list)
    # By place, and not in the plan's order: parts of a column range have to follow each other.
    for block in sorted(blocks, key=lambda block: (block.offsets, block.rank)):
        columns[block.offsets[1], block.sizes[1]].append(block)
    at = 0
    for column, width in sorted(columns):
        row = 0
        for block in columns[column, width]:
            _check(table, row == block.offsets[0] and column == at, block)
            row += block.sizes[0]
        _check(table, row == table.rows, columns[column, width][-1])
        at += width
    return [columns[key] for key in sorted(columns)]


def _check(table: Table, follows: bool, block: Block) -> None:
    if not follows:
        wanted = "column ranges side by side, each cut into row ranges that follow each other"
        found = f"{block.sizes[0]} x {block.sizes[1]} at {block.offsets} on rank {block.rank}"
        remedy = "Cut its columns first, and each column range by rows."
        raise InputError(f"blocks of {table.fqn}", wanted, found, remedy)


def _group(key: GroupKey, members: list[_Columns], world_size: int) -> TableGroup:
    whole = [member for member in members if len(member.blocks) == 1]
    # By owner, so that ids of whole pieces lie in the order in which they travel and are never
    # sorted.
    whole.sort(key=lambda member: member.blocks[0].rank)
    cut = [member for member in members if len(member.blocks) > 1]
    filled = [0] * world_size
    held: dict[int, list[HeldBlock]] = {rank: [] for rank in range(world_size)}
    pieces: list[TablePiece] = []
    for member in (*whole, *cut):
        bases = []
        for block in member.blocks:
            bases.append(filled[block.rank])
            # A replica is on every rank at the same place, so that one request fits them all.
            for rank in range(world_size) if member.table.replicated else (block.rank,):
                cache = (member.table.cache or {}).get(block.offsets, 0)
                held[rank].append(HeldBlock(block, filled[rank], cache))
                filled[rank] += block.sizes[0]
        starts = tuple(block.offsets[0] for block in member.blocks)
        # Ids of replicas go nowhere: each rank is the only owner of its own.
        owners = tuple(0 if member.table.replicated else block.rank for block in member.blocks)
        column = member.blocks[0].offsets[1]
        # Features of one table share its rows, and are pieces of their own only for their ids.
        pieces.extend(
            TablePiece(feature, column, key.width, member.table.rows, starts, owners, tuple(bases))
            for feature in member.features
        )
    kept = {rank: tuple(items) for rank, items in held.items()}
    return TableGroup(key, sum(len(piece.owners) == 1 for piece in pieces), tuple(pieces), kept)


def _strips(tables: Sequence[Table], groups: Sequence[TableGroup]) -> Iterable[Strip]:
    """The rows of each table between any two of its row cuts, where its columns are cut."""
    for table in tables:
        own = [
            (rank, number, held)
            for number, group in enumerate(groups)
            for rank, items in group.held.items()
            for held in items
            if held.block.tensor == table.fqn
        ]
        # Whole rows have all columns here: a mean over them needs no other rank.
        if all(held.block.sizes[1] == table.dim for _, _, held in own):
            continue
        own.sort(key=lambda member: member[2].block.offsets[1])
        # Column ranges may be cut by rows at different places. Between two neighbouring cuts the
        # same ranks have columns, so their sums lie in the same order.
        cuts = sorted({held.block.offsets[0] for _, _, held in own} | {table.rows})
        for low, high in itertools.pairwise(cuts):
            members = [
                (rank, number, held.base + low - held.block.offsets[0])
                for rank, number, held in own
                if held.block.offsets[0] <= low < held.block.offsets[0] + held.rows
            ]
            yield Strip(table.fqn, low, high - low, tuple(members))
