"""How a job is searched: bounded, by TorchRec's proposers, or exactly."""

from __future__ import annotations

from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.model import ModelSpec
from shardwright.job.job import Job
from shardwright.planner import profiles
from shardwright.planner.draft import Found
from shardwright.planner.problem import Problem
from shardwright.planner.search.watch import Watch
from shardwright.planner.strategy.steps import search_steps, step_bound
from shardwright.planner.strategy.tables import search_exactly, search_tables, tables_bound


def search(job: Job, model: ModelSpec, watch: Watch, *, sure: bool = True) -> Found:
    """Search as the job asks, for steps that fit for sure or perhaps."""
    wanted = job.planner.search
    if model.is_trained:
        if wanted != "bounded":
            raise UnsupportedError(
                expected(
                    "planner.search",
                    f"'bounded' for a {model.kind}",
                    f"'{wanted}'",
                    "Leave [model] out to plan the tables alone.",
                )
            )
        return search_steps(job, model, watch, sure)
    if wanted == "proposers":
        return profiles.torchrec.search(job, model, watch)
    if wanted == "exact":
        return search_exactly(job, model, watch)
    return search_tables(job, model, watch)


def bound_of(problem: Problem) -> float:
    """Seconds that no plan of ``problem`` can beat."""
    return step_bound(problem) if problem.model.is_trained else tables_bound(problem)
