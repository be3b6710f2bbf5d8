"""A plan's numbers recomputed as derivations, what it rests on, and why not otherwise."""

from shardwright.planner.explain.basis import Fact, basis
from shardwright.planner.explain.derivations import explain_tensor
from shardwright.planner.explain.explanation import Explanation
from shardwright.planner.explain.recompute import draft_of
from shardwright.planner.explain.statistics import STATISTICS, explain_statistic
from shardwright.planner.explain.why_not import WANTED, WhyNot, why_not

__all__ = [
    "STATISTICS",
    "WANTED",
    "Explanation",
    "Fact",
    "WhyNot",
    "basis",
    "draft_of",
    "explain_statistic",
    "explain_tensor",
    "why_not",
]
