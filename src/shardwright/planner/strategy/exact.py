"""The exact search over tables alone: the bounded search first, then HiGHS on top of it."""

from __future__ import annotations

import time

from shardwright.core.job import Job
from shardwright.core.model import ModelSpec
from shardwright.planner.draft import TablesDraft
from shardwright.planner.problem import make_problem
from shardwright.planner.search import exact
from shardwright.planner.search.search import search
from shardwright.planner.strategy.found import Found
from shardwright.planner.strategy.spacing import placed_tables, space_of, with_close_columns

DEFAULT_SECONDS = 60.0


def search_exactly(job: Job, model: ModelSpec, deadline: float) -> Found:
    """The proven optimum, or the best of the time limit (60 s if none is given)."""
    problem = make_problem(job, model, slow=True)
    space = space_of(problem, problem.tables, problem.capacity)
    start = search(space, deadline)
    left = min(DEFAULT_SECONDS, deadline - time.perf_counter())
    if deadline < float("inf"):
        left = max(deadline - time.perf_counter(), 0.1)
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
