"""Recomputes a plan's numbers as derivations, from the sizes and constants stored in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from shardwright.core.amount import (
    Amount,
    Step,
    ceil_div,
    derivation,
    leaf,
    maximum,
    minimum,
    named,
    total,
)
from shardwright.core.batch import Batch, lookups
from shardwright.core.errors import InputError, MismatchError, expected
from shardwright.core.model import TableSpec
from shardwright.core.placement import describe
from shardwright.core.plan import Plan, TablePlan
from shardwright.core.specs import model_spec
from shardwright.core.tensor import element_bytes
from shardwright.core.timeline import decode
from shardwright.cost import dense, embedding
from shardwright.planner.draft import Draft, Placed
from shardwright.planner.greedy import replaced
from shardwright.planner.planner import assemble
from shardwright.planner.problem import TableChoice, UnitChoice, make_problem

TABLE_KINDS = ("weight", "gradient", "optimizer_state")
RECOMPUTED = (
    "ranks",
    "tables",
    "units",
    "blocks",
    "assumptions",
    "max_rank_seconds",
    "lower_bound_seconds",
    "gap",
)
UNIT_KINDS = ("weight", "gradient", "optimizer_state", "padding")


@dataclass(frozen=True, slots=True)
class Explanation:
    """One number of a plan: what it is, the value stored, and every step that leads to it."""

    title: str
    stored: float
    unit: str
    steps: tuple[Step, ...]


def draft_of(plan: Plan) -> Draft:
    """The draft a plan was written from; raises MismatchError if its numbers come out otherwise."""
    problem = make_problem(plan.job, model_spec(plan.job))
    _same("plan: tables", [t.name for t in plan.tables], [t.name for t in problem.model.tables])
    _same("plan: units", [u.name for u in plan.units], [u.name for u in problem.model.units])
    placed = []
    for table, choices in zip(plan.tables, problem.tables, strict=True):
        types = {choice.option.sharding_type: choice for choice in choices}
        if table.sharding_type not in types:
            raise MismatchError(
                expected(
                    f"plan: table '{table.name}'",
                    f"one of {', '.join(types)}",
                    table.sharding_type,
                    "Make the plan again with this version.",
                )
            )
        choice = types[table.sharding_type]
        ranks = range(problem.cluster.world_size)
        if len(table.ranks) != len(choice.option.shards) or not set(table.ranks) <= set(ranks):
            wanted = f"{len(choice.option.shards)} ranks below {len(ranks)}"
            raise MismatchError(
                expected(f"plan: table '{table.name}' ranks", wanted, str(list(table.ranks)))
            )
        placed.append(Placed(choice, table.ranks))
    units = []
    for unit, unit_choices in zip(plan.units, problem.units, strict=True):
        found = next((c for c in unit_choices if c.placement == unit.parameter), None)
        if found is None:
            wanted = " or ".join(describe(c.placement) for c in unit_choices)
            raise MismatchError(
                expected(f"plan: unit '{unit.name}'", wanted, describe(unit.parameter))
            )
        units.append(found)
    draft = Draft(problem, tuple(placed), tuple(units))
    _check(plan, draft)
    return draft


def _check(plan: Plan, draft: Draft) -> None:
    """Everything that is stored must come out again."""
    if plan.cluster != draft.problem.cluster:
        raise MismatchError(
            expected("plan: cluster", "the constants of its job's preset", "other ones")
            + " The preset changed since; make the plan again."
        )
    again = assemble(draft, plan.search)
    for part in RECOMPUTED:
        stored, found = getattr(plan, part), getattr(again, part)
        _same(f"plan: {part}", msgspec.to_builtins(stored), msgspec.to_builtins(found))
    _same("plan: timeline", _ordered(plan), _ordered(again))


def _ordered(plan: Plan) -> list[Any]:
    """Events in an order that no rounding of seconds can change."""
    if not all(0 < run.count <= plan.world_size for run in plan.timeline):
        raise MismatchError(
            expected("plan: timeline", f"runs of 1 to {plan.world_size} ranks", "another")
        )
    events: list[Any] = msgspec.to_builtins(decode(plan.timeline))
    return sorted(events, key=lambda event: event[:6])


def _same(where: str, stored: Any, found: Any) -> None:
    """Compare element by element; numbers may differ by rounding."""
    if isinstance(stored, dict) and isinstance(found, dict) and stored.keys() == found.keys():
        for key in found:
            _same(f"{where}.{key}", stored[key], found[key])
        return
    if isinstance(stored, (list, tuple)) and isinstance(found, (list, tuple)):
        _same(f"{where}: length", len(stored), len(found))
        for index, (a, b) in enumerate(zip(stored, found, strict=True)):
            _same(f"{where}[{index}]", a, b)
        return
    numbers = isinstance(stored, (int, float)) and isinstance(found, (int, float))
    if abs(stored - found) > 1e-12 * abs(stored) if numbers else stored != found:
        raise MismatchError(
            expected(where, f"{stored} as stored", f"{found} when recomputed")
            + " The plan is of another version; make it again."
        )


def explain_tensor(plan: Plan, name: str) -> list[Explanation]:
    """Every step from sizes to bytes and seconds per rank; a table, a unit or a dense tensor."""
    draft = draft_of(plan)
    for table, placed in zip(plan.tables, draft.tables, strict=True):
        if name in (table.name, table.fqn):
            return list(_explain_table(plan, table, placed))
    for unit, choice in zip(plan.units, draft.units, strict=True):
        if name == unit.name or name in unit.tensors:
            return list(_explain_unit(plan, draft, choice))
    known = [t.name for t in plan.tables] + [u.name for u in plan.units]
    raise InputError(expected("--tensor", f"one of {', '.join(known)}", f"'{name}'"))


def constants_of(plan: Plan) -> dict[str, Any]:
    """The plan's constants as leaves of a derivation."""
    return {
        name: leaf(c.value, name, c.unit, f"{c.source}, {c.date}")
        for name, c in plan.cluster.constants.items()
    }


def _explain_table(plan: Plan, chosen: TablePlan, placed: Placed) -> Any:
    table = placed.choice.table
    for index, rank in enumerate(chosen.ranks):
        rows, columns = _shard_size(table, chosen, plan.world_size, index)
        kept = embedding.shard_bytes(
            rows, columns, table.dtype, chosen.optimizer, chosen.sharding_type
        )
        kept_bytes = named("bytes_on_rank", total(kept[k] for k in TABLE_KINDS), "B")
        where = f"{chosen.fqn} on rank {rank}"
        yield _finished(f"{where}: bytes", placed.choice.bytes[index], kept_bytes)
        spent = _table_seconds(plan, table, chosen, rows, columns)
        yield _finished(f"{where}: seconds per step", placed.choice.seconds[index], spent)


def _table_seconds(plan: Plan, table: TableSpec, chosen: TablePlan, rows: Any, columns: Any) -> Any:
    batch = Batch(plan.job.batch.size, plan.job.batch.sequence)
    ids = leaf(lookups(table, batch), "ids_of_one_rank", "ids", "batch.size x pooling")
    ranks = leaf(plan.world_size, "ranks", "", "cluster.world_size")
    spent = embedding.shard_seconds(
        ids,
        rows,
        columns,
        table.dtype,
        chosen.optimizer,
        ranks,
        chosen.sharding_type,
        constants_of(plan),
    )
    return named("seconds_per_step", total(spent.values()), "s")


def _shard_size(
    table: TableSpec, chosen: TablePlan, world_size: int, index: int
) -> tuple[Any, Any]:
    """Rows and columns of a shard, from the table's own and the number of parts."""
    rows = leaf(table.rows, "rows", "rows", f"tables.{table.name}.rows")
    dim = leaf(table.dim, "dim", "columns", f"tables.{table.name}.dim")
    if chosen.sharding_type == "row_wise":
        parts = leaf(world_size, "parts", "", "row_wise: one part per rank")
        position = leaf(index, "part", "", "this shard's number")
        chunk = named("rows_per_part", ceil_div(rows, parts), "rows")
        left = maximum(rows - position * chunk, 0)
        return named("rows_on_rank", minimum(chunk, left), "rows"), dim
    if chosen.sharding_type == "column_wise":
        parts = leaf(len(chosen.ranks), "parts", "", "column_wise: shards of equal width")
        return rows, named("columns_on_rank", dim // parts, "columns")
    return rows, dim


def _explain_unit(plan: Plan, draft: Draft, choice: UnitChoice) -> Any:
    unit = choice.unit
    elements = total(
        leaf(t.numel, t.fqn, "elements", f"shape {'x'.join(map(str, t.shape))}")
        for t in unit.tensors
    )
    size = leaf(element_bytes("fp32"), "element_bytes", "B", "fp32")
    payload = named("unit_bytes", elements * size, "B")
    buffer = leaf(choice.layout.nbytes, "buffer_bytes", "B", "tensors at 16 B, cut evenly")
    ranks = leaf(1 if choice.replicated else plan.world_size, "slices", "", "ranks that share it")
    for rank in range(plan.world_size):
        padding = choice.layout.padding_bytes(0 if choice.replicated else rank)
        shard = named("slice_bytes", buffer // ranks, "B")
        gap = leaf(padding, "padding_of_slice", "B", f"rank {rank}'s bytes that are no tensor's")
        own = named("payload_of_slice", shard - gap, "B")
        kept = dense.unit_bytes(own, gap, unit.optimizer)
        kept_bytes = named("bytes_on_rank", total(kept[k] for k in UNIT_KINDS), "B")
        stored = sum(
            size for (_, _, name), size in draft.exact[rank].items() if _is_of(name, unit.name)
        )
        yield _finished(f"unit {unit.name} on rank {rank}: bytes", stored, kept_bytes)
    yield _finished(f"unit {unit.name}: bytes of its tensors", choice.layout.payload_bytes, payload)


def _is_of(name: str, unit: str) -> bool:
    return name == unit or name.rpartition(".")[0] == unit


def _finished(title: str, stored: float, amount: Amount) -> Explanation:
    _same(title, stored, amount.value)
    return Explanation(title, stored, amount.unit, tuple(derivation(amount)))


@dataclass(frozen=True, slots=True)
class WhyNot:
    """What a table would cost under another type, everything else as planned."""

    table: str
    chosen: str
    wanted: str
    reason: str


def why_not(plan: Plan, name: str, wanted: str) -> WhyNot:
    """Try ``wanted`` for one table and tell what it would do."""
    draft = draft_of(plan)
    index = next((i for i, t in enumerate(plan.tables) if name in (t.name, t.fqn)), None)
    if index is None:
        known = ", ".join(t.name for t in plan.tables)
        raise InputError(expected("--tensor", f"a table: {known}", f"'{name}'"))
    chosen = plan.tables[index].sharding_type
    return WhyNot(plan.tables[index].name, chosen, wanted, _reason(draft, index, chosen, wanted))


def _reason(draft: Draft, index: int, chosen: str, wanted: str) -> str:
    choices: dict[str, TableChoice] = {
        c.option.sharding_type: c for c in draft.problem.tables[index]
    }
    if wanted == chosen:
        return f"{wanted} is what was chosen."
    choice = choices.get(wanted)
    if choice is None:
        return f"{wanted} is not possible for this table here: only {', '.join(choices)}."
    other = replaced(draft, index, choice)
    capacity = draft.problem.cluster.memory_per_rank
    peak = max(other.peak_bytes)
    rank = other.peak_bytes.index(peak)
    if peak > capacity:
        return (
            f"{wanted} does not fit: rank {rank} would need {peak:,} B of {capacity:,} B, "
            f"{peak - capacity:,} B too much."
        )
    before, after = draft.max_rank_seconds, other.max_rank_seconds
    return (
        f"{wanted} fits (rank {rank} at {peak:,} B) and makes the slowest rank take "
        f"{after:.6f} s instead of {before:.6f} s per step ({(after - before) / before:+.1%})."
    )
