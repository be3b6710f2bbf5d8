"""A plan's tables and kernels as sheets: what they are asked for, and what that takes."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.core.cluster import TIERS, Tier
from shardwright.core.plan import Plan
from shardwright.core.quantities import format_bytes, format_seconds
from shardwright.core.statistics import KernelStatistics, Statistics, TableStatistics
from shardwright.report.sheet import Column, Sheet
from shardwright.report.statistics_sheets import PART_TITLES
from shardwright.report.wording import percent, printable, ranks_text


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
