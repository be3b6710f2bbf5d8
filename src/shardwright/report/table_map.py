"""Which rank holds which part of each table, as inline SVG: blocks where they lie inside a table,
rank beside rank."""

from __future__ import annotations

from shardwright.core.block import Block, BlockRun
from shardwright.core.block import decode as blocks_of
from shardwright.core.quantities import counted, format_bytes
from shardwright.core.sharding import TYPES
from shardwright.job.plan import Plan, TablePlan
from shardwright.report.marks import (
    HELD,
    NARROW,
    WIDTH,
    box,
    chart,
    element,
    label,
    legend,
    line,
    text_width,
)
from shardwright.report.plan_sheets import table_bytes
from shardwright.report.wording import percent, printable, shortened

MOST_TABLES = 60
MOST_MAPPED = 64
_ROW, _CELL = 24, 18
_NAME, _TYPE, _BYTES = 18, 112, 74
_GAP = 26  # after names, some of which are wider than they are counted
_TOP = 26


def sharding_map(plan: Plan, width: float = WIDTH) -> str:
    """Tables as rows by size, ranks as columns; a cell is the table, filled where the rank has it.

    The rows of a table run downwards in its cell and the columns across, so a row-wise shard is a
    horizontal band and a column-wise shard a vertical one. On a telephone types are colours alone,
    and bytes stand in the table below.
    """
    tables = sorted(plan.tables, key=lambda table: (-table.rows * table.dim, table.name))
    shown, ranks = tables[:MOST_TABLES], min(plan.world_size, MOST_MAPPED)
    if not shown:
        return ""
    names = [shortened(printable(table.name), _NAME) for table in shown]
    told = width > NARROW
    left = max(*map(text_width, names), text_width("table  rank")) + _GAP
    left += _TYPE + _BYTES if told else 0
    pitch = min((width - left) / ranks, 160)
    by_tensor = _parameter_runs(plan)
    parts = [_header(left, pitch, ranks, told)]
    for k, (table, name) in enumerate(zip(shown, names, strict=True)):
        y = _TOP + k * _ROW
        parts.append(label(0, y + 13, name))
        parts.append(_row_labels(table, y, left) if told else "")
        blocks = [b for b in blocks_of(by_tensor.get(table.fqn, ())) if b.rank < ranks]
        parts.extend(_cell(table, r, left + r * pitch, y, pitch, blocks) for r in range(ranks))
    bottom = _TOP + len(shown) * _ROW + 10
    used = {table.sharding_type for table in tables}
    swatches, height = legend(
        [(t, i) for i, t in enumerate(TYPES) if t in used], bottom, "map", HELD, width
    )
    return chart(
        "map",
        "Which rank holds which part of each table",
        _map_words(plan, len(shown), ranks),
        (width, bottom + height),
        (*parts, swatches),
        HELD,
    )


def _parameter_runs(plan: Plan) -> dict[str, list[BlockRun]]:
    runs: dict[str, list[BlockRun]] = {}
    for run in plan.blocks:
        rectangle = len(run.offsets) == len(run.sizes) == 2
        # A report also draws plans that check_tiling would refuse: what is no rectangle is left
        # out.
        even = run.count == 1 or (len(run.step) == 2 and run.count <= plan.world_size)
        if run.role == "parameter" and rectangle and even:
            runs.setdefault(run.tensor, []).append(run)
    return runs


def _header(left: float, pitch: float, ranks: int, told: bool) -> str:
    every = next(n for n in (1, 2, 4, 8, 16, 64) if n * pitch >= 26)
    short = pitch < 52
    parts = [label(0, 14, "table", faint=True)]
    beside = "rank" if short else "size" if told else ""
    parts.append(label(left - 14, 14, beside, "end", faint=True))
    for rank in range(0, ranks, every):
        words = str(rank) if short else f"rank {rank}"
        parts.append(label(left + rank * pitch, 14, words, bold=True))
    parts.append(line(0, 20, left + ranks * pitch, 20))
    return "".join(parts)


def _row_labels(table: TablePlan, y: float, left: float) -> str:
    kind = label(left - _BYTES - _TYPE, y + 13, table.sharding_type, faint=True)
    size = label(left - 14, y + 13, format_bytes(table_bytes(table)), "end", faint=True)
    return kind + size


def _cell(
    table: TablePlan, rank: int, x: float, y: float, pitch: float, blocks: list[Block]
) -> str:
    """The table's outline, and inside it the blocks of ``rank``."""
    width = max(pitch - (8 if pitch > 20 else 1), 1)
    outline = element(
        "rect",
        {
            "x": x,
            "y": y,
            "width": width,
            "height": _CELL,
            "fill": "none",
            "stroke": "currentColor",
            "stroke-opacity": 0.22,
        },
    )
    held = [b for b in blocks if b.rank == rank and table.rows > 0 and table.dim > 0]
    return outline + "".join(_block(table, b, x, y, width) for b in held)


def _block(table: TablePlan, block: Block, x: float, y: float, width: float) -> str:
    (row, column), (rows, columns) = block.offsets, block.sizes
    place = (
        x + width * _part(column, table.dim),
        y + _CELL * _part(row, table.rows),
        max(width * _part(columns, table.dim), 0.8),
        max(_CELL * _part(rows, table.rows), 0.8),
    )
    share = _part(rows, table.rows) * _part(columns, table.dim)
    where = f"rows {row:,} to {row + rows - 1:,}, columns {column:,} to {column + columns - 1:,}"
    tip = f"{table.name} on rank {block.rank}, {table.sharding_type}: {where}, {percent(share)}"
    return box(place, TYPES.index(table.sharding_type), "map", HELD, tip)


def _part(part: int, whole: int) -> float:
    return min(max(part / whole, 0.0), 1.0)


def _map_words(plan: Plan, tables: int, ranks: int) -> str:
    counts: dict[str, int] = {}
    for table in plan.tables:
        counts[table.sharding_type] = counts.get(table.sharding_type, 0) + 1
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    text = f"{counted(len(plan.tables), 'table')} on {counted(plan.world_size, 'rank')}: {kinds}."
    if tables < len(plan.tables):
        text += f" The {tables} largest are drawn."
    if ranks < plan.world_size:
        text += f" The first {ranks} ranks are drawn."
    return text
