"""A plan with all that it adds up to, in a terminal.

The sheets of its tables and kernels, what they are asked for and what that takes, are only here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.text import Text

from shardwright.core.cluster import TIERS, Tier
from shardwright.core.plan import Plan
from shardwright.core.quantities import format_bytes, format_seconds
from shardwright.core.statistics import KernelStatistics, MemoryPrice, Statistics, TableStatistics
from shardwright.report import plan_sheets
from shardwright.report import statistics_sheets as sheets
from shardwright.report.sheet import Column, Sheet
from shardwright.report.statistics_sheets import PART_TITLES
from shardwright.report.table import drawn, listed, spaced
from shardwright.report.wording import percent, printable, ranks_text

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
    lookups = tabled and (full or (few and not is_plain(statistics)))
    kernels = tabled and (full or len(statistics.kernels) > 1)
    shown = [
        plan_sheets.tables_sheet(plan, most_tables) if tabled else None,
        lookups_sheet(statistics) if lookups else None,
        storage_sheet(plan, statistics) if full and tabled else None,
        seconds_sheet(statistics) if full and tabled else None,
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
        kernels_sheet(statistics) if kernels else None,
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


def kernels_sheet(statistics: Statistics) -> Sheet:
    """Tables and bytes by compute kernel."""
    tiers = _used(statistics.kernels)
    rows = tuple(
        (
            printable(kernel.kernel),
            f"{kernel.tables:,}",
            f"{kernel.named:,}",
            format_bytes(kernel.weight_bytes),
            format_bytes(kernel.optimizer_bytes),
            format_bytes(kernel.other_bytes),
            *(format_bytes(getattr(kernel, f"{tier}_bytes")) for tier in tiers),
        )
        for kernel in statistics.kernels
    )
    return Sheet(
        "Compute kernels",
        (
            Column("kernel"),
            Column("tables", numeric=True),
            Column("named", numeric=True),
            Column("weights", numeric=True),
            Column("states", numeric=True),
            Column("rest", numeric=True),
            *(Column(tier.upper(), numeric=True) for tier in tiers),
        ),
        rows,
        "Bytes on all ranks together, every replica counted; weights, states and the rest are the "
        "bytes of the memories. Named: tables whose kernels the job limits.",
    )


def _used(held: Iterable[KernelStatistics | TableStatistics]) -> tuple[Tier, ...]:
    """The memories in which something lies."""
    held = tuple(held)
    return tuple(tier for tier in TIERS if any(getattr(h, f"{tier}_bytes") for h in held))


def lookups_sheet(statistics: Statistics) -> Sheet:
    """What each table is asked for in a step."""
    cached = any(table.load_factor is not None for table in statistics.tables)
    return Sheet(
        "Lookups per table",
        (
            Column("name"),
            Column("features", numeric=True),
            Column("ids/bag", numeric=True),
            Column("bags", numeric=True),
            Column("ids/step", numeric=True),
            Column("lookup"),
            Column("width", numeric=True),
            *((Column("cached", numeric=True),) if cached else ()),
        ),
        tuple(_lookup_row(table, cached) for table in statistics.tables),
        "Ids per bag and bags are sums over the features, ids per step those of one rank; the "
        "width is that of a shard.",
    )


def _lookup_row(table: TableStatistics, cached: bool) -> tuple[str, ...]:
    lookup = ("pooled" if table.pooled else "sequence") + (", weighted" if table.weighted else "")
    share = "" if table.load_factor is None else percent(table.load_factor)
    return (
        printable(table.name),
        f"{table.features:,}",
        f"{table.pooling_factor:g}",
        f"{table.num_poolings:g}",
        f"{table.ids:,.10g}",
        lookup,
        f"{table.columns:,}",
        *((share,) if cached else ()),
    )


def storage_sheet(plan: Plan, statistics: Statistics) -> Sheet:
    """What each table takes of each memory on all ranks together."""
    tiers = _used(statistics.tables)
    return Sheet(
        "Storage per table",
        (
            Column("name"),
            Column("sharding"),
            Column("kernel", under="sharding"),
            *(Column(tier.upper(), numeric=True) for tier in tiers),
            Column("rank"),
        ),
        tuple(
            (
                printable(table.name),
                printable(table.sharding_type),
                printable(table.compute_kernel),
                *(format_bytes(getattr(table, f"{tier}_bytes")) for tier in tiers),
                ranks_text(table.ranks, plan.world_size),
            )
            for table in statistics.tables
        ),
        "Sums over all shards of a table, whichever ranks they lie on.",
    )


def seconds_sheet(statistics: Statistics) -> Sheet:
    """What each table takes of each part of a step on all ranks together."""
    tables = statistics.tables
    parts = [p.part for p in statistics.parts if any(t.parts.get(p.part) for t in tables)]
    return Sheet(
        "Seconds per table",
        (
            Column("name"),
            Column("seconds", numeric=True),
            *(Column(PART_TITLES.get(part, part), numeric=True) for part in parts),
        ),
        tuple(
            (
                printable(table.name),
                format_seconds(table.seconds),
                *(format_seconds(table.parts.get(part, 0.0)) for part in parts),
            )
            for table in tables
        ),
        "Sums over all shards of a table, whichever ranks they lie on.",
    )


def is_plain(statistics: Statistics) -> bool:
    """Whether every table is one pooled, unweighted lookup of one id per sample, and not cached."""
    return all(
        table.pooled
        and not table.weighted
        and table.load_factor is None
        and (table.features, table.pooling_factor, table.num_poolings) == (1, 1.0, 1.0)
        for table in statistics.tables
    )
