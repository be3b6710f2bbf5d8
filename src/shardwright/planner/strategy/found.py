"""What a strategy brings back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import UNSET

from shardwright.core.model import ModelSpec
from shardwright.job.job import Job
from shardwright.job.plan import Attempt, Search, Tried
from shardwright.planner.draft import Draft
from shardwright.planner.problem import Problem
from shardwright.planner.search.watch import Watch

ModelOf = Callable[[Job], ModelSpec]


@dataclass(frozen=True)
class Found:
    """The best draft that fits, if any; ``bound`` seconds no plan of ``problem`` can beat.

    ``gave_up`` says whether a step's activations kept a draft from being better, ``tried`` what
    each checkpointing policy had where there was a choice. ``model_of`` describes the model that
    was searched, and that of the same job with another batch; ``helps`` tries a
    way out that only its giver knows, where nothing fits, and says whether it is one; ``remark`` is
    what its giver has to say then. ``attempts`` are those of its proposers.
    """

    problem: Problem
    draft: Draft | None
    bound: float
    name: str
    proposals: int
    feasible: int
    proved: float = 0.0
    skipped: tuple[str, ...] = ()
    gave_up: bool = False
    tried: tuple[Tried, ...] = ()
    model_of: ModelOf | None = None
    helps: Callable[[Watch], str] | None = None
    attempts: tuple[Attempt, ...] = ()
    remark: str = ""

    @property
    def seconds(self) -> float:
        """Seconds per step of the draft's slowest rank, without end where there is none."""
        return math.inf if self.draft is None else self.draft.max_rank_seconds

    def described(self, wall_seconds: float, *, cut_short: str = "") -> Search:
        """How the plan was found; ``cut_short`` says what ended the search early, if anything."""
        return Search(
            name=self.name,
            proposals=self.proposals,
            feasible=self.feasible,
            wall_seconds=wall_seconds,
            options=sum(len(choices) for choices in self.problem.tables),
            slow_kernels=self.problem.slow,
            proved_seconds=self.proved,
            skipped=(*self.skipped, cut_short) if cut_short else self.skipped,
            tried=self.tried or UNSET,
            attempts=self.attempts or UNSET,
        )
