"""A plan as sheets and lines of text: its tables, dense units, ranks, search and assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.placement import Replicate
from shardwright.core.plan import Plan, RankTotals, TablePlan, UnitPlan
from shardwright.core.units import format_bytes, format_seconds
from shardwright.report.sheet import Column, Sheet
from shardwright.report.wording import (
    TEXT_LIMIT,
    counted,
    percent,
    placement_text,
    printable,
    ranks_text,
    shards_text,
    size_text,
)

MOST_TABLES = 40
MOST_RANKS = 16


def headline(plan: Plan) -> str:
    """What is planned, in one line."""
    return (
        f"{plan.job.model.kind}: {counted(len(plan.tables), 'table')} and "
        f"{counted(len(plan.units), 'dense unit')} on "
        f"{counted(plan.world_size, f'{plan.cluster.compute_device} rank')}, "
        f"{counted(plan.job.batch.size, 'sample')} per rank and step"
    )


def search_line(plan: Plan) -> str:
    """How good the plan is and what finding it took, in one line."""
    return (
        f"The slowest rank takes {format_seconds(plan.max_rank_seconds)} per step; no plan can "
        f"take less than {format_seconds(plan.lower_bound_seconds)} (gap {percent(plan.gap)}). "
        f"The search ({printable(plan.search.name)}) tried "
        f"{counted(plan.search.proposals, 'proposal')}, {plan.search.feasible:,} of which fit, "
        f"in {format_seconds(plan.search.wall_seconds)}."
    )


def assumptions(plan: Plan) -> tuple[str, ...]:
    """The plan's assumptions, printable."""
    return tuple(printable(text, TEXT_LIMIT) for text in plan.assumptions)


def table_bytes(table: TablePlan) -> int:
    """Bytes on all ranks together."""
    return sum(table.nbytes)


def table_seconds(table: TablePlan) -> float:
    """Seconds per step on the rank where the table takes longest."""
    by_rank: dict[int, float] = {}
    for rank, seconds in zip(table.ranks, table.seconds, strict=False):
        by_rank[rank] = by_rank.get(rank, 0.0) + seconds
    return max(by_rank.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Tables that share a row of the sheet."""

    tables: tuple[TablePlan, ...]
    label: str

    @property
    def nbytes(self) -> int:
        return sum(table_bytes(table) for table in self.tables)

    def row(self, world_size: int) -> tuple[str, ...]:
        first = self.tables[0]
        same_size = len({(t.rows, t.dim) for t in self.tables}) == 1
        same_cut = len({t.shard_sizes for t in self.tables}) == 1
        replicated = first.sharding_type == "data_parallel"
        return (
            self.label,
            size_text(first.rows, first.dim) if same_size else "various",
            printable(first.sharding_type),
            printable(first.compute_kernel),
            ranks_text((rank for t in self.tables for rank in t.ranks), world_size),
            shards_text(first.shard_sizes, replicated) if same_cut else "various",
            format_bytes(self.nbytes),
            format_seconds(sum(table_seconds(t) for t in self.tables)),
        )


def tables_sheet(plan: Plan) -> Sheet:
    """One row per table, by sharding type and size; beyond 40 tables equal ones share a row."""
    weight: dict[str, int] = {}
    for table in plan.tables:
        weight[table.sharding_type] = weight.get(table.sharding_type, 0) + table_bytes(table)
    bundles = sorted(
        _bundles(plan.tables),
        key=lambda b: (
            -weight[b.tables[0].sharding_type],
            b.tables[0].sharding_type,
            -b.nbytes,
        ),
    )
    total = sum(weight.values())
    return Sheet(
        "Embedding tables",
        (
            Column("name"),
            Column("rows x dim", numeric=True, under="name"),
            Column("sharding"),
            Column("kernel", under="sharding"),
            Column("rank"),
            Column("shards", numeric=True),
            Column("bytes", numeric=True),
            Column("s/step", numeric=True),
        ),
        tuple(bundle.row(plan.world_size) for bundle in bundles),
        f"{counted(len(plan.tables), 'table')}, {format_bytes(total)} on all ranks together. "
        "Seconds are those of the rank where a table takes longest.",
    )


def _bundles(tables: Sequence[TablePlan]) -> list[_Bundle]:
    """Tables alone, or, if there are many, equal ones together and the smallest by type."""
    if len(tables) <= MOST_TABLES:
        return [_Bundle((table,), printable(table.name)) for table in tables]
    equal: dict[tuple[object, ...], list[TablePlan]] = {}
    for t in tables:
        equal.setdefault(
            (t.sharding_type, t.compute_kernel, t.rows, t.dim, t.shard_sizes), []
        ).append(t)
    bundles = sorted(
        (_Bundle(tuple(same), _label(same)) for same in equal.values()), key=lambda b: -b.nbytes
    )
    rest: dict[tuple[str, str], list[TablePlan]] = {}
    for bundle in bundles[MOST_TABLES:]:
        for t in bundle.tables:
            rest.setdefault((t.sharding_type, t.compute_kernel), []).append(t)
    smaller = [_Bundle(tuple(r), f"{counted(len(r), 'smaller table')}") for r in rest.values()]
    return bundles[:MOST_TABLES] + smaller


def _label(tables: Sequence[TablePlan]) -> str:
    first = printable(tables[0].name)
    if len(tables) == 1:
        return first
    return f"{first} to {printable(tables[-1].name)} ({counted(len(tables), 'table')})"


def units_sheet(plan: Plan) -> Sheet:
    """One row per dense unit: where each role lives, bytes per rank, padding, seconds."""
    return Sheet(
        "Dense units",
        (
            Column("unit"),
            Column("weights"),
            Column("gradients"),
            Column("states"),
            Column("optimizer", under="unit"),
            Column("full weights", under="weights"),
            Column("bytes/rank", numeric=True),
            Column("padding", numeric=True, under="bytes/rank"),
            Column("s/step", numeric=True),
        ),
        tuple(_unit_row(unit) for unit in plan.units),
        "Gathered full weights are freed after a pass or kept from forward to backward. Padding is "
        "the part of a rank's bytes that belongs to no tensor.",
    )


def _unit_row(unit: UnitPlan) -> tuple[str, ...]:
    if isinstance(unit.parameter, Replicate):
        full = "always"
    else:
        full = "freed" if unit.reshard_after_forward else "kept"
    return (
        printable(unit.name),
        placement_text(unit.parameter),
        placement_text(unit.gradient),
        placement_text(unit.optimizer_state),
        printable(unit.optimizer),
        full,
        format_bytes(unit.bytes_per_rank),
        format_bytes(unit.padding_bytes),
        format_seconds(unit.seconds),
    )


def ranks_sheet(plan: Plan) -> Sheet:
    """Bytes by kind at each rank's peak, against the budget, and seconds; alike of many as one."""
    budget = plan.cluster.memory_per_rank
    alike: dict[tuple[str, ...], list[RankTotals]] = {}
    for totals in plan.ranks:
        row = _rank_row(totals, budget)
        key = row if len(plan.ranks) > MOST_RANKS else (str(totals.rank), *row)
        alike.setdefault(key, []).append(totals)
    groups, more = list(alike.items()), ""
    if len(groups) > MOST_RANKS:
        groups.sort(key=lambda group: (-group[1][0].peak_bytes, -group[1][0].seconds))
        groups = groups[:MOST_RANKS]
        more = f" Of {len(plan.ranks)} ranks the fullest and slowest are shown."
    rows = tuple(
        (ranks_text((totals.rank for totals in same), plan.world_size), *key[-9:])
        for key, same in groups
    )
    return Sheet(
        "Memory and time per rank",
        (
            Column("rank"),
            Column("weights", numeric=True),
            Column("gradients", numeric=True),
            Column("states", numeric=True),
            Column("padding", numeric=True),
            Column("rest", numeric=True),
            Column("peak", numeric=True),
            Column("used", numeric=True, under="peak"),
            Column("peak in"),
            Column("s/step", numeric=True),
        ),
        rows,
        f"Live bytes at the predicted peak; the budget is {format_bytes(budget)} "
        f"({budget:,} B) per rank.{more}",
    )


def _rank_row(totals: RankTotals, budget: int) -> tuple[str, ...]:
    kinds = ("weight", "gradient", "optimizer_state", "padding")
    named = [totals.at_peak.get(kind, 0) for kind in kinds]
    used = totals.peak_bytes / budget if budget else 0.0
    return (
        *(format_bytes(nbytes) for nbytes in named),
        format_bytes(totals.peak_bytes - sum(named)),
        format_bytes(totals.peak_bytes),
        percent(used) if used <= 1 else f"{percent(used)}, too much",
        printable(totals.peak_phase),
        format_seconds(totals.seconds),
    )
