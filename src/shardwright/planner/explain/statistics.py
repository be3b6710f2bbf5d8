"""Every statistic of a plan by name, with its formula and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from shardwright.core.errors import InputError, expected
from shardwright.core.plan import Plan
from shardwright.planner.explain import (
    critical,
    ledger,
    lower_bound,
    rank_sums,
    table_sums,
    times,
    unevenness,
)
from shardwright.planner.explain.explanation import Explanation
from shardwright.planner.explain.recompute import draft_of
from shardwright.planner.explain.subject import Subject
from shardwright.planner.statistics.everything import statistics
from shardwright.planner.statistics.holdings import Holdings

STATISTICS: dict[str, Callable[[Subject], Iterable[Explanation]]] = {
    "ranks": rank_sums.explain,
    "tables": table_sums.explain_tables,
    "kernels": table_sums.explain_kernels,
    "imbalance": unevenness.explain,
    "spread": unevenness.explain_spreads,
    "parts": times.explain_parts,
    "critical_path": critical.explain,
    "peak_tiers": ledger.explain_tiers,
    "reservation": ledger.explain,
    "bottlenecks": times.explain_bottlenecks,
    "waiting": times.explain_waiting,
    "lower_bound": lower_bound.explain,
    "memory_price": lower_bound.explain_prices,
}


def explain_statistic(
    plan: Plan, name: str, *, rank: int | None = None, table: str | None = None
) -> list[Explanation]:
    """The derivations of one statistic; ``rank`` and ``table`` narrow those that are told of many.

    :raises InputError: no statistic or table has that name.
    """
    if name not in STATISTICS:
        raise InputError(expected("--statistic", f"one of {', '.join(STATISTICS)}", f"'{name}'"))
    names = [t.name for t in plan.tables]
    if table is not None and table not in [*names, *(t.fqn for t in plan.tables)]:
        raise InputError(expected("--tensor", f"a table: {', '.join(names)}", f"'{table}'"))
    subject = Subject(plan, draft_of(plan), statistics(plan), Holdings(plan), rank, table)
    return list(STATISTICS[name](subject))


def all_statistics(plan: Plan) -> Iterator[tuple[str, list[Explanation]]]:
    """Every statistic with its derivations."""
    for name in STATISTICS:
        yield name, explain_statistic(plan, name)
