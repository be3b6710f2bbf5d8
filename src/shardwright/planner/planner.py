"""From a job to a plan: search, prove the bound, write everything down."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.core.job import Job
from shardwright.core.model import ModelSpec
from shardwright.core.plan import Plan
from shardwright.planner import shortage
from shardwright.planner.assemble import assemble
from shardwright.planner.search.watch import Hear, Watch
from shardwright.planner.strategy import search
from shardwright.planner.strategy.found import Found


def plan(job: Job, model_of: Callable[[Job], ModelSpec], hear: Hear | None = None) -> Plan:
    """The best plan found for ``job``; raises NoPlanError with the shortfall if none fits.

    ``model_of`` describes its model, and that of the same job with another batch. ``hear`` is
    called with the :class:`Watch` of the search in every round.
    """
    watch = Watch(job.planner.time_limit or float("inf"), hear)
    found = search(job, model_of(job), watch)
    if found.draft is None:
        raise shortage.error(found.problem, model_of)
    seconds = watch.elapsed
    return assemble(found.draft, found.bound, found.described(seconds, cut_short=watch.cut_short))


def found_for(job: Job, model_of: Callable[[Job], ModelSpec]) -> Found:
    """What the search of a job brings back, within its time limit."""
    return search(job, model_of(job), Watch(job.planner.time_limit or float("inf")))
