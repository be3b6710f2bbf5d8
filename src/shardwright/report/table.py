"""Plans, comparisons, differences, machines in a terminal: functions that return rich renderables.

Every cell is a ``Text``, so nothing in a name is read as markup, and every verdict is a word, so
nothing is lost without colour. Tables adapt to the width.
"""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from shardwright.core.cluster import Calibration, Figure
from shardwright.core.measurement import Comparison
from shardwright.core.plan import Plan
from shardwright.core.quantities import format_bytes, format_seconds
from shardwright.report import comparison_sheets
from shardwright.report.difference import Difference, Unit, Value, differences
from shardwright.report.sheet import Column, Sheet
from shardwright.report.wording import TEXT_LIMIT, counted, percent, printable

__all__ = [
    "Difference",
    "comparison_summary",
    "differences",
    "plan_difference",
    "text_of",
]

_UNBOUNDED = 10_000


def text_of(renderable: RenderableType, *, color: bool = False) -> str:
    """A table in the terminal's width, or 120 columns where there is no terminal."""
    console = Console(color_system="auto" if color else None)
    if not console.is_terminal:
        console.width = 120
    with console.capture() as drawn:
        console.print(renderable)
    return drawn.get()


def comparison_summary(comparison: Comparison) -> RenderableType:
    """The verdict, exact bytes, peaks and phases, predicted beside measured."""
    verdict = comparison_sheets.verdict(comparison)
    unequal = comparison_sheets.unequal_sheet(comparison)
    phases = [drawn(sheet) for sheet in comparison_sheets.phase_sheets(comparison)]
    return spaced(
        Text(verdict.sentence, style="bold green" if verdict.held else "bold red"),
        listed("What failed", comparison_sheets.failures(comparison)),
        drawn(comparison_sheets.exact_sheet(comparison)) if comparison.exact else None,
        drawn(unequal) if unequal else None,
        drawn(comparison_sheets.peaks_sheet(comparison)) if comparison.peaks else None,
        *phases,
    )


def plan_difference(a: Plan, b: Plan) -> RenderableType:
    """What changed from ``a`` to ``b``, or one line that says nothing did."""
    found = differences(a, b)
    if not found:
        return Text("The two plans are equal in tables, units, ranks, job and cluster.")
    return drawn(
        Sheet(
            counted(len(found), "difference"),
            (
                Column("what"),
                Column("key"),
                Column("first plan", numeric=True),
                Column("second plan", numeric=True),
                Column("change", numeric=True),
            ),
            tuple(_difference_row(d) for d in found),
        )
    )


def _difference_row(d: Difference) -> tuple[str, ...]:
    what = f"{d.group} {printable(d.name)}" if d.name else d.group
    key = printable(d.key)
    return what, key, _value(d.before, d.unit), _value(d.after, d.unit), _change(d)


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
    if isinstance(d.before, int | float) and isinstance(d.after, int | float) and d.before:
        return percent(d.after / d.before - 1, signed=True)
    return ""


class _Fitted:
    """A sheet in the first layout that fits: roomy, tight, stacked, or stacked with folded numbers.

    No layout cuts a number short.
    """

    def __init__(self, sheet: Sheet) -> None:
        self._sheet = sheet

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(width=_UNBOUNDED)
        stacked = self._sheet.stacked()
        for table in (_table(self._sheet, 1), _table(self._sheet, 0)):
            if Measurement.get(console, unbounded, table).maximum <= options.max_width:
                yield table
                return
        table = _table(stacked, 0)
        fits = Measurement.get(console, unbounded, table).minimum <= options.max_width
        yield table if fits else _table(stacked, 0, fold=True)


def drawn(sheet: Sheet) -> RenderableType:
    """A sheet with its title and note."""
    parts: list[RenderableType] = [Text(sheet.title, style="bold"), _Fitted(sheet)]
    if sheet.note:
        parts.append(Text(sheet.note, style="dim"))
    return Group(*parts)


def _table(sheet: Sheet, gap: int, fold: bool = False) -> Table:
    """``gap`` is added to one blank between columns; ``fold`` lets numbers take several lines."""
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0), header_style=""
    )
    for k, column in enumerate(sheet.columns):
        cells = [column.title, *(row[k] for row in sheet.rows)]
        rigid = column.numeric and not fold
        table.add_column(
            Text(column.title, style="bold"),
            justify="right" if column.numeric else "left",
            no_wrap=rigid,
            min_width=max(cell_len(x) for c in cells for x in c.split("\n")) if rigid else None,
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


def spaced(*parts: RenderableType | None) -> RenderableType:
    """The parts that are there, a blank line between each."""
    shown: list[RenderableType] = []
    for part in parts:
        if part is not None:
            shown.extend(([Text("")] if shown else []) + [part])
    return Group(*shown)


_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def calibration_summary(found: Calibration) -> RenderableType:
    """The machine, then what was measured, then what was not."""
    facts = (f"{key.replace('_', ' ')} {value}" for key, value in found.machine.items())
    machine = ", ".join(printable(fact) for fact in facts)
    head = f"{counted(found.world_size, 'rank')} over {found.backend} on {found.date}: {machine}"
    figures = {**found.capacities, **found.constants}
    measured = {name: f for name, f in figures.items() if f.median_of}
    others = {name: f for name, f in figures.items() if not f.median_of}
    return spaced(
        Text(head, style="bold"),
        drawn(_sheet("Measured", measured)),
        drawn(_sheet("Not measured", others)) if others else None,
    )


def _sheet(title: str, figures: dict[str, Figure]) -> Sheet:
    return Sheet(
        title,
        (
            Column("constant"),
            Column("value", numeric=True),
            Column("unit"),
            Column("spread", numeric=True),
            Column("median of", numeric=True, under="spread"),
            Column("source"),
        ),
        tuple(_row(name, figure) for name, figure in figures.items()),
    )


def _row(name: str, figure: Figure) -> tuple[str, ...]:
    value, unit = _scaled(figure.value, figure.unit)
    spread = percent(figure.spread) if figure.median_of else ""
    count = str(figure.median_of) if figure.median_of else ""
    return printable(name), value, unit, spread, count, printable(figure.source, TEXT_LIMIT)


def _scaled(value: float, unit: str) -> tuple[str, str]:
    """Three to four digits, with the unit that goes with them."""
    if value == 0 or unit in ("share", "touches"):
        return f"{value:.3g}", unit
    scales = _SMALL if unit == "s" else _SCALES
    scale, prefix = next((s for s in scales if value >= s[0]), scales[-1])
    return f"{value / scale:.4g}", f"{prefix}{unit}"
