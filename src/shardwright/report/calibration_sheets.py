"""A measured machine in a terminal: every constant with its unit, spread and source."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from shardwright.core.calibration import Calibration, Figure
from shardwright.report.sheet import Column, Sheet
from shardwright.report.table import drawn, spaced
from shardwright.report.wording import TEXT_LIMIT, counted, percent, printable

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
