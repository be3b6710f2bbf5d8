"""What a bound counts with where a search may enlarge the caches that a job describes."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from shardwright.core.model import CacheSpec
from shardwright.planner.choice import Choice, Cost
from shardwright.planner.choices import Tables, price
from shardwright.planner.problem import Problem
from shardwright.planner.proposing.proposers.scaleup import CACHED, WHOLE


def bounded_tables(problem: Problem) -> Tables:
    """The choices of every table; where proposers may enlarge caches, cached ones take no longer
    than with any larger cache, and a table may be kept whole instead."""
    planner = problem.job.planner
    if planner.search != "proposers" or all(p.kind != "scaleup" for p in planner.proposers):
        return problem.tables
    return tuple(_enlarged(problem, choices) for choices in problem.tables)


def _enlarged(problem: Problem, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    cached = [choice for choice in choices if choice.option.compute_kernel == CACHED]
    full, whole = [], []
    for choice in cached:
        cache = msgspec.structs.replace(choice.table.cache or CacheSpec(), load_factor=1.0)
        full.append((msgspec.structs.replace(choice.table, cache=cache), choice.option))
        whole.append((choice.table, msgspec.structs.replace(choice.option, compute_kernel=WHOLE)))
    relaxed = {
        choice.option: replace(choice, costs=tuple(map(_least, choice.costs, other.costs)))
        for choice, other in zip(cached, price(problem.job, problem.context, full), strict=True)
    }
    kept = {choice.option for choice in choices}
    more = [c for c in price(problem.job, problem.context, whole) if c.option not in kept]
    return (*(relaxed.get(choice.option, choice) for choice in choices), *more)


def _least(small: Cost, large: Cost) -> Cost:
    """Part by part the lesser seconds of two sizes of a cache, each of which falls or rises from
    one to the other; the bytes of the smaller."""
    seconds = {part: min(value, large.seconds[part]) for part, value in small.seconds.items()}
    return replace(small, seconds=seconds, total_seconds=sum(seconds.values()))
