"""A plan's numbers recomputed as derivations, what it rests on, and why not otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwright.core.errors import InputError, expected, nearest
from shardwright.job.plan import Plan
from shardwright.planner.explain import lower_bound, memory, ranks, tables
from shardwright.planner.explain.basis import Fact, basis
from shardwright.planner.explain.explanation import Explanation, Subject
from shardwright.planner.explain.recompute import draft_of, unit_of
from shardwright.planner.explain.tables import explain_tensor
from shardwright.planner.explain.why_not import WANTED, WhyNot, why_not_table
from shardwright.planner.explain.why_not_unit import WAYS, why_not_unit
from shardwright.planner.search.watch import Watch
from shardwright.planner.statistics import statistics
from shardwright.planner.statistics.tables import Holdings
from shardwright.planner.strategy.found import ModelOf

__all__ = [
    "STATISTICS",
    "WANTED",
    "WAYS",
    "Explanation",
    "Fact",
    "WhyNot",
    "basis",
    "draft_of",
    "explain_statistic",
    "explain_tensor",
    "why_not",
]

STATISTICS: dict[str, Callable[[Subject], Iterable[Explanation]]] = {
    "ranks": ranks.explain,
    "tables": tables.explain_tables,
    "kernels": tables.explain_kernels,
    "imbalance": ranks.explain_imbalance,
    "spread": ranks.explain_spreads,
    "parts": ranks.explain_parts,
    "critical_path": ranks.explain_critical_path,
    "peak_tiers": memory.explain_tiers,
    "reservation": memory.explain,
    "bottlenecks": ranks.explain_bottlenecks,
    "waiting": ranks.explain_waiting,
    "lower_bound": lower_bound.explain,
    "memory_price": lower_bound.explain_prices,
}


def explain_statistic(
    plan: Plan, name: str, *, rank: int | None = None, table: str | None = None
) -> list[Explanation]:
    """The derivations of one statistic; ``rank`` and ``table`` narrow those that are shown of many.

    :raises InputError: no statistic or table has that name.
    """
    if name not in STATISTICS:
        raise InputError(expected("--statistic", f"one of {', '.join(STATISTICS)}", f"'{name}'"))
    if table is not None and all(table not in (t.name, t.fqn) for t in plan.tables):
        known = f"There are {nearest(table, (t.name for t in plan.tables))}."
        raise InputError(expected("--tensor", "a table of the plan", f"'{table}'", known))
    subject = Subject(plan, draft_of(plan), statistics(plan), Holdings(plan), rank, table)
    return list(STATISTICS[name](subject))


def why_not(
    plan: Plan,
    name: str,
    wanted: str,
    again: ModelOf | None = None,
    watch: Watch | None = None,
) -> WhyNot:
    """What ``wanted`` would do to a table or a unit: with everything else in place, and with the
    rest free to move, searched for at most ``planner.time_limit`` or 30 seconds.

    ``again`` records the model with another checkpointing policy; ``watch`` is looked at meanwhile.
    """
    watch = watch or Watch()
    is_table = any(name in (table.name, table.fqn) for table in plan.tables)
    unit = None if is_table else unit_of(plan, name)
    if unit is None:
        return why_not_table(plan, name, wanted, again, watch)
    return why_not_unit(plan, unit, wanted, again, watch)
