"""Every step from the sizes of a table or unit to its bytes and seconds, and sums over shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.core.amount import leaf
from shardwright.core.cluster import TIERS
from shardwright.core.errors import check_type
from shardwright.cost import embedding
from shardwright.job.plan import Plan, TablePlan
from shardwright.planner import profiles
from shardwright.planner.choice import Placed
from shardwright.planner.explain.explanation import (
    REORDERED,
    Explanation,
    Subject,
    finished,
    ranks_label,
)
from shardwright.planner.explain.recompute import draft_of, unit_of, unknown
from shardwright.planner.explain.units import explain_unit
from shardwright.planner.pricing import additive, native
from shardwright.planner.pricing.evaluate import Derived, constants_of, traffic
from shardwright.planner.problem import Problem
from shardwright.planner.statistics.tables import STORED, kernel_of, over_shards
from shardwright.planner.statistics.tables import traffic as moved
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.variation import ModelOf


def explain_tensor(plan: Plan, name: str, again: ModelOf | None = None) -> list[Explanation]:
    """Every step from sizes to bytes and seconds; ``name`` is a table, a unit or a dense tensor.

    ``again`` records the plan's model without checkpointing, which a unit with it is compared with.
    """
    check_type(plan, Plan, "plan", "read_plan reads a file.")
    check_type(name, str, "name")
    draft = draft_of(plan)
    for table, placed in zip(plan.tables, draft.tables, strict=True):
        if name in (table.name, table.fqn):
            return list(_explain_table(plan, draft.problem, table, placed))
    unit = unit_of(plan, name)
    if unit is not None:
        assert isinstance(draft, StepDraft)
        return list(explain_unit(plan, draft, draft.units[plan.units.index(unit)], again))
    raise unknown(plan, name)


def derived(problem: Problem, placed: Placed, run_index: int) -> Derived:
    """The price of one shard of a run as derivations, by the job's profile."""
    context, choice = problem.context, placed.choice
    table, option = choice.table, choice.option
    match problem.job.planner.constants:
        case "torchrec-1.9":
            return profiles.torchrec.derive(context, table, option, run_index)
        case "additive":
            return additive.derive(context, table, option, run_index)
        case "cluster":
            exchange = not problem.model.is_trained
            return native.derive(context, table, option, run_index, exchange=exchange)


def _explain_table(
    plan: Plan, problem: Problem, chosen: TablePlan, placed: Placed
) -> Iterator[Explanation]:
    """Each shape of shard once, with the ranks of all shards of that shape."""
    option = placed.choice.option
    ranks: dict[tuple[int, int], list[int]] = {}
    for shard, rank in zip(option.shards, placed.ranks, strict=True):
        ranks.setdefault((shard.rows, shard.columns), []).append(rank)
    for index, run in enumerate(option.runs):
        found = ranks.pop((run.rows, run.columns), None)
        if found is not None:
            yield from _explain_shard(plan, problem, chosen, placed, index, found)
    if placed.choice.everywhere:
        yield _everywhere(plan, problem, chosen, placed)


def _explain_shard(
    plan: Plan, problem: Problem, chosen: TablePlan, placed: Placed, index: int, ranks: list[int]
) -> Iterator[Explanation]:
    choice = placed.choice
    run, cost = choice.option.runs[index], choice.costs[index]
    found = derived(problem, placed, index)
    where = f"{chosen.fqn} on {ranks_label(ranks)}"
    many = f"{len(ranks)} shards" if len(ranks) > 1 else "one shard"
    notes = [
        f"{many} of {run.rows:,} x {run.columns}, {chosen.sharding_type}, {chosen.compute_kernel}"
    ]
    if choice.dedup:
        notes.append("dedup: a row travels once to a rank that asks for it several times")
    near = problem.cluster.decisive_tier
    for tier, stored in zip(TIERS, cost.storage, strict=True):
        if stored or (tier == near and not any(cost.storage)):
            title = f"{where}: {tier.upper()} bytes"
            yield finished(title, stored, found.storage[tier], ranks=ranks, notes=notes)
    hidden = [
        f"{part} takes {value:.9g} s more, which these costs count in no total"
        for part, value in cost.hidden.items()
        if value
    ]
    title = f"{where}: seconds per step"
    yield finished(title, cost.total_seconds, found.seconds, ranks=ranks, notes=[*notes, *hidden])
    for what, amount in zip(("ids in", "rows out"), moved(plan, placed, run, leaf), strict=True):
        title = f"{where}: bytes of {what} per step"
        yield finished(title, amount.value, amount, ranks=ranks, notes=notes)


def _everywhere(plan: Plan, problem: Problem, chosen: TablePlan, placed: Placed) -> Explanation:
    ids, _ = traffic(problem.context, placed.choice.table, leaf)
    constants = constants_of(problem.cluster)
    dedup = placed.choice.dedup
    spent = embedding.request_seconds(ids, chosen.sharding_type, constants, dedup=dedup)
    return finished(
        f"{chosen.fqn} on every rank: seconds to address its own ids",
        placed.choice.everywhere,
        spent,
        ranks=range(plan.world_size),
        notes=["spent by every rank, whoever holds the shards"],
    )


def explain_tables(subject: Subject) -> Iterator[Explanation]:
    """Seconds and bytes of every table, or of the one that is asked for."""
    for record, placed in zip(subject.statistics.tables, subject.held.tables, strict=True):
        if subject.table not in (None, record.name, record.fqn):
            continue
        where, ranks = f"{record.fqn}, all shards", record.ranks
        seconds = over_shards(placed.choice, "seconds", leaf)
        title = f"{where}: seconds"
        near = REORDERED * record.seconds
        yield finished(title, record.seconds, seconds, ranks=ranks, within=near)
        for tier, name in zip(TIERS, STORED, strict=True):
            stored = getattr(record, name)
            if stored:
                amount = over_shards(placed.choice, name, leaf)
                yield finished(f"{where}: {tier.upper()} bytes", stored, amount, ranks=ranks)
        ids, _ = traffic(subject.draft.problem.context, placed.choice.table, leaf)
        title = f"{record.fqn}: ids of one rank's batch"
        yield finished(title, record.ids, ids, ranks=ranks, within=REORDERED * record.ids)


def explain_kernels(subject: Subject) -> Iterator[Explanation]:
    """Bytes of every kernel's tables: by what they are and by where they lie."""
    for record in subject.statistics.kernels:
        tables = [
            placed
            for placed in subject.held.tables
            if placed.choice.option.compute_kernel == record.kernel
        ]
        found: Any = kernel_of(record.kernel, tables, leaf)
        for words, name in (
            ("bytes of weights", "weight_bytes"),
            ("bytes of optimizer states", "optimizer_bytes"),
            *((f"{tier.upper()} bytes", name) for tier, name in zip(TIERS, STORED, strict=True)),
            ("bytes of all else", "other_bytes"),
        ):
            stored = getattr(record, name)
            if stored or name not in STORED:
                yield finished(f"kernel {record.kernel}: {words}", stored, getattr(found, name))
