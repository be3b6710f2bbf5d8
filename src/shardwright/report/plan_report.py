"""A plan with all that it adds up to, in a terminal.

The sheets of its tables and kernels, what they are asked for and what that takes, are only here.
"""

# A first screen answers what somebody asks who has just made a plan: does it fit, how fast, where
# does everything lie. Everything else is behind --full, in the same sheets with more rows, so that
# a figure that was seen on the first screen is found again under the same name.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from shardwright.core.cluster import TIERS, Tier
from shardwright.core.quantities import format_bytes, format_seconds
from shardwright.job.plan import Plan
from shardwright.planner.statistics.records import (
    KernelStatistics,
    MemoryPrice,
    Statistics,
    TableStatistics,
)
from shardwright.report import plan_sheets
from shardwright.report import statistics_sheets as sheets
from shardwright.report.sheet import Cell, Sheet, number, sheet_of, text
from shardwright.report.table import assumed_line, drawn, listed, prose, spaced
from shardwright.report.wording import percent, printable, ranks_text

EVERYTHING = 10**6  # rows that a full report may have
# Rows of a first screen, beside those of smaller tables and faster units.
FIRST_TABLES, FIRST_UNITS, FIRST_RANKS, FIRST_ASSUMPTIONS = 6, 5, 4, 3
STEPS = "Every number step by step: -o plan.json, then explain plan.json --statistic NAME"
MORE = ", and --tensor NAME for a table. Every table, column and rank: --full."
MORE_WITHOUT_TABLES = ". Every column and rank: --full."


def plan_report(
    plan: Plan, statistics: Statistics, prices: Sequence[MemoryPrice], *, full: bool = False
) -> RenderableType:
    """What a reader of a plan looks for first; ``full`` leaves no sheet and no row out."""
    more = [*sheets.waiting_lines(statistics), plan_sheets.search_line(plan)] if full else []
    shown = _every_sheet(plan, statistics) if full else [*_first_sheets(plan)]
    assumed = plan_sheets.assumptions(plan)
    return spaced(
        *_verdict(plan, prices, more),
        *(drawn(sheet, short=not full) for sheet in shown if sheet is not None),
        listed("Not searched to the end", sheets.skipped_lines(plan)),
        listed("Assumptions", assumed) if full else assumed_line(assumed, FIRST_ASSUMPTIONS),
        prose(STEPS + (MORE if plan.tables else MORE_WITHOUT_TABLES), style="dim"),
    )


def plan_in_brief(plan: Plan, prices: Sequence[MemoryPrice]) -> RenderableType:
    """The verdict, and where the largest parts lie."""
    return spaced(*_verdict(plan, prices), drawn(_first_sheets(plan)[0], short=True))


def _verdict(
    plan: Plan, prices: Sequence[MemoryPrice], more: Sequence[str] = ()
) -> list[RenderableType]:
    """What is planned, whether it fits, how fast it is and what would make it faster."""
    lines = [
        plan_sheets.fits_line(plan),
        plan_sheets.speed_line(plan),
        plan_sheets.hidden_line(plan),
        plan_sheets.checkpointing_line(plan),
        sheets.price_line(prices, plan.search.proved_seconds) if plan.tables else "",
        *more,
    ]
    title = prose(plan_sheets.headline(plan), style="bold")
    return [title, prose("\n".join(filter(None, lines)))]


def _first_sheets(plan: Plan) -> list[Sheet]:
    """Where everything lies, and what every rank holds, the largest and fullest first; what columns
    mean is said in the full report."""
    ranks = plan_sheets.ranks_sheet(plan, FIRST_RANKS)
    left = len(plan.ranks) > FIRST_RANKS and len(ranks.rows) == FIRST_RANKS
    placed = [
        plan_sheets.tables_sheet(plan, FIRST_TABLES) if plan.tables else None,
        plan_sheets.units_sheet(plan, FIRST_UNITS) if plan.units else None,
        replace(ranks, title=f"{ranks.title}, those with the highest peak and the slowest")
        if left
        else ranks,
    ]
    return [replace(sheet, note="") for sheet in placed if sheet is not None]


def _every_sheet(plan: Plan, statistics: Statistics) -> list[Sheet | None]:
    """All that a plan adds up to."""
    tabled = bool(plan.tables)
    return [
        plan_sheets.tables_sheet(plan, EVERYTHING) if tabled else None,
        lookups_sheet(statistics) if tabled else None,
        storage_sheet(plan, statistics) if tabled else None,
        seconds_sheet(statistics) if tabled else None,
        plan_sheets.units_sheet(plan) if plan.units else None,
        plan_sheets.ranks_sheet(plan, EVERYTHING),
        sheets.times_sheet(plan, statistics, EVERYTHING),
        sheets.parts_sheet(plan, statistics),
        sheets.critical_sheet(statistics),
        sheets.evenness_sheet(plan, statistics),
        sheets.tiers_sheet(plan, statistics),
        *(sheets.ledger_sheet(ledger) for ledger in statistics.ledgers),
        sheets.bottlenecks_sheet(plan, statistics) if tabled else None,
        kernels_sheet(statistics) if tabled else None,
        attempts_sheet(plan),
    ]


def attempts_sheet(plan: Plan) -> Sheet | None:
    """What each proposer proposed; None where no proposers were asked."""
    if not plan.search.attempts:
        return None
    return sheet_of(
        "Proposers, in turn",
        plan.search.attempts,
        (
            text("proposer", lambda attempt: printable(attempt.name)),
            number("proposals", lambda attempt: f"{attempt.proposals:,}"),
            number("that fit", lambda attempt: f"{attempt.plans:,}"),
            number("made before", lambda attempt: f"{attempt.repeats:,}"),
            text("ended", lambda attempt: printable(attempt.stopped) or "at its end"),
        ),
        "A proposal that was made before is not placed again.",
    )


def kernels_sheet(statistics: Statistics) -> Sheet:
    """Tables and bytes by compute kernel."""
    return sheet_of(
        "Compute kernels",
        statistics.kernels,
        (
            text("kernel", lambda kernel: printable(kernel.kernel)),
            number("tables", lambda kernel: f"{kernel.tables:,}"),
            number("named", lambda kernel: f"{kernel.named:,}"),
            number("weights", lambda kernel: format_bytes(kernel.weight_bytes)),
            number("states", lambda kernel: format_bytes(kernel.optimizer_bytes)),
            number("rest", lambda kernel: format_bytes(kernel.other_bytes)),
            *_tiers(statistics.kernels),
        ),
        "Bytes on all ranks together, every replica counted; weights, states and the rest are the "
        "bytes of the memories. Named: tables whose kernels the job limits.",
    )


def _tiers(held: Sequence[KernelStatistics | TableStatistics]) -> list[Cell[Any]]:
    """A column for each memory in which something lies."""
    used = [tier for tier in TIERS if any(getattr(each, f"{tier}_bytes") for each in held)]
    return [number(tier.upper(), _bytes_of(tier)) for tier in used]


def _bytes_of(tier: Tier) -> Callable[[Any], str]:
    return lambda each: format_bytes(getattr(each, f"{tier}_bytes"))


def lookups_sheet(statistics: Statistics) -> Sheet:
    """What each table is asked for in a step."""
    cells: list[Cell[TableStatistics]] = [
        text("name", lambda table: printable(table.name)),
        number("features", lambda table: f"{table.features:,}"),
        number("ids/bag", lambda table: f"{table.pooling_factor:g}"),
        number("bags", lambda table: f"{table.num_poolings:g}"),
        number("ids/step", lambda table: f"{table.ids:,.10g}"),
        text("lookup", _lookup),
        number("width", lambda table: f"{table.columns:,}"),
    ]
    if any(table.load_factor is not None for table in statistics.tables):
        cells.append(number("cached", _cached))
    return sheet_of(
        "Lookups per table",
        statistics.tables,
        cells,
        "Ids per bag and bags are sums over the features, ids per step those of one rank; the "
        "width is that of a shard.",
    )


def _lookup(table: TableStatistics) -> str:
    return ("pooled" if table.pooled else "sequence") + (", weighted" if table.weighted else "")


def _cached(table: TableStatistics) -> str:
    return "" if table.load_factor is None else percent(table.load_factor)


def storage_sheet(plan: Plan, statistics: Statistics) -> Sheet:
    """What each table takes of each memory on all ranks together."""
    return sheet_of(
        "Storage per table",
        statistics.tables,
        (
            text("name", lambda table: printable(table.name)),
            text("sharding", lambda table: printable(table.sharding_type)),
            text("kernel", lambda table: printable(table.compute_kernel)),
            *_tiers(statistics.tables),
            text("rank", lambda table: ranks_text(table.ranks, plan.world_size)),
        ),
        ALL_SHARDS,
    )


ALL_SHARDS = "Sums over all shards of a table, whichever ranks they lie on."


def seconds_sheet(statistics: Statistics) -> Sheet:
    """What each table takes of each part of a step on all ranks together."""
    tables = statistics.tables
    total = sum(table.seconds for table in tables)
    parts = [p.part for p in statistics.parts if any(t.parts.get(p.part) for t in tables)]
    return sheet_of(
        "Seconds per table",
        tables,
        (
            text("name", lambda table: printable(table.name)),
            number("seconds", lambda table: format_seconds(table.seconds)),
            number("share", lambda table: percent(table.seconds / total if total else 0.0)),
            *map(sheets.seconds_of, parts),
        ),
        ALL_SHARDS,
    )
