"""A plan as sheets and lines of text: its tables, dense units, ranks, search and assumptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from msgspec import UNSET

from shardwright.core.cluster import TIERS
from shardwright.core.placement import Replicate, shared_words
from shardwright.core.quantities import counted, format_bytes, format_seconds
from shardwright.core.sharding import traits
from shardwright.core.timeline import BESIDE, EXACT_KINDS, Kind, category, decode, exchange_seconds
from shardwright.cost.clock import between, has_clock
from shardwright.job.model_of_job import step_dtypes
from shardwright.job.plan import Plan, RankTotals, TablePlan, UnitPlan
from shardwright.report.sheet import Cell, Column, Sheet, number, sheet_of, text
from shardwright.report.wording import (
    TEXT_LIMIT,
    about_seconds,
    fitting,
    percent,
    placement_text,
    printable,
    ranks_text,
    shards_text,
    size_text,
)

T = TypeVar("T")
MOST_TABLES = 40
MOST_UNITS = 10**6
MOST_RANKS = 16
NO_GAP = 1e-9  # a smaller one is rounding
TABLE_KINDS: tuple[Kind, ...] = (
    "weight",
    "gradient",
    "optimizer_state",
    "cache",
    "input",
    "output",
)
# Kinds of bytes that a rank's row can do without, the first to leave with the highest number.
_SPARE: dict[Kind, int] = {"padding": 5, "cache": 4, "gradient": 3, "input": 2, "output": 2}
AHEAD = ", the next unit's are gathered while one computes"


def headline(plan: Plan) -> str:
    """What is planned, in one line."""
    cluster, batch = plan.cluster, plan.job.batch
    parts = [counted(len(plan.tables), "table")] if plan.tables else []
    what = f"{' '.join(parts)} alone"
    if plan.job.model.traits.has_step:
        parts.append(counted(len(plan.units), "dense unit"))
        what = f"{printable(plan.job.model.name)}: {' and '.join(parts)}"
    hosts = -(-cluster.world_size // cluster.local_world_size)
    where = f" of {hosts} hosts" if hosts > 1 else ""
    if plan.job.train.in_one_process:
        where = " of one process"
    traits, length = plan.job.model.traits, ""
    if traits.reads_text and not traits.is_estimated:
        length = f" of {counted(batch.sequence, 'token')}"
    return (
        f"{what} on {counted(plan.world_size, f'{cluster.compute_device} rank')}{where}, "
        f"{counted(batch.size, 'sample')}{length} per rank and step{_dtypes(plan)}"
    )


def _dtypes(plan: Plan) -> str:
    """What is computed in, where a job or its model may say so."""
    if not plan.job.model.traits.is_estimated:
        return ""
    param, reduce = step_dtypes(plan.job)
    own = sorted({t.dtype for unit in plan.model.units for t in unit.tensors})
    sums = f", gradients summed in {reduce}" if reduce and reduce != (param or own) else ""
    return f", in {param or ' and '.join(own)}{sums}"


def fits_line(plan: Plan) -> str:
    """What the rank that needs most needs, beside what it may fill."""
    held = f"{plan.cluster.decisive_tier}_bytes"
    fullest = max(plan.ranks, key=lambda totals: getattr(totals, held))
    inside = f", most in {printable(fullest.peak_phase)}" if plan.units else ""
    where = f"rank {fullest.rank}{inside}"
    text = fitting(*plan.needed, plan.budget, where, plan.cluster.decisive_tier.upper())
    return f"{text}{_elsewhere(plan)}"


def _elsewhere(plan: Plan) -> str:
    """What lies in slower memories."""
    slower = (f"{tier}_bytes" for tier in TIERS if tier != plan.cluster.decisive_tier)
    sizes = {held: sum(getattr(totals, held) for totals in plan.ranks) for held in slower}
    words = [f"{format_bytes(size)} in {held[:3].upper()}" for held, size in sizes.items() if size]
    return f" Beside it all ranks together have {' and '.join(words)}." if words else ""


def speed_line(plan: Plan) -> str:
    """How fast the plan is, beside the proven bound."""
    said = about_seconds if is_rough(plan) else format_seconds
    slowest = f"The slowest rank takes {step_text(plan)} per step"
    known = " of TorchRec's options" if plan.job.planner.as_torchrec else ""
    if plan.search.tried and any(unit.checkpointed for unit in plan.units):
        known = " with this checkpointing"
    if plan.search.tried and plan.search.tried[0].zero is not UNSET:
        known += " at this stage"
    proven = (
        f"; no plan{known} can take less than {said(plan.lower_bound_seconds)} "
        f"(gap {percent(plan.gap)})."
    )
    if plan.gap < NO_GAP:
        proven = f", and no plan{known} can take less (gap 0 %)."
    return f"{slowest}{proven}"


def is_rough(plan: Plan) -> bool:
    """Whether seconds rest on constants of a preset, which nobody measured on this machine."""
    return plan.job.planner.constants == "cluster" and plan.job.cluster.measured is None


def step_text(plan: Plan) -> str:
    """Seconds of a step, those of a preset with their range and without a third digit."""
    seconds = plan.max_rank_seconds
    if not is_rough(plan):
        return format_seconds(seconds)
    about, values = f"about {about_seconds(seconds)}", plan.cluster.values
    if not has_clock(values):
        return about
    low, high = map(about_seconds, between(seconds, values))
    return f"{about} ({low} to {high})"


def hidden_line(plan: Plan) -> str:
    """What of exchanges costs the slowest rank nothing, for it computes meanwhile; empty where
    nothing travels then."""
    slowest = max(plan.ranks, key=lambda totals: totals.seconds).rank
    found = exchange_seconds(decode(plan.timeline))
    hidden, exposed = (
        {name: s for (rank, _, name, k), s in found.items() if rank == slowest and k == kind}
        for kind in BESIDE
    )
    if not hidden:
        return ""
    parts = ", ".join(
        f"{format_seconds(seconds)} of {format_seconds(seconds + exposed[name])} of "
        f"{printable(name.replace('_', ' '))}"
        for name, seconds in hidden.items()
    )
    return f"Rank {slowest}, the slowest, hides exchanges behind compute: {parts}."


def search_line(plan: Plan) -> str:
    """What finding the plan took."""
    return (
        f"The search ({printable(plan.search.name)}) tried "
        f"{counted(plan.search.proposals, 'proposal')}, {plan.search.feasible:,} of which fit, "
        f"in {format_seconds(plan.search.wall_seconds)}."
    )


def assumptions(plan: Plan) -> tuple[str, ...]:
    """The plan's assumptions, printable."""
    return tuple(printable(text, TEXT_LIMIT) for text in plan.assumptions)


def table_bytes(table: TablePlan) -> int:
    """Bytes on all ranks together."""
    return sum(shard.run.count * sum(shard.storage) for shard in table.shards)


def longest_seconds(tables: Iterable[TablePlan]) -> float:
    """Seconds per step on the rank where the tables together take longest."""
    # Summed rank by rank and not table by table: tables that lie on different ranks take their time
    # at once.
    by_rank: dict[int, float] = {}
    for shard in (shard for table in tables for shard in table.shards):
        seconds = shard.total_seconds
        for rank in shard.ranks:
            by_rank[rank] = by_rank.get(rank, 0.0) + seconds
    return max(by_rank.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Tables that share a row of the sheet."""

    tables: tuple[TablePlan, ...]
    label: str
    smaller: bool = False  # what is left beside those that have rows of their own

    @property
    def nbytes(self) -> int:
        return sum(table_bytes(table) for table in self.tables)

    @property
    def size(self) -> str:
        same = len({(t.rows, t.dim) for t in self.tables}) == 1
        return size_text(self.tables[0].rows, self.tables[0].dim) if same else "various"

    @property
    def shards(self) -> str:
        first = self.tables[0]
        same = len({t.shard_sizes for t in self.tables}) == 1
        replicated = traits(first.sharding_type).replicated
        return shards_text(first.shard_sizes, replicated) if same else "various"

    @property
    def ranks(self) -> set[int]:
        return {rank for table in self.tables for rank in table.ranks}


def tables_sheet(plan: Plan, most: int = MOST_TABLES) -> Sheet:
    """One row per table, by sharding type and size; beyond ``most`` equal ones share a row."""
    weight: dict[str, int] = {}
    for table in plan.tables:
        weight[table.sharding_type] = weight.get(table.sharding_type, 0) + table_bytes(table)
    bundles = sorted(
        _bundles(plan.tables, most),
        key=lambda b: (
            -weight[b.tables[0].sharding_type],
            b.tables[0].sharding_type,
            b.smaller,
            -b.nbytes,
        ),
    )
    total = sum(weight.values())
    return sheet_of(
        "Embedding tables",
        bundles,
        (
            text("name", lambda b: b.label),
            number("rows x dim", lambda b: b.size),
            text("sharding", lambda b: printable(b.tables[0].sharding_type)),
            text("kernel", lambda b: printable(b.tables[0].compute_kernel), spare=1),
            text("rank", lambda b: ranks_text(b.ranks, plan.world_size)),
            number("shards", lambda b: b.shards, spare=2),
            number("bytes", lambda b: format_bytes(b.nbytes)),
            number("s/step", lambda b: format_seconds(longest_seconds(b.tables))),
        ),
        f"{counted(len(plan.tables), 'table')}, {format_bytes(total)} on all ranks together. "
        "Seconds are those of the rank where the tables of a row take longest.",
    )


def _bundles(tables: Sequence[TablePlan], most: int) -> list[_Bundle]:
    """Tables alone, or, if there are many, equal ones together and the smallest by type."""
    if len(tables) <= most:
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
    for bundle in bundles[most:]:
        for t in bundle.tables:
            rest.setdefault((t.sharding_type, t.compute_kernel), []).append(t)
    smaller = [
        _Bundle(tuple(r), counted(len(r), "smaller table"), smaller=True) for r in rest.values()
    ]
    return bundles[:most] + smaller


def _label(tables: Sequence[TablePlan]) -> str:
    first = printable(tables[0].name)
    if len(tables) == 1:
        return first
    return f"{first} and {len(tables) - 1:,} alike"


def units_sheet(plan: Plan, most: int = MOST_UNITS) -> Sheet:
    """Where each role of a unit lives, its bytes, calls, seconds; neighbours alike share a row, and
    so do the fastest where there are more than ``most`` rows."""
    facts: list[Cell[UnitPlan]] = [
        text("placement", _placements),
        text("optimizer", lambda unit: printable(unit.optimizer), spare=3),
        text("reshard after\nforward", _resharded, spare=1),
        number("bytes/rank", lambda unit: format_bytes(unit.bytes_per_rank)),
        number("padding", lambda unit: format_bytes(unit.padding_bytes), spare=5),
        number("communication\nvolume", lambda unit: format_bytes(unit.bytes_per_step), spare=2),
        number("calls", lambda unit: str(unit.collectives), spare=4),
        number("s/step", lambda unit: format_seconds(unit.seconds)),
    ]
    if any(unit.checkpointed for unit in plan.units):
        facts.insert(1, text("checkpointing", _checkpointing))
    words = sum(not column.numeric for column, _ in facts)
    return Sheet(
        "Dense units (modules wrapped as one, as by FSDP)",
        (Column("unit"), *(column for column, _ in facts)),
        tuple(_unit_rows(plan.units, most, [cell for _, cell in facts], words)),
        "Without resharding after forward gathered weights stay until backward"
        f"{AHEAD if plan.prefetch else ''}. Padding is the part of a rank's bytes that belongs to "
        "no tensor. The communication volume is that of a step: full buffers of all calls of "
        "collectives.",
    )


def _unit_rows(
    units: Sequence[UnitPlan], most: int, facts: Sequence[Callable[[UnitPlan], str]], words: int
) -> Iterator[tuple[str, ...]]:
    """Neighbours with equal ``facts`` once, by the first and the last name, the fastest together,
    of which the first ``words`` facts say nothing."""
    # Alike as they are shown, and only neighbours: a row "a to c" must have everything between the
    # two.
    grouped = groupby(units, lambda unit: tuple(fact(unit) for fact in facts))
    rows = [(own, tuple(alike)) for own, alike in grouped]
    slowest = sorted(rows, key=lambda row: -_seconds(row[1]))[:most]
    rest = [unit for row in rows if row not in slowest for unit in row[1]]
    for own, alike in (row for row in rows if row in slowest):
        names = [printable(unit.name) for unit in alike]
        many = f"{names[0]} to {names[-1]} ({counted(len(names), 'unit')})"
        yield (many if len(names) > 1 else names[0], *own)
    if rest:
        yield (
            counted(len(rest), "faster unit"),
            *("various" for _ in range(words)),
            format_bytes(sum(unit.bytes_per_rank for unit in rest)),
            format_bytes(sum(unit.padding_bytes for unit in rest)),
            format_bytes(sum(unit.bytes_per_step for unit in rest)),
            str(sum(unit.collectives for unit in rest)),
            format_seconds(_seconds(rest)),
        )


def _seconds(units: Iterable[UnitPlan]) -> float:
    return sum(unit.seconds for unit in units)


def _placements(unit: UnitPlan) -> str:
    """Where weights, gradients and states live, at once where they live alike."""
    each = [placement_text(p) for p in (unit.parameter, unit.gradient, unit.optimizer_state)]
    where = ", on the host" if unit.offloaded is True else ""
    if len(set(each)) == 1:
        return each[0] + where
    if each[0] == each[1]:
        return f"{each[0]}, states {each[2]}{where}"
    roles = zip(("weights", "gradients", "states"), each, strict=True)
    return ", ".join(f"{a} {b}" for a, b in roles) + where


def _checkpointing(unit: UnitPlan) -> str:
    """The policy of a unit, and of how many of its modules it is where it is not of all."""
    count, of = len(unit.checkpointed), len(unit.modules)
    name = printable(unit.checkpointing)
    return f"{name}, {count} of {of}" if 0 < count < of else name


def checkpointing_line(plan: Plan) -> str:
    """What was found with each checkpointing policy and stage of ZeRO, in one line; empty where
    the job or memory left no choice open."""
    if plan.search.tried is UNSET:
        return ""
    found = []
    for tried in plan.search.tried:
        if tried.max_rank_seconds is None:
            text = f"needs {format_bytes(tried.peak_bytes)}, too much"
        else:
            seconds = format_seconds(tried.max_rank_seconds)
            text = f"{seconds} at a peak of {format_bytes(tried.peak_bytes)}"
        stage = "" if tried.zero is UNSET else f"{shared_words(tried.zero, tried.replicas or 1)}, "
        if tried.bucket_size:
            stage += f"buckets of {tried.bucket_size:,}, "
        found.append(f"{stage}{printable(tried.checkpointing)} {text}")
    by = "checkpointing" if plan.search.tried[0].zero is UNSET else "stage and checkpointing"
    if any(tried.bucket_size for tried in plan.search.tried):
        by = "stage, elements of a bucket and checkpointing"
    return f"By {by}: {'; '.join(found)}."


def _resharded(unit: UnitPlan) -> str:
    """FSDP's ``reshard_after_forward``, which says nothing of weights that are whole anyway."""
    if isinstance(unit.parameter, Replicate):
        return "-"
    return str(unit.reshard_after_forward).lower()


def ranks_sheet(plan: Plan, most: int = MOST_RANKS) -> Sheet:
    """Bytes by kind on each rank, against what it may fill, and seconds; alike ranks share a row.

    Of a step the bytes are those at its simulated peak, of tables alone those that are counted.
    """
    cells = _rank_cells(plan)
    own = {totals.rank: totals for totals in plan.ranks}
    sheet, more = by_rank(plan, "Memory and time per rank", own, cells, most)
    filled = [k for k in range(len(cells) + 1) if not sheet.rows or any(r[k] for r in sheet.rows)]
    sheet = sheet.only(filled)  # an empty cell is nothing at all
    budget = plan.budget
    what = "Live bytes at the predicted peak" if plan.units else "Bytes that are counted"
    return replace(
        sheet,
        rows=tuple(tuple(cell or "0 B" for cell in row) for row in sheet.rows),
        note=f"{what}; the budget is {format_bytes(budget)} ({budget:,} B) per rank"
        f"{_of_all(plan)}.{more}",
    )


def budget_sentence(plan: Plan) -> str:
    """What a rank may fill, and what the reservation leaves that of."""
    return f"The budget is {format_bytes(plan.budget)} per rank{_of_all(plan)}."


def _of_all(plan: Plan) -> str:
    whole = plan.cluster.memory_per_rank
    aside = whole - plan.budget
    if aside <= 0:
        return ""
    return f", what the reservation of {format_bytes(aside)} leaves of {format_bytes(whole)}"


Groups = list[tuple[tuple[str, ...], list[int]]]


def by_rank(
    plan: Plan, title: str, subjects: Mapping[int, T], cells: Sequence[Cell[T]], most: int
) -> tuple[Sheet, str]:
    """A row for every rank's subject, alike ones as one row, and at ``most`` so many, of which a
    second text says that they are not all."""
    # By what the cells say: thousands of ranks differ in the last byte and read the same.
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, subject in subjects.items():
        alike.setdefault(tuple(cell(subject) for _, cell in cells), []).append(rank)
    groups, more = list(alike.items()), ""
    if len(groups) > most:
        groups = worst(plan, groups, most)
        more = f" Of {plan.world_size} ranks those with the highest peak and the slowest are shown."
    columns = (Column("rank"), *(column for column, _ in cells))
    rows = tuple((ranks_text(ranks, plan.world_size), *row) for row, ranks in groups)
    return Sheet(title, columns, rows), more


def worst(plan: Plan, groups: Groups, most: int) -> Groups:
    """The groups of the fullest and of the slowest ranks, half of each, in the order of ranks."""
    by_rank = {totals.rank: totals for totals in plan.ranks}
    first = [(by_rank[ranks[0]], index) for index, (_, ranks) in enumerate(groups)]
    fullest = sorted(first, key=lambda g: (-g[0].peak_bytes, -g[0].seconds, g[1]))
    slowest = sorted(first, key=lambda g: (-g[0].seconds, -g[0].peak_bytes, g[1]))
    # In turn from both lists, so that neither the fullest nor the slowest are crowded out.
    chosen: list[int] = []
    for pair in zip(fullest, slowest, strict=True):
        chosen += [index for _, index in pair if index not in chosen]
    return [groups[index] for index in sorted(chosen[:most])]


def _kinds(plan: Plan) -> tuple[Kind, ...]:
    """The kinds of bytes that have a column of their own."""
    return EXACT_KINDS if plan.units else TABLE_KINDS


def _rank_cells(plan: Plan) -> list[Cell[RankTotals]]:
    """Every column but the rank's; an empty cell is nothing at all."""
    kinds, budget, other = _kinds(plan), plan.budget, plan.units

    def size(nbytes: int, *, said: bool = False) -> str:
        return format_bytes(nbytes) if nbytes or said else ""

    def used(totals: RankTotals) -> str:
        share = totals.peak_bytes / budget if budget > 0 else 0.0
        return percent(share) if share <= 1 else f"{percent(share)}, too much"

    def at_peak(kind: Kind) -> Cell[RankTotals]:
        title = category(kind).removeprefix("optimizer ")
        spare = _SPARE.get(kind, 0)
        return number(title, lambda t: size(t.at_peak.get(kind, 0), said=bool(other)), spare)

    def rest(totals: RankTotals) -> str:
        named = sum(totals.at_peak.get(kind, 0) for kind in kinds)
        return format_bytes(totals.peak_bytes - named)

    def tier(name: str) -> Cell[RankTotals]:
        return number(name.upper(), lambda totals: size(getattr(totals, f"{name}_bytes")))

    peak_in: list[Cell[RankTotals]] = []
    if plan.units:
        peak_in.append(text("peak in", lambda totals: printable(totals.peak_phase)))
    return [
        *map(at_peak, kinds),
        *([number("rest", rest)] if plan.units else []),
        number(
            "peak" if plan.units else plan.cluster.decisive_tier.upper(),
            lambda totals: format_bytes(totals.peak_bytes),
        ),
        number("used", used, spare=1),
        *(tier(name) for name in TIERS if name != plan.cluster.decisive_tier),
        *peak_in,
        number("s/step", lambda totals: format_seconds(totals.seconds)),
    ]
