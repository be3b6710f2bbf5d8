"""The report's charts as inline SVG: memory, sharding map, loss, step phases.

Each is a pure function from plans and measurements to one ``<svg>`` element, or to an empty text
where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from shardwright.core.block import Block, BlockRun
from shardwright.core.block import decode as blocks_of
from shardwright.core.measurement import Curve, Measurement, Quality
from shardwright.core.quantities import counted, exact_bytes, format_bytes, format_seconds
from shardwright.core.sharding import TYPES
from shardwright.core.timeline import (
    EXACT_KINDS,
    PHASES,
    EventRun,
    category,
    decode,
    phase_peaks,
    phase_seconds,
)
from shardwright.job.plan import Plan, TablePlan
from shardwright.report.marks import (
    HELD,
    LINE,
    MEMORY,
    SIDES,
    WIDTH,
    box,
    chart,
    element,
    label,
    legend,
    line,
    text_width,
    ticks,
    trace,
)
from shardwright.report.plan_sheets import budget_sentence, table_bytes
from shardwright.report.wording import percent, printable, shortened

PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((category(kind), (kind,)) for kind in EXACT_KINDS),
    ("gathered and exchanged", ("gathered_weight", "unreduced_gradient", "communication", "cache")),
    ("activations", ("activation", "temporary", "output")),
    ("batch and other", ()),
)
# Each has the colour of the first of its kinds.
_PART_FILLS = tuple(MEMORY.get((*kinds, "input")[0], MEMORY["other"]) for _, kinds in PARTS)
_PART_OF = {kind: part for part, kinds in PARTS for kind in kinds}
OTHER = PARTS[-1][0]
_SIDE_FILLS = tuple(SIDES.values())


@dataclass(frozen=True, slots=True)
class Peak:
    """A rank's fullest moment: bytes by part, every part of ``PARTS`` present."""

    rank: int
    phase: str
    parts: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Live bytes in all."""
        return sum(self.parts.values())


def parts_of(by_kind: Mapping[str, int]) -> dict[str, int]:
    """Bytes by kind gathered into the parts of ``PARTS``; unknown kinds count as other."""
    parts = {part: 0 for part, _ in PARTS}
    for kind, nbytes in by_kind.items():
        parts[_PART_OF.get(kind, OTHER)] += nbytes
    return parts


def predicted_peaks(plan: Plan) -> dict[int, Peak]:
    """Each rank's predicted peak; bytes that no kind accounts for count as other."""
    peaks: dict[int, Peak] = {}
    for totals in plan.ranks:
        parts = parts_of(totals.at_peak)
        # The bar must be as long as the peak that is written beside it, whatever kinds a plan
        # knows.
        parts[OTHER] += max(0, totals.peak_bytes - sum(parts.values()))
        peaks[totals.rank] = Peak(totals.rank, totals.peak_phase, parts)
    return peaks


def measured_peaks(measurement: Measurement) -> dict[int, Peak]:
    """Each rank's fullest phase as measured, set-up left out."""
    peaks: dict[int, Peak] = {}
    for (rank, phase), kinds in phase_peaks(decode(_steady(measurement.timeline))).items():
        peak = Peak(rank, phase, parts_of(kinds))
        if rank not in peaks or peak.nbytes > peaks[rank].nbytes:
            peaks[rank] = peak
    return peaks


def step_seconds(timeline: Iterable[EventRun]) -> dict[int, dict[str, float]]:
    """Seconds by rank and phase of one training step, set-up left out, phases in their order."""
    found = phase_seconds(decode(_steady(timeline)))
    ranks = sorted({rank for rank, _ in found})
    return {r: {p: found[r, p] for p in PHASES if (r, p) in found} for r in ranks}


def slowest(seconds: Mapping[int, Mapping[str, float]]) -> int | None:
    """The rank whose phases take longest in all; None without any."""
    return max(seconds, key=lambda rank: sum(seconds[rank].values()), default=None)


def _steady(timeline: Iterable[EventRun]) -> list[EventRun]:
    return [run for run in timeline if run.event.step != 0]


MOST_RANKS = 16
MOST_POINTS = 360
T = TypeVar("T")

_BAR = 17
_LEFT, _RIGHT = 132, 74
_FIGURE = 66  # the width of a figure such as 35.93 MiB, with its gap


def memory_chart(plan: Plan, measurement: Measurement | None = None) -> str:
    """Live bytes of each rank at its peak, stacked by kind, predicted above measured."""
    predicted = predicted_peaks(plan)
    measured = measured_peaks(measurement) if measurement else {}
    ranks = _fullest(predicted, measured)
    if not ranks:
        return ""
    budget = plan.budget
    highest = max(peak.nbytes for side in (predicted, measured) for peak in side.values())
    # A budget far above the peak would press all bars against the left edge.
    shown_budget = 0 < budget <= 4 * max(highest, 1)
    scale = (WIDTH - _LEFT - _RIGHT) / max(highest, budget if shown_budget else 0, 1)
    top = 24.0
    y = top
    parts: list[str] = []
    for rank in ranks:
        parts.append(label(0, y + 13, f"rank {rank}", bold=True))
        for side, peaks in (("predicted", predicted), ("measured", measured)):
            if rank in peaks:
                parts.append(_memory_bar(peaks[rank], side, y, scale, _LEFT + budget * scale))
                y += _BAR + 3
        y += 10
    bottom = y - 6
    grid = [_tick(_LEFT + t * scale, top, bottom, _round_bytes(t)) for t in _byte_ticks(scale)]
    if shown_budget:
        at = _LEFT + budget * scale
        parts.append(line(at, top - 6, at, bottom, "6 3", 1.5))
        parts.append(label(at, top - 11, f"budget {format_bytes(budget)}", "end", bold=True))
    used = {p for s in (predicted, measured) for k in ranks if k in s for p in s[k].parts}
    items = [(part, i) for i, (part, _) in enumerate(PARTS) if part in used]
    swatches, height = legend(items, bottom + 30, "memory", _PART_FILLS)
    return chart(
        "memory",
        "Memory per rank at the peak",
        _memory_words(ranks, predicted, measured, budget_sentence(plan)),
        bottom + 30 + height,
        (*grid, *parts, swatches),
        _PART_FILLS,
    )


def _byte_ticks(scale: float) -> list[float]:
    return ticks((WIDTH - _LEFT - _RIGHT) / scale, binary=True)


def _round_bytes(nbytes: float) -> str:
    return format_bytes(nbytes).replace(".00 ", " ")


def _fullest(predicted: Mapping[int, Peak], measured: Mapping[int, Peak]) -> list[int]:
    """The ranks to draw, in order: all, or the fullest of many."""
    best: dict[int, int] = {}
    for side in (predicted, measured):
        for rank, peak in side.items():
            best[rank] = max(best.get(rank, 0), peak.nbytes)
    return sorted(sorted(best, key=lambda rank: (-best[rank], rank))[:MOST_RANKS])


def _memory_bar(peak: Peak, side: str, y: float, scale: float, budget_line: float) -> str:
    """One bar; its figure steps aside where the budget line would run through it."""
    parts = [label(_LEFT - 8, y + 13, side, "end", faint=True)]
    x = float(_LEFT)
    for i, (part, _) in enumerate(PARTS):
        nbytes = peak.parts[part]
        if nbytes > 0:
            width = nbytes * scale
            tip = f"{side}, rank {peak.rank}: {part} {exact_bytes(nbytes)}"
            parts.append(box((x, y, width, _BAR), i, "memory", _PART_FILLS, tip))
            x += width
    end = budget_line if x < budget_line < x + _FIGURE else x
    parts.append(label(end + 6, y + 13, format_bytes(peak.nbytes)))
    return "".join(parts)


def _memory_words(
    ranks: Sequence[int], predicted: Mapping[int, Peak], measured: Mapping[int, Peak], budget: str
) -> str:
    said = []
    for rank in ranks:
        sides = [
            f"{side} {format_bytes(peaks[rank].nbytes)} in {printable(peaks[rank].phase)}"
            for side, peaks in (("predicted", predicted), ("measured", measured))
            if rank in peaks
        ]
        said.append(f"Rank {rank}: {', '.join(sides)}.")
    every = len({*predicted, *measured})
    if every > len(ranks):
        said.append(f"Of {every} ranks the {len(ranks)} with the highest peaks.")
    return f"{' '.join(said)} {budget}"


def _tick(x: float, top: float, bottom: float, words: str) -> str:
    return line(x, top, x, bottom) + label(x, bottom + 15, words, "middle", faint=True)


def phase_chart(plan: Plan, measurement: Measurement | None = None) -> str:
    """Seconds of each phase of a step on the slowest rank, predicted above measured."""
    predicted = step_seconds(plan.timeline)
    measured = step_seconds(measurement.timeline) if measurement else {}
    rank = slowest(measured or predicted)
    if rank is None:
        return ""
    sides = [
        (name, index, seconds[rank])
        for index, (name, seconds) in enumerate(zip(SIDES, (predicted, measured), strict=True))
        if rank in seconds
    ]
    phases = [phase for phase in PHASES if any(phase in s for _, _, s in sides)]
    highest = max((s.get(p, 0.0) for _, _, s in sides for p in phases), default=0.0)
    scale = (WIDTH - _LEFT - _RIGHT) / (highest or 1.0)
    top = y = 4.0
    parts: list[str] = []
    for phase in phases:
        middle = y + len(sides) * 8 + 4
        parts.append(label(_LEFT - 8, middle, phase.replace("_", " "), "end"))
        for name, fill, seconds in sides:
            took = seconds.get(phase)
            words = f"not {name}" if took is None else format_seconds(took)
            width = (took or 0.0) * scale
            tip = f"{phase}, {name}: {words}"
            bar = box((_LEFT, y, width, 14), fill, "phases", _SIDE_FILLS, tip)
            parts.append(bar if width > 0 else "")
            parts.append(label(_LEFT + width + 6, y + 11.5, words, faint=took is None))
            y += 16
        y += 9
    marks = ticks(highest)
    grid = [_tick(_LEFT + t * scale, top, y - 4, format_seconds(t)) for t in marks]
    totals = ", ".join(f"{name} {format_seconds(sum(s.values()))}" for name, _, s in sides)
    swatches, height = legend(
        [(name, fill) for name, fill, _ in sides], y + 24, "phases", _SIDE_FILLS
    )
    return chart(
        "phases",
        f"Phases of a step on rank {rank}, the slowest",
        f"A step in all: {totals}.",
        y + 24 + height,
        (*grid, *parts, swatches),
        _SIDE_FILLS,
    )


def loss_curve(curve: Curve, quality: Quality | None = None) -> str:
    """Training loss by step with its running mean; held-out and best log-loss as lines."""
    points = [
        (step, loss)
        for step, loss in zip(curve.steps, curve.loss, strict=False)
        if math.isfinite(loss)
    ]
    if len(points) < 2:
        return ""
    smooth = _running_mean([loss for _, loss in points])
    levels = _levels(quality)
    values = [loss for _, loss in points] + [value for _, value, _ in levels]
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or 0.01
    low, high = low - room, high + room
    left, top, bottom = 56.0, 8.0, 268.0
    first, last = points[0][0], points[-1][0]
    across = (WIDTH - left - 12) / max(last - first, 1)

    def at(step: float, loss: float) -> tuple[float, float]:
        return left + (step - first) * across, bottom - (loss - low) / (high - low) * (bottom - top)

    grid = [_level_tick(left, at(first, t)[1], t) for t in ticks(high, lowest=low)]
    marks = ticks(last, most=6, lowest=first)
    grid += [label(at(t, low)[0], bottom + 16, f"{t:,.0f}", "middle", faint=True) for t in marks]
    drawn = [
        trace([at(*p) for p in _thinned(points)], 1, 0.35),
        trace([at(s, m) for (s, _), m in _thinned(list(zip(points, smooth, strict=True)))], 2.2, 1),
        *(line(left, at(0, v)[1], WIDTH - 12, at(0, v)[1], dashes, 1.6) for _, v, dashes in levels),
        label(left, bottom + 34, "training step", faint=True),
    ]
    words, height = _loss_legend(points[-1][1], smooth[-1], levels, bottom + 52)
    said = f"From {points[0][1]:.4f} at step {first} to a running mean of {smooth[-1]:.4f} at step"
    also = "".join(f" {name}: {value:.4f}." for name, value, _ in levels)
    return chart(
        "loss",
        "Training loss",
        f"{said} {last}.{also}",
        bottom + 52 + height,
        (*grid, *drawn, words),
    )


def _levels(quality: Quality | None) -> list[tuple[str, float, str]]:
    """Horizontal lines: words, log-loss, dashes."""
    if quality is None:
        return []
    found = [("Held-out log-loss", quality.log_loss, "2 4")]
    if quality.best_log_loss is not None:
        found.append(("Best possible log-loss", quality.best_log_loss, "9 4"))
    return [level for level in found if math.isfinite(level[1])]


def _level_tick(left: float, y: float, value: float) -> str:
    return line(left, y, WIDTH - 12, y) + label(left - 8, y + 4, f"{value:.3g}", "end", faint=True)


def _loss_legend(
    raw: float, mean: float, levels: list[tuple[str, float, str]], y: float
) -> tuple[str, float]:
    """What each line is, with its last value, two to a row."""
    entries = [
        (f"Running mean, {mean:.4f} at the end", trace([(0, 0), (28, 0)], 2.2, 1)),
        (f"Every step, {raw:.4f} at the end", trace([(0, 0), (28, 0)], 1, 0.5)),
        *(
            (f"{name} {value:.4f}", line(0, 0, 28, 0, dashes, 1.6))
            for name, value, dashes in levels
        ),
    ]
    parts = []
    for i, (words, sample) in enumerate(entries):
        x, down = (i % 2) * WIDTH / 2, y + (i // 2) * (LINE + 2)
        moved: dict[str, str | float] = {"transform": f"translate({x:g},{down + 6:g})"}
        parts.append(element("g", moved, sample))
        parts.append(label(x + 36, down + 10, words))
    return "".join(parts), (len(entries) + 1) // 2 * (LINE + 2)


def _running_mean(losses: Sequence[float]) -> list[float]:
    """The mean of the tenth of the steps around each.

    The window is narrow at the beginning, where the loss falls fast, and one-sided at the end.
    """
    # Half a window of a tenth. Sums from the start: each mean is two look-ups, however long the
    # run.
    half = len(losses) // 20
    sums = list(accumulate(losses, initial=0.0))
    means = []
    for i in range(len(losses)):
        reach = min(half, i)
        low, high = i - reach, min(i + reach + 1, len(losses))
        means.append((sums[high] - sums[low]) / (high - low))
    return means


def _thinned(points: list[T]) -> list[T]:
    """At most ``MOST_POINTS`` of the points, first and last among them."""
    if len(points) <= MOST_POINTS:
        return points
    # A stride that is no integer, so that the last point, which is written beside it, is drawn.
    stride = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(k * stride)] for k in range(MOST_POINTS)]


# The sharding map: every table's blocks where they lie inside the table, rank beside rank.

MOST_TABLES = 60
MOST_MAPPED = 64
_ROW, _CELL = 24, 18
_NAME, _TYPE, _BYTES = 18, 112, 74
_GAP = 26  # after names, some of which are wider than they are counted
_TOP = 26


def sharding_map(plan: Plan) -> str:
    """Tables as rows by size, ranks as columns; a cell is the table, filled where the rank has it.

    The rows of a table run downwards in its cell and the columns across, so a row-wise shard is a
    horizontal band and a column-wise shard a vertical one.
    """
    tables = sorted(plan.tables, key=lambda table: (-table.rows * table.dim, table.name))
    shown, ranks = tables[:MOST_TABLES], min(plan.world_size, MOST_MAPPED)
    if not shown:
        return ""
    names = [shortened(printable(table.name), _NAME) for table in shown]
    left = max(text_width(name) for name in names) + _GAP + _TYPE + _BYTES
    pitch = min((WIDTH - left) / ranks, 160)
    by_tensor = _parameter_runs(plan)
    parts = [_header(left, pitch, ranks)]
    for k, (table, name) in enumerate(zip(shown, names, strict=True)):
        y = _TOP + k * _ROW
        parts.append(_row_labels(table, name, y, left))
        blocks = [b for b in blocks_of(by_tensor.get(table.fqn, ())) if b.rank < ranks]
        parts.extend(_cell(table, r, left + r * pitch, y, pitch, blocks) for r in range(ranks))
    bottom = _TOP + len(shown) * _ROW + 10
    used = {table.sharding_type for table in tables}
    swatches, height = legend(
        [(t, i) for i, t in enumerate(TYPES) if t in used], bottom, "map", HELD
    )
    return chart(
        "map",
        "Which rank holds which part of each table",
        _map_words(plan, len(shown), ranks),
        bottom + height,
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


def _header(left: float, pitch: float, ranks: int) -> str:
    every = next(n for n in (1, 2, 4, 8, 16, 64) if n * pitch >= 26)
    short = pitch < 52
    parts = [label(0, 14, "table", faint=True)]
    parts.append(label(left - 14, 14, "rank" if short else "size", "end", faint=True))
    for rank in range(0, ranks, every):
        words = str(rank) if short else f"rank {rank}"
        parts.append(label(left + rank * pitch, 14, words, bold=True))
    parts.append(line(0, 20, left + ranks * pitch, 20))
    return "".join(parts)


def _row_labels(table: TablePlan, name: str, y: float, left: float) -> str:
    kind = label(left - _BYTES - _TYPE, y + 13, table.sharding_type, faint=True)
    size = label(left - 14, y + 13, format_bytes(table_bytes(table)), "end", faint=True)
    return label(0, y + 13, name) + kind + size


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
