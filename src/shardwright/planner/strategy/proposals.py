"""TorchRec's way to search: proposers and a partitioner, over the options that it looks at."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.job import Job
from shardwright.core.model import ModelSpec, TableSpec
from shardwright.core.option import Option
from shardwright.core.planning import ConstraintsSection
from shardwright.planner.choice import Choice
from shardwright.planner.choices import price
from shardwright.planner.draft import TablesDraft
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.proposing.loop import Proposed, propose
from shardwright.planner.proposing.partitioners.sections import make_partitioner
from shardwright.planner.proposing.proposers.sections import make_proposers
from shardwright.planner.strategy.found import Found
from shardwright.planner.strategy.tables import tables_bound


def search_proposals(job: Job, model: ModelSpec, deadline: float) -> Found:
    """The best plan of the job's proposers; its bound is that of the same options."""
    if job.planner.constraints != ConstraintsSection():
        raise UnsupportedError(
            expected(
                "planner.constraints",
                "none with search 'proposers', as in TorchRec",
                "a section",
                "Use search 'bounded'.",
            )
        )
    problem = make_problem(job, model)
    section = job.planner

    def priced(cases: Sequence[tuple[TableSpec, Option]]) -> Sequence[Choice]:
        return price(problem.job, problem.context, cases)

    found = propose(
        problem.tables,
        problem.cluster,
        [problem.capacity] * problem.cluster.world_size,
        make_proposers(section.proposers),
        make_partitioner(section.partitioner),
        price=priced,
        deadline=deadline - time.perf_counter() + time.monotonic(),
    )
    return Found(
        problem,
        _draft(problem, found),
        tables_bound(problem),
        "proposers",
        found.proposals,
        found.plans,
        skipped=tuple(f"{name}: {why}" for name, why in found.skipped.items()),
    )


def _draft(problem: Problem, found: Proposed) -> TablesDraft | None:
    """The best placement in the job's order of tables."""
    if not found.tables:
        return None
    placed = {item.choice.table.name: item for item in found.tables}
    return TablesDraft(problem, tuple(placed[table.name] for table in problem.model.tables), ())
