"""From a job to a plan: search, prove the bound, write everything down."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardwright.core.job import Job
from shardwright.core.model import ModelSpec
from shardwright.core.plan import Plan
from shardwright.planner import shortage
from shardwright.planner.assemble import assemble
from shardwright.planner.strategy import search
from shardwright.planner.strategy.found import Found


def plan(job: Job, model_of: Callable[[Job], ModelSpec]) -> Plan:
    """The best plan found for ``job``; raises NoPlanError with the shortfall if none fits.

    ``model_of`` describes its model, and that of the same job with another batch.
    """
    started = time.perf_counter()
    found = found_for(job, model_of)
    if found.draft is None:
        raise shortage.error(found.problem, model_of)
    return assemble(found.draft, found.bound, found.told(time.perf_counter() - started))


def found_for(job: Job, model_of: Callable[[Job], ModelSpec]) -> Found:
    """What the search of a job brings back, within its time limit."""
    limit = job.planner.time_limit
    deadline = time.perf_counter() + limit if limit else float("inf")
    return search(job, model_of(job), deadline)
