"""One number of a plan with every step that leads to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardwright.core.amount import Amount, Step, derivation, leaf
from shardwright.core.errors import MismatchError
from shardwright.job.plan import Plan
from shardwright.planner.draft import Draft
from shardwright.planner.statistics.ranks import RankGroup
from shardwright.planner.statistics.records import Statistics
from shardwright.planner.statistics.tables import Holdings

RELATIVE = 1e-12  # by which a number may come out otherwise for rounding
REORDERED = 1e-9  # the same of a sum in another order
DIGITS = 13  # to which seconds of ranks are equal


@dataclass(frozen=True)
class Subject:
    """What is explained: a plan, the draft it was written from and what it adds up to.

    ``rank`` and ``table`` narrow what is shown; None for all, or for those that matter most.
    """

    plan: Plan
    draft: Draft
    statistics: Statistics
    held: Holdings
    rank: int | None = None
    table: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a number is, the value it has in the plan, and every step that leads to it.

    ``ranks`` are those that it is of; ``notes`` say what numbers cannot.
    """

    title: str
    stored: float
    unit: str
    steps: tuple[Step, ...]
    ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def finished(
    title: str,
    stored: float,
    amount: Amount,
    *,
    ranks: Iterable[int] = (),
    notes: Iterable[str] = (),
    within: float | None = None,
) -> Explanation:
    """The explanation that ends in ``amount``, which has to be what is ``stored``, ``within`` what
    rounding may make of it."""
    if abs(stored - amount.value) > (RELATIVE * abs(stored) if within is None else within):
        raise disagreement(title, stored, amount.value)
    return Explanation(
        title, stored, amount.unit, tuple(derivation(amount)), tuple(ranks), tuple(notes)
    )


def disagreement(where: str, stored: Any, found: Any) -> MismatchError:
    """What is raised where a number comes out otherwise than it was written down."""
    remedy = "The plan is of another version; make it again."
    return MismatchError(where, f"{stored} as stored", f"{found} when recomputed", remedy)


def same(where: str, stored: Any, found: Any) -> None:
    """Compare element by element; numbers may differ by rounding.

    :raises MismatchError: names the first place that differs.
    """
    if isinstance(stored, dict) and isinstance(found, dict) and stored.keys() == found.keys():
        for key in found:
            same(f"{where}.{key}", stored[key], found[key])
        return
    if isinstance(stored, (list, tuple)) and isinstance(found, (list, tuple)):
        same(f"{where}: length", len(stored), len(found))
        for index, (a, b) in enumerate(zip(stored, found, strict=True)):
            same(f"{where}[{index}]", a, b)
        return
    numbers = isinstance(stored, (int, float)) and isinstance(found, (int, float))
    if abs(stored - found) > RELATIVE * abs(stored) if numbers else stored != found:
        raise disagreement(where, stored, found)


def rank_groups(what: str, values: Mapping[int, float], unit: str) -> list[RankGroup]:
    """Ranks with equal values, rounding apart, each value an input of a derivation."""
    groups: dict[float, list[int]] = {}
    for rank, value in values.items():
        key = value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")
        groups.setdefault(key, []).append(rank)
    found = []
    for ranks in groups.values():
        label = ranks_label(ranks)
        shown = leaf(values[ranks[0]], f"{what}[{label}]", unit, "--statistic ranks --rank R")
        found.append(RankGroup(shown, ranks, label))
    return found


def ranks_label(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-7``, ``rank 0 and 4 more``."""
    distinct = sorted(set(ranks))
    if len(distinct) == 1:
        return f"rank {distinct[0]}"
    if all(a + 1 == b for a, b in pairwise(distinct)):
        return f"ranks {distinct[0]}-{distinct[-1]}"
    return f"rank {distinct[0]} and {len(distinct) - 1} more"
