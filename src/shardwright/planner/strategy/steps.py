"""The bounded search over tables and dense units together, inside one budget per rank.

Tables are placed by the bytes they keep. What a step adds to them is found by running the step, so
the second round leaves room for what the first draft added, and further rounds for what still broke
the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from shardwright.core.job import Job
from shardwright.core.model import ModelSpec, ShardingType
from shardwright.planner.problem import Problem, Tables, UnitChoice, make_problem
from shardwright.planner.search.bound import lower_bound, table
from shardwright.planner.search.least import least_memory
from shardwright.planner.search.search import search
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.found import Found
from shardwright.planner.strategy.spacing import placed_tables, space_of
from shardwright.planner.tally import Placed

MAX_BUDGET_ROUNDS = 6
MAX_UNIT_COMBINATIONS = 16

# The first replica and the first routed table cost collectives of their own, which the search of
# tables does not see: so plans that avoid either are proposed as well.
LEFT_OUT: tuple[tuple[ShardingType, ...], ...] = (
    (),
    ("data_parallel",),
    ("table_wise", "row_wise", "column_wise"),
)


def search_steps(job: Job, model: ModelSpec, deadline: float) -> Found:
    """The fastest draft whose simulated peak fits."""
    problem = make_problem(job, model)
    seeker = _Seeker(problem, deadline)
    seeker.run()
    return Found(
        problem, seeker.best, step_bound(problem), "bounded", seeker.tried, seeker.feasible
    )


def step_bound(problem: Problem) -> float:
    """No plan of this problem can be faster: tables relaxed, cheapest units, no latency."""
    space = space_of(problem, problem.tables, _room(problem, problem.decisive_capacity))
    tables = lower_bound(space, table(space))
    units = math.fsum(
        min(math.fsum(c.seconds.values()) for c in choices) for choices in problem.units
    )
    rest = StepDraft(problem, (), ()).shared_seconds
    return tables.seconds + units + math.fsum(rest.values())


def smallest(problem: Problem) -> StepDraft:
    """The draft that asks least of the fullest rank, whatever its memory."""
    units = tuple(min(c, key=lambda u: u.layout.shard_bytes) for c in problem.units)
    return StepDraft(problem, smallest_tables(problem), units)


def smallest_tables(problem: Problem) -> tuple[Placed, ...]:
    """Tables placed so that the fullest rank holds as little as the search can make it."""
    space = space_of(problem, problem.tables, problem.capacity)
    found = least_memory(space).best
    assert found is not None
    return placed_tables(space, found)


def _room(problem: Problem, nbytes: int) -> tuple[int, int, int]:
    hbm, ddr, ssd = problem.capacity
    return (hbm, nbytes, ssd) if problem.cluster.compute_device == "cpu" else (nbytes, ddr, ssd)


@dataclass
class _Seeker:
    """The best draft so far; table placements are remembered by what was left out and the room."""

    problem: Problem
    deadline: float
    best: StepDraft | None = None
    tried: int = 0
    feasible: int = 0
    known: dict[tuple[int, int], tuple[Placed, ...] | None] = field(default_factory=dict)

    def run(self) -> None:
        """Rounds of shrinking budgets until no fast draft is over."""
        capacity = self.problem.decisive_capacity
        budget = capacity
        for round_number in range(MAX_BUDGET_ROUNDS):
            overshoot = transient = 0
            for draft in self._drafts(budget):
                self.tried += 1
                transient = transient or max(draft.peak_bytes) - max(draft.kept_bytes)
                if self.best is not None and draft.max_rank_seconds >= self.best.max_rank_seconds:
                    continue
                if draft.fits:
                    self.feasible += 1
                    self.best = draft
                else:
                    excess = max(draft.peak_bytes) - capacity
                    overshoot = min(overshoot, excess) if overshoot else excess
            if round_number == 0:
                budget -= max(transient, overshoot)
            elif overshoot:
                budget -= overshoot
            else:
                break
        if self.best is None:
            self.tried += 1
            last = smallest(self.problem)
            self.best = last if last.fits else None
            self.feasible += self.best is not None

    def _drafts(self, budget: int) -> Iterator[StepDraft]:
        for units in unit_combinations(self.problem):
            kept = max(StepDraft(self.problem, (), units).kept_bytes)
            for variant, left_out in enumerate(LEFT_OUT):
                placed = self._tables(variant, left_out, budget - kept)
                if placed is not None:
                    yield StepDraft(self.problem, placed, units)

    def _tables(
        self, variant: int, left_out: tuple[ShardingType, ...], room: int
    ) -> tuple[Placed, ...] | None:
        if room <= 0:
            return None
        key = variant, room
        if key not in self.known:
            tables = without(self.problem.tables, left_out)
            space = space_of(self.problem, tables, _room(self.problem, room))
            found = search(space, self.deadline).best
            self.known[key] = None if found is None else placed_tables(space, found)
        return self.known[key]


def without(tables: Tables, types: tuple[ShardingType, ...]) -> Tables:
    """The choices that are not of ``types``, for tables that have any."""
    return tuple(
        tuple(c for c in choices if c.option.sharding_type not in types) or choices
        for choices in tables
    )


def unit_combinations(problem: Problem) -> Iterator[tuple[UnitChoice, ...]]:
    """All combinations, or the two extremes where there are many units."""
    if math.prod(len(choices) for choices in problem.units) <= MAX_UNIT_COMBINATIONS:
        yield from product(*problem.units)
        return
    for wanted in (0, -1):  # all as replicated as possible, all as sharded as possible
        yield tuple(choices[wanted] for choices in problem.units)
