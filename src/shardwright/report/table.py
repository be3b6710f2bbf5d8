"""Plans, comparisons, differences, machines in a terminal: functions that return rich renderables.

Every cell is a ``Text``, so nothing in a name is read as markup, and every verdict is a word, so
nothing is lost without colour. Tables adapt to the width.
"""

# A figure that is cut is a wrong figure: rich would shorten a cell, or break "35.93 MiB" between
# its two halves. So widths are worked out here. What a first screen can spare goes first, then text
# is wrapped between words, then a table is continued below; only a column that alone is wider than
# the terminal is broken. Cells are Text and never strings: rich reads markup in strings, and names
# come from files.

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from shardwright.core import errors
from shardwright.core.cluster import Calibration, SourcedFigure
from shardwright.core.measurement import MOST_KERNELS, Comparison, ProfiledStage
from shardwright.core.quantities import counted, format_bytes, format_seconds
from shardwright.job.plan import Plan
from shardwright.report import comparison_sheets
from shardwright.report.difference import Difference, Unit, Value, differences, together
from shardwright.report.profile_sheets import profile_sheets
from shardwright.report.sheet import Sheet, number, sheet_of, text
from shardwright.report.wording import (
    NO_BREAK,
    TEXT_LIMIT,
    change_text,
    percent,
    printable,
    unit_words,
)

__all__ = [
    "Difference",
    "comparison_summary",
    "differences",
    "plan_difference",
    "text_of",
]

_BOUND = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=[a-zA-Zµ%])")
NO_TERMINAL = 120  # columns
_WRAPPED = 20  # text of a full report is wrapped to no less


def text_of(renderable: RenderableType, *, color: bool = False) -> str:
    """A table in the terminal's width or in ``COLUMNS``, 120 where there is neither."""
    console = _console(color=color)
    with console.capture() as drawn:
        console.print(renderable)
    # Trailing blanks are the padding of the last column. Split by newlines alone: splitlines would
    # also split at characters that a name may have.
    return "\n".join(line.rstrip(" ") for line in drawn.get().split("\n"))


def _console(*, color: bool = False) -> Console:
    console = Console(color_system="auto" if color else None)
    # rich takes 80 columns where there is no terminal, and what is piped into a file would be
    # folded for no reason.
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = NO_TERMINAL
    return console


def equations(lines: Sequence[str]) -> str:
    """Lines as they are where they fit the terminal; else each side of an equation on its own, what
    follows indented, by words. Nothing is left out."""
    width = max(_console().width, _WRAPPED)
    text = "\n".join(part for line in lines for part in _sides(line, width))
    return text.replace(NO_BREAK, " ")


def _sides(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    first, *more = line.split(" = ")
    margin = len(line) - len(line.lstrip())
    hanging = min(len(first) + 1 if more else margin + 2, width // 2)
    folded = []
    # A blank that does not break keeps each "=" beside its side: a line that ends in "=" reads as
    # if something were missing.
    head = f"{first} ={NO_BREAK}{more[0]}" if more else first
    for place, side in enumerate([head, *(f"={NO_BREAK}{each}" for each in more[1:])]):
        lead = "" if place == 0 else " " * hanging
        folded += textwrap.wrap(
            side,
            width,
            initial_indent=lead,
            subsequent_indent=" " * (hanging + 2 * bool(more)),
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
    return folded


FIRST_RANKS, FIRST_FAILURES, FIRST_DIFFERENCES, FIRST_KERNELS = (
    4,
    6,
    30,
    8,
)  # rows of a first screen


def comparison_summary(
    comparison: Comparison, plan: Plan | None = None, *, full: bool = False, brief: bool = False
) -> RenderableType:
    """The verdict, then predicted beside measured: peaks, the phases of the slowest rank and what
    is not equal; ``full`` has every exact byte and the phases of more ranks, a ``brief`` one no
    peaks that are as predicted. Of a ``plan`` it is said what would bring its seconds closer."""
    sheets = comparison_sheets
    verdict, times = sheets.verdict(comparison), sheets.time_verdict(comparison)
    failed = sheets.failures(comparison)
    left = 0 if full else len(failed) - FIRST_FAILURES
    shown = failed[:FIRST_FAILURES] if left > 0 else failed
    exact = sheets.exact_sheet(comparison) if comparison.exact and full else None
    unequal = sheets.unequal_sheet(comparison, *(() if full else (FIRST_FAILURES,)))
    peaks = sheets.peaks_sheet(comparison, *(() if full else (FIRST_RANKS,)))
    phases = sheets.phase_sheets(comparison, *(() if full else (1,)))
    exchanges = sheets.exchanges_sheet(comparison, *(() if full else (FIRST_RANKS,)))
    return spaced(
        Group(
            prose(verdict.sentence, style="bold green" if verdict.held else "bold red"),
            *([prose(times.sentence, style="" if times.held else "bold yellow")] if times else []),
            *([prose(sheets.CALIBRATE)] if plan and sheets.uncalibrated(comparison, plan) else []),
        ),
        listed("What failed", (*shown, f"{left:,} more: --full") if left > 0 else shown),
        drawn(exact) if exact else None,
        drawn(unequal, short=not full) if unequal else None,
        drawn(peaks, short=not full) if comparison.peaks and (failed or not brief) else None,
        *(drawn(sheet, short=not full) for sheet in phases),
        drawn(exchanges, short=not full) if exchanges else None,
    )


def profile_summary(stages: Sequence[ProfiledStage], *, full: bool = False) -> RenderableType:
    """Where the time of profiled steps went; all kernels if ``full``."""
    sheets = profile_sheets(stages, *((MOST_KERNELS,) if full else (FIRST_KERNELS,)))
    return spaced(*(drawn(sheet, short=not full) for sheet in sheets))


def plan_difference(a: Plan, b: Plan, *, full: bool = False) -> RenderableType:
    """What changed from ``a`` to ``b``, what changed alike as one row unless ``full``, or one line
    that says nothing did."""
    found = differences(a, b)
    rows = [(1, each) for each in found] if full else together(a, b, found)
    left = 0 if full else len(rows) - FIRST_DIFFERENCES
    shown = rows[:FIRST_DIFFERENCES] if left > 0 else rows
    more = f"{counted(left, 'more row')}. " if left > 0 else ""
    if not found:
        return Text("The two plans are equal in tables, units, ranks, job and cluster.")
    return drawn(
        sheet_of(
            counted(len(found), "difference"),
            shown,
            (
                text("what", _changed),
                text("key", lambda each: printable(each[1].key)),
                number("first plan", lambda each: _value(each[1].before, each[1].unit)),
                number("second plan", lambda each: _value(each[1].after, each[1].unit)),
                number("change", lambda each: _change(each[1])),
            ),
            "" if len(shown) == len(found) else f"{more}Each difference: --full.",
        ),
        short=not full,
    )


def _changed(counts: tuple[int, Difference]) -> str:
    count, d = counts
    if count > 1 and d.group != "job":
        return counted(count, d.group)
    return f"{d.group} {printable(d.name)}" if d.name else d.group


def _value(value: Value, unit: Unit) -> str:
    if value is None:
        return "(none)"
    if isinstance(value, str):
        return printable(value, TEXT_LIMIT)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "seconds":
        return format_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _change(d: Difference) -> str:
    if d.group == "job":  # where numbers are settings
        return ""
    if isinstance(d.before, int | float) and isinstance(d.after, int | float) and d.before:
        return change_text(d.after / d.before - 1)
    return ""


class Fitted:
    """A sheet in the width there is: roomy, or tight, or in several tables below each other.

    A ``short`` one first leaves out the columns that it can spare. No figure is cut or parted from
    its unit, and no word is broken, unless a column alone is wider than the terminal.
    """

    def __init__(self, sheet: Sheet, *, short: bool) -> None:
        self.sheet, self._short = sheet, short

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sheet, width = self.sheet, options.max_width
        if self._short:
            sheet = _without_spare(sheet, width)
        # Two blanks between columns where the whole table has room for them, one where it has not.
        if _together([*map(max, _widths(sheet))], gap=1) <= width:
            yield _table(sheet, width, gap=1)
            return
        for place, part in enumerate(_parts(sheet, width, 0 if self._short else _WRAPPED)):
            yield from ([Text("")] if place else [])
            yield _table(part, width, gap=0)


def _without_spare(sheet: Sheet, width: int) -> Sheet:
    """``sheet`` without the columns that it can spare, as many as it takes to fit."""
    kept = list(range(len(sheet.columns)))
    widths = [max(least, most) for least, most in _widths(sheet)]
    while _together([widths[k] for k in kept], gap=0) > width:
        last = max(kept, key=lambda k: sheet.columns[k].spare)
        if not sheet.columns[last].spare:
            break
        kept.remove(last)
    return sheet.only(kept)


def _parts(sheet: Sheet, width: int, wrapped: int) -> list[Sheet]:
    """Columns that fit beside the first one, in order; those that do not begin the next part.
    Text is wrapped, where that saves a part, to no less than ``wrapped``."""
    needs = [min(most, max(least, wrapped)) for least, most in _widths(sheet)]
    # The first column names the row, so every part begins with it.
    parts = [[0]]
    for k in range(1, len(needs)):
        # One column beside the name at least, or a wide one would never find a part.
        if len(parts[-1]) > 1 and _together([needs[i] for i in (*parts[-1], k)], gap=0) > width:
            parts.append([0])
        parts[-1].append(k)
    return [sheet.only(part) for part in parts]


def _widths(sheet: Sheet) -> list[tuple[int, int]]:
    """Of each column the least width that breaks no word or figure, and the width of its cells."""
    found = []
    for k, column in enumerate(sheet.columns):
        lines = [
            line
            for cell in (column.title, *(r[k] for r in sheet.rows))
            for line in cell.split("\n")
        ]
        most = max(map(cell_len, lines))
        words = (cell_len(word) for line in lines for word in line.split())
        # Figures are never wrapped: their least width is all of it.
        found.append((most if column.numeric else max(words, default=0), most))
    return found


def _given(widths: Sequence[tuple[int, int]], width: int, gap: int) -> Sequence[int | None]:
    """The width of each column: that of its cells, less where the widest have to wrap; None of all
    where words have to be broken."""
    given = [max(least, most) for least, most in widths]
    while (over := _together(given, gap) - width) > 0:
        slack = [own - least for own, (least, _) in zip(given, widths, strict=True)]
        widest = max(range(len(given)), key=slack.__getitem__)
        if not slack[widest]:
            return [None] * len(given)
        # Half of what it can spare at a time, so that several wide columns share the loss.
        given[widest] -= min(over, max(slack[widest] // 2, 1))
    return given


def _together(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + (1 + gap) * (len(widths) - 1)


class _Prose:
    """Sentences in the width there is; no figure is parted from its unit or what it counts."""

    def __init__(self, text: str, style: str) -> None:
        self._text, self._style = text, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # A blank that textwrap does not break at, put back after wrapping: what is copied has plain
        # blanks.
        bound = _UNIT.sub(_BOUND, self._text)
        for line in bound.split("\n"):
            for part in textwrap.wrap(line, options.max_width) or [""]:
                yield Text(part.replace(_BOUND, " "), style=self._style)


def prose(text: str, style: str = "") -> RenderableType:
    """Lines of text as wide as the terminal."""
    return _Prose(text, style)


def drawn(sheet: Sheet, *, short: bool = False) -> RenderableType:
    """A sheet with its title and note; a ``short`` one may leave out columns."""
    parts: list[RenderableType] = [Text(sheet.title, style="bold"), Fitted(sheet, short=short)]
    if sheet.note:
        parts.append(prose(sheet.note, style="dim"))
    return Group(*parts)


def _table(sheet: Sheet, width: int, *, gap: int) -> Table:
    """``gap`` is added to one blank between columns."""
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0), header_style=""
    )
    given = _given(_widths(sheet), width, gap)
    for column, own in zip(sheet.columns, given, strict=True):
        table.add_column(
            Text(column.title, style="bold"),
            justify="right" if column.numeric else "left",
            width=own,
            overflow="fold",
        )
    for row in sheet.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def listed(title: str, lines: tuple[str, ...]) -> RenderableType | None:
    """Lines under a title; None if there are none."""
    if not lines:
        return None
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row(Text("-"), Text(line))
    return Group(Text(title, style="bold"), grid)


def assumed_line(assumed: Sequence[str], most: int) -> RenderableType | None:
    """The first assumptions in one sentence, and how many more there are."""
    left = len(assumed) - most
    more = (f"{left:,} more (--full)",) if left > 0 else ()
    said = "; ".join((*(text.rstrip(".") for text in assumed[:most]), *more))
    return prose(f"Assumed: {said}.") if assumed else None


def spaced(*parts: RenderableType | None) -> RenderableType:
    """The parts that are there, a blank line between each."""
    shown: list[RenderableType] = []
    for part in parts:
        if part is not None:
            shown.extend(([Text("")] if shown else []) + [part])
    return Group(*shown)


_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


# What most seconds hang on, of those constants that a machine has.
FIRST_CONSTANTS = (
    "compute_rate",
    "memory_rate",
    "operation_latency",
    "all_reduce_latency",
    "all_reduce_rate",
    "all_gather_rate",
    "all_to_all_rate",
)
WIDE = 0.3  # a spread above it is marked


def calibration_summary(found: Calibration, *, full: bool = False) -> RenderableType:
    """The machine, then what was measured, then what was not; unless ``full`` what most hangs on,
    and what varies."""
    facts = (f"{key.replace('_', ' ')} {value}" for key, value in found.machine.items())
    machine = ", ".join(printable(fact) for fact in facts)
    head = f"{counted(found.world_size, 'rank')} over {found.backend} on {found.date}: {machine}"
    figures = {**found.capacities, **found.constants}
    measured = {name: f for name, f in figures.items() if f.median_of}
    others = {name: f for name, f in figures.items() if not f.median_of}
    if full:
        return spaced(
            prose(head, style="bold"),
            drawn(_sheet("Measured", measured)),
            drawn(_sheet("Not measured", others)) if others else None,
        )
    first = {name: measured[name] for name in FIRST_CONSTANTS if name in measured}
    wide = [name for name, figure in measured.items() if figure.spread > WIDE]
    names = errors.listed(wide, 3)
    varying = f" Above {percent(WIDE)} (!): {names}." if wide else ""
    note = (
        "Spread: half the distance between the quartiles of all rounds, of the median."
        f"{varying} {len(figures) - len(first)} more constants: --full."
    )
    short = _sheet("Measured", first).only(range(4))
    return Group(prose(head, style="bold"), drawn(replace(short, title="", note=note)))


def _sheet(title: str, figures: dict[str, SourcedFigure]) -> Sheet:
    return sheet_of(
        title,
        figures.items(),
        (
            text("constant", lambda each: printable(each[0])),
            number("value", lambda each: _scaled(each[1].value, each[1].unit)[0]),
            text("unit", lambda each: unit_words(_scaled(each[1].value, each[1].unit)[1])),
            number("spread", lambda each: _spread(each[1])),
            number("median of", lambda each: str(each[1].median_of or "")),
            text("source", lambda each: printable(each[1].source, TEXT_LIMIT)),
        ),
    )


def _spread(figure: SourcedFigure) -> str:
    """How far measurements lie apart, with a mark where that is far."""
    if not figure.median_of:
        return ""
    return f"{percent(figure.spread)}{' !' if figure.spread > WIDE else ''}"


def _scaled(value: float, unit: str) -> tuple[str, str]:
    """Three to four digits, with the unit that goes with them."""
    if value == 0 or unit in ("share", "touches"):
        return f"{value:.3g}", unit
    scales = _SMALL if unit == "s" else _SCALES
    scale, prefix = next((s for s in scales if value >= s[0]), scales[-1])
    return f"{value / scale:.4g}", f"{prefix}{unit}"
