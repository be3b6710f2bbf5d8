"""The exact search over tables alone: the bounded search first, then HiGHS on top of it."""

from __future__ import annotations

from shardwright.core.model import ModelSpec
from shardwright.job.job import Job
from shardwright.planner.draft import TablesDraft
from shardwright.planner.problem import make_problem
from shardwright.planner.search import exact
from shardwright.planner.search.search import search
from shardwright.planner.search.watch import Watch
from shardwright.planner.strategy.found import Found
from shardwright.planner.strategy.spacing import placed_tables, space_of, with_close_columns

DEFAULT_SECONDS, LEAST_SECONDS = 60.0, 0.1


def search_exactly(job: Job, model: ModelSpec, watch: Watch) -> Found:
    """The proven optimum, or the best of the time limit (60 s if none is given)."""
    problem = make_problem(job, model, slow=True)
    space = space_of(problem, problem.tables, problem.capacity)
    start = search(space, watch)
    left = DEFAULT_SECONDS if watch.left == float("inf") else max(watch.left, LEAST_SECONDS)
    space = with_close_columns(space)
    assignment, proved = exact.solve(space, start, left)
    if any(item.floor for item in space.items):
        proved = 0.0  # options that are not listed may be faster
    drafts = [
        TablesDraft(problem, placed_tables(space, found), ())
        for found in (start.best, assignment)
        if found is not None
    ]
    fitting = [draft for draft in drafts if draft.fits]
    best = min(fitting, key=lambda draft: draft.max_rank_seconds, default=None)
    return Found(
        problem,
        best,
        start.bound.seconds,
        "exact",
        start.tried + 1,
        len(fitting),
        proved=proved,
    )
