"""A plan with all that it adds up to, in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from shardwright.core.plan import Plan
from shardwright.core.statistics import MemoryPrice, Statistics
from shardwright.report import plan_sheets, table_sheets
from shardwright.report import statistics_sheets as sheets
from shardwright.report.table import drawn, listed, spaced

EVERYTHING = 10**6  # rows that a full report may have
STEPS = "Every number step by step: shardwright explain plan.json --statistic NAME"
MORE = ", and --tensor NAME for a table. Every sheet, table and rank: shardwright plan --full."
MORE_WITHOUT_TABLES = ". Every sheet and rank: shardwright plan --full."


def plan_report(
    plan: Plan, statistics: Statistics, prices: Sequence[MemoryPrice], *, full: bool = False
) -> RenderableType:
    """What a reader of a plan looks for first; ``full`` leaves no sheet and no row out."""
    most_tables = EVERYTHING if full else plan_sheets.MOST_TABLES
    most_ranks = EVERYTHING if full else plan_sheets.MOST_RANKS
    few = len(plan.tables) <= plan_sheets.MOST_TABLES
    tabled = bool(plan.tables)
    lookups = tabled and (full or (few and not table_sheets.is_plain(statistics)))
    kernels = tabled and (full or len(statistics.kernels) > 1)
    shown = [
        plan_sheets.tables_sheet(plan, most_tables) if tabled else None,
        table_sheets.lookups_sheet(statistics) if lookups else None,
        table_sheets.storage_sheet(plan, statistics) if full and tabled else None,
        table_sheets.seconds_sheet(statistics) if full and tabled else None,
        plan_sheets.units_sheet(plan) if plan.units else None,
        plan_sheets.ranks_sheet(plan, most_ranks),
        sheets.times_sheet(plan, statistics, most_ranks),
    ]
    details = [
        sheets.parts_sheet(plan, statistics) if full else None,
        sheets.critical_sheet(statistics) if full else None,
        sheets.evenness_sheet(plan, statistics),
        sheets.tiers_sheet(plan, statistics),
        *(sheets.ledger_sheet(ledger) for ledger in statistics.ledgers),
        sheets.bottlenecks_sheet(plan, statistics) if tabled else None,
        table_sheets.kernels_sheet(statistics) if kernels else None,
    ]
    verdict = [
        plan_sheets.search_line(plan),
        *sheets.waiting_lines(statistics),
        sheets.price_line(prices),
    ]
    return spaced(
        Text(plan_sheets.headline(plan), style="bold"),
        *(drawn(sheet) for sheet in shown if sheet is not None),
        Text("\n".join(verdict)),
        *(drawn(sheet) for sheet in details if sheet is not None),
        listed("Not searched to the end", sheets.skipped_lines(plan)),
        listed("Assumptions", plan_sheets.assumptions(plan)),
        Text(STEPS + (MORE if tabled else MORE_WITHOUT_TABLES), style="dim"),
    )
