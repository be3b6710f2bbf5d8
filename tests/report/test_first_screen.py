"""Plans, footprints and comparisons by themselves: in one line, printed, and in a notebook."""

from __future__ import annotations

import io
import re
from html import unescape

import msgspec
import pytest
import samples
from footprints import footprint
from rich.console import Console, RenderableType

from shardwright.core.document import Shown
from shardwright.planner.statistics import memory_prices, statistics
from shardwright.report.memory_report import memory_report
from shardwright.report.plan_report import plan_in_brief, plan_report
from shardwright.report.table import comparison_summary, text_of

RULE = "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
PLAN = samples.plan()
SCREENS: list[tuple[Shown, RenderableType]] = [
    (PLAN, plan_report(PLAN, statistics(PLAN), memory_prices(PLAN))),
    (footprint(), memory_report(footprint())),
    (samples.comparison(PLAN), comparison_summary(samples.comparison(PLAN))),
]


def words(screen: RenderableType) -> set[str]:
    out = io.StringIO()
    Console(width=400, no_color=True, file=out).print(screen)
    return {word for word in out.getvalue().split() if not set(word) <= {RULE}}


@pytest.mark.parametrize(("shown", "screen"), SCREENS)
def test_it_is_printed_as_its_command_prints_it(shown: Shown, screen: RenderableType) -> None:
    assert f"{shown}\n" == text_of(screen)


@pytest.mark.parametrize(("shown", "screen"), SCREENS)
def test_a_notebook_shows_every_word_and_figure_of_the_screen(
    shown: Shown, screen: RenderableType
) -> None:
    page = shown._repr_html_()
    text = unescape(re.sub("<[^>]*>", " ", page)).split()
    assert words(screen) <= set(text)
    assert page.count("<table>") == page.count("</table>") >= 2


@pytest.mark.parametrize("shown", [shown for shown, _ in SCREENS])
def test_its_repr_is_one_short_line(shown: Shown) -> None:
    assert re.fullmatch(r"<(Plan|Footprint|Comparison) o[fn] .{20,110}>", repr(shown))


def test_names_are_text_in_a_notebook() -> None:
    hostile = msgspec.structs.replace(footprint(), model="<script>alert(1)</script>")
    assert "<script>" not in hostile._repr_html_()


def test_the_demo_shows_of_a_plan_the_verdict_and_its_tables_alone() -> None:
    brief = text_of(plan_in_brief(PLAN, memory_prices(PLAN)))
    assert f"{PLAN}".startswith(brief.rstrip())
    assert "C3" in brief
    assert "Memory and time per rank" not in brief


def test_the_demo_shows_peaks_only_where_something_failed() -> None:
    held = samples.comparison(PLAN)
    failed = msgspec.structs.replace(held, failures=("a reason",))
    assert "Peak per rank" not in text_of(comparison_summary(held, brief=True))
    assert "Peak per rank" in text_of(comparison_summary(failed, brief=True))
