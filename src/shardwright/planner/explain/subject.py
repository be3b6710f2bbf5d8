"""What is to be explained."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.plan import Plan
from shardwright.core.statistics import Statistics
from shardwright.planner.draft import Draft
from shardwright.planner.statistics.holdings import Holdings

RELATIVE = 1e-9  # sums in another order differ by rounding


@dataclass(frozen=True)
class Subject:
    """A plan with the draft it was written from and what it adds up to.

    ``rank`` and ``table`` narrow what is told; None for all, or for those that matter most.
    """

    plan: Plan
    draft: Draft
    statistics: Statistics
    held: Holdings
    rank: int | None = None
    table: str | None = None
