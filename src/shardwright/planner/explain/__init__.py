"""A plan's numbers recomputed as derivations, what it rests on, and why not otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwright.core.errors import InputError, not_one_of, there_are
from shardwright.job.plan import Plan
from shardwright.planner.explain import limits, ranks, tables
from shardwright.planner.explain.basis import Fact, basis
from shardwright.planner.explain.explanation import Explanation, Subject
from shardwright.planner.explain.recompute import draft_of
from shardwright.planner.explain.tables import explain_tensor
from shardwright.planner.explain.why_not import WANTED, WAYS, WhyNot, why_not
from shardwright.planner.statistics import statistics
from shardwright.planner.statistics.tables import Holdings

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
    "peak_tiers": limits.explain_tiers,
    "reservation": limits.explain_reservation,
    "bottlenecks": ranks.explain_bottlenecks,
    "waiting": ranks.explain_waiting,
    "lower_bound": limits.explain_bound,
    "memory_price": limits.explain_prices,
}


def explain_statistic(
    plan: Plan, name: str, *, rank: int | None = None, table: str | None = None
) -> list[Explanation]:
    """The derivations of one statistic; ``rank`` and ``table`` narrow those that are shown of many.

    :raises InputError: no statistic or table has that name.
    """
    if name not in STATISTICS:
        raise InputError(not_one_of("--statistic", name, STATISTICS))
    if table is not None and all(table not in (t.name, t.fqn) for t in plan.tables):
        near = there_are(table, [t.name for t in plan.tables])
        raise InputError("--tensor", "a table of the plan", f"'{table}'", near)
    subject = Subject(plan, draft_of(plan), statistics(plan), Holdings(plan), rank, table)
    return list(STATISTICS[name](subject))
