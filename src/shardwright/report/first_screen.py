"""What a command prints of its answer: as text, and for a notebook."""

from __future__ import annotations

import html
import io
from functools import partial

from rich.console import Console, Group, RenderableType

from shardwright.core.advice import Advice
from shardwright.core.footprint import Fit, Footprint
from shardwright.core.measurement import Comparison
from shardwright.job.plan import Plan
from shardwright.report.advice_report import advice_report, picture
from shardwright.report.fit_report import fit_report
from shardwright.report.memory_report import memory_report
from shardwright.report.memory_timeline import standalone, timeline_chart
from shardwright.report.plan_report import plan_report
from shardwright.report.sheet import Sheet
from shardwright.report.table import Fitted, comparison_summary, text_of

Screen = Plan | Footprint | Fit | Advice | Comparison
UNBROKEN = 10_000  # columns: a page breaks lines itself
TEXT = '<div style="white-space:pre-wrap">{code}</div>'


def as_text(shown: Screen) -> str:
    """In the terminal's width."""
    return text_of(_first_screen(shown)).rstrip()


def as_html(shown: Screen) -> str:
    """Sheets as tables, the sentences around them, and a picture where there is one."""
    return _markup(_first_screen(shown)) + _picture(shown)


def _picture(shown: Screen) -> str:
    """Memory over time, or the time of layouts against their memory."""
    if isinstance(shown, Footprint) and shown.worst.timeline:
        return standalone(partial(timeline_chart, shown, shown.worst))
    return picture(shown) if isinstance(shown, Advice) and shown.points else ""


def _first_screen(shown: Screen) -> RenderableType:
    if isinstance(shown, Footprint):
        return memory_report(shown)
    if isinstance(shown, Fit):
        return fit_report(shown)
    if isinstance(shown, Advice):
        return advice_report(shown)
    if isinstance(shown, Comparison):
        return comparison_summary(shown)
    from shardwright.planner.statistics import memory_prices, statistics  # not where ranks compare

    return plan_report(shown, statistics(shown), memory_prices(shown))


def _markup(part: RenderableType) -> str:
    if isinstance(part, Group):
        return "".join(map(_markup, part.renderables))
    if isinstance(part, Fitted):
        return _table(part.sheet)
    console = Console(record=True, file=io.StringIO(), width=UNBROKEN)
    console.print(part)
    return console.export_html(code_format=TEXT, inline_styles=True)


def _table(sheet: Sheet) -> str:
    rows = "".join(_row(sheet, row, "td") for row in sheet.rows)
    head = _row(sheet, tuple(column.title for column in sheet.columns), "th")
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _row(sheet: Sheet, cells: tuple[str, ...], tag: str) -> str:
    sides = ("right" if column.numeric else "left" for column in sheet.columns)
    return "<tr>{}</tr>".format(
        "".join(
            f'<{tag} style="text-align:{side};white-space:pre">{html.escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
    )
