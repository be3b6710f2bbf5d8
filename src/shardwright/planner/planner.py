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


def plan(job: Job, model_of: Callable[[Job], ModelSpec]) -> Plan:
    """The best plan found for ``job``; raises NoPlanError with the shortfall if none fits.

    ``model_of`` describes its model, and that of the same job with another batch.
    """
    started = time.perf_counter()
    limit = job.planner.time_limit
    found = search(job, model_of(job), started + limit if limit else float("inf"))
    if found.draft is None:
        raise shortage.error(found.problem, model_of)
    return assemble(found.draft, found.bound, found.told(time.perf_counter() - started))
