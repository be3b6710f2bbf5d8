"""What more memory would buy, told by the lower bound: the job's problem is made once more."""

from __future__ import annotations

import dataclasses

from shardwright.core.cluster import TIERS
from shardwright.core.plan import Plan
from shardwright.core.statistics import MemoryPrice
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.bound import Bound, Table, lower_bound, table
from shardwright.planner.search.space import Space
from shardwright.planner.strategy.spacing import bounded_space

GIB = 2**30


def memory_prices(plan: Plan) -> tuple[MemoryPrice, ...]:
    """What one more GiB per rank would buy, for every memory that there is."""
    problem = make_problem(plan.job, plan.model, slow=plan.search.slow_kernels)
    return prices_of(problem)


def prices_of(problem: Problem) -> tuple[MemoryPrice, ...]:
    """The same for a problem that is made already; without tables the bound has no price."""
    if not problem.tables:
        return ()
    space = bounded_space(problem)
    now = bound_at(space, problem.capacity)
    found = []
    for index, tier in enumerate(TIERS):
        if problem.cluster.capacity[index]:
            more = bound_at(space, with_more(problem.capacity, index))
            falls = max(now.seconds - more.seconds, 0.0)
            found.append(MemoryPrice(tier, falls, float(now.prices[index]) * GIB if falls else 0.0))
    return tuple(found)


def with_more(capacity: tuple[int, int, int], index: int) -> tuple[int, int, int]:
    """One GiB more of one tier."""
    hbm, ddr, ssd = (size + GIB * (i == index) for i, size in enumerate(capacity))
    return hbm, ddr, ssd


def bound_at(space: Space, capacity: tuple[int, int, int]) -> Bound:
    """The bound of the same items with other capacities."""
    roomy = dataclasses.replace(space, capacity=capacity)
    options: Table = table(roomy)
    return lower_bound(roomy, options)
