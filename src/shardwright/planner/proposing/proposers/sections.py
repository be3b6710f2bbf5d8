"""Proposers as a job names them."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.planning import ProposerSection
from shardwright.planner.proposing.proposers.dynamic_programming import DynamicProgramming
from shardwright.planner.proposing.proposers.greedy import Greedy
from shardwright.planner.proposing.proposers.grid import Grid
from shardwright.planner.proposing.proposers.proposer import Proposer
from shardwright.planner.proposing.proposers.scaleup import Scaleup
from shardwright.planner.proposing.proposers.uniform import Uniform

# What TorchRec's planner tries by default, in its order.
DEFAULT: tuple[Proposer, ...] = (Grid(), Greedy(use_depth=True), Greedy(use_depth=False), Uniform())


def make_proposers(sections: Sequence[ProposerSection]) -> tuple[Proposer, ...]:
    """A proposer for each section; TorchRec's default list where a job names none."""
    return tuple(_make(section) for section in sections) or DEFAULT


def _make(section: ProposerSection) -> Proposer:
    match section.kind:
        case "greedy":
            return Greedy(section.use_depth, section.threshold)
        case "uniform":
            return Uniform(section.use_depth)
        case "grid":
            return Grid(section.max_proposals)
        case "dynamic_programming":
            return DynamicProgramming(section.bins_per_device)
        case "scaleup":
            return Scaleup(section.use_depth)
