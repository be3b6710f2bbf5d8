"""Where a rank's memory goes, to the last byte, and what more memory would buy."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any, get_args

from shardwright.core.amount import maximum, named, summed
from shardwright.core.block import Role
from shardwright.core.cluster import TIERS, Tier
from shardwright.core.timeline import Kind, decode
from shardwright.job.plan import Plan
from shardwright.planner.exchange import without_hidden
from shardwright.planner.problem import Problem, make_problem
from shardwright.planner.search.bound import Bound, relaxed
from shardwright.planner.search.space import Space
from shardwright.planner.statistics.records import LedgerLine, MemoryLedger, MemoryPrice, PeakTier
from shardwright.planner.statistics.tables import Holdings
from shardwright.planner.strategy.tables import bounded_space

GIB = 2**30

MOST_TIERS = 5
KINDS: tuple[str, ...] = typing.get_args(Kind)  # in the order in which they are shown
TIER_WIDTH = 2**20  # bytes by which ranks of one tier may differ
SET_ASIDE = "set_aside"
DENSE = "dense"
INPUTS = "inputs"
FREE = "free"
# Rules that subtract the dense part and the inputs; others give the inputs and reserve none.
SUBTRACTING = ("heuristic", "inference")


def filled(plan: Plan, tier: Tier) -> list[int]:
    """Bytes of every rank in a tier."""
    return [getattr(totals, f"{tier}_bytes") for totals in plan.ranks]


def peak_tiers(plan: Plan) -> tuple[PeakTier, ...]:
    """The fullest ranks, then the fullest of the others, and so on."""
    nbytes = enumerate(filled(plan, plan.cluster.decisive_tier))
    left = sorted(nbytes, key=lambda pair: (-pair[1], pair[0]))
    tiers: list[PeakTier] = []
    while left and len(tiers) < MOST_TIERS:
        most = left[0][1]
        near = [rank for rank, nbytes in left if nbytes >= most - TIER_WIDTH]
        tiers.append(PeakTier(most, tuple(sorted(near))))
        left = left[len(near) :]
    return tuple(tiers)


def ledgers(plan: Plan, held: Holdings) -> tuple[MemoryLedger, ...]:
    """The fullest rank of every memory that is used, and of the one that weights live in."""
    found = []
    for tier, capacity in zip(TIERS, plan.cluster.capacity, strict=True):
        nbytes = filled(plan, tier)
        if any(nbytes) or tier == plan.cluster.decisive_tier:
            rank = nbytes.index(max(nbytes, default=0))
            found.append(
                MemoryLedger(tier, rank, capacity, _lines(plan, held, tier, rank, capacity))
            )
    return tuple(found)


def set_aside(plan: Plan, tier: Tier) -> dict[str, int]:
    """Bytes of a tier that tables may not use, by reason."""
    left = getattr(plan.reserved, f"{tier}_left")
    capacity = getattr(plan.cluster, f"{tier}_cap")
    dense = inputs = 0
    if plan.reserved.kind in SUBTRACTING and tier != "ssd":
        index = TIERS.index(tier)
        dense, inputs = plan.reserved.dense[index], plan.reserved.inputs[index]
    return {SET_ASIDE: capacity - left - dense - inputs, DENSE: dense, INPUTS: inputs}


def _lines(
    plan: Plan, held: Holdings, tier: Tier, rank: int, capacity: int
) -> tuple[LedgerLine, ...]:
    totals = plan.ranks[rank]
    kinds = totals.at_peak if tier == plan.cluster.decisive_tier else held.tally.kinds(tier, rank)
    if tier == "ddr" != plan.cluster.decisive_tier:
        kinds = _with_units(plan, kinds, rank)
    lines = [LedgerLine(what, n) for what, n in set_aside(plan, tier).items() if n]
    ordered = sorted(kinds.items(), key=lambda entry: KINDS.index(entry[0]))
    lines += [LedgerLine(kind, n) for kind, n in ordered if n]
    return (*lines, LedgerLine(FREE, free(capacity, [line.nbytes for line in lines])))


def _with_units(plan: Plan, kinds: dict[str, int], rank: int) -> dict[str, int]:
    """With what a rank of an accelerator has of offloaded units, kind by kind."""
    found = dict(kinds)
    own = {unit.name for unit in plan.units if unit.offloaded is True}
    if not own:
        return found
    for event in decode(plan.timeline):
        name, _, role = event.name.rpartition(".")
        padding = event.kind == "padding" and role in get_args(Role)
        if event.rank == rank and (name if padding else event.name) in own:
            found[event.kind] = found.get(event.kind, 0) + event.bytes
    return found


def free(capacity: Any, taken: Sequence[Any]) -> Any:
    """Bytes of a memory that nothing takes."""
    return named("free", capacity - summed("taken", taken, "B"), "B")


def memory_prices(plan: Plan) -> tuple[MemoryPrice, ...]:
    """What one more GiB per rank would buy, for every memory that there is.

    The lower bound says so: the job's problem is made once more.
    """
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
            falls = fall(*(without_hidden(problem, each.seconds) for each in (now, more)))
            found.append(MemoryPrice(tier, falls, float(now.prices[index]) * GIB if falls else 0.0))
    return tuple(found)


def fall(now: Any, more: Any) -> Any:
    """Seconds by which a bound falls with more memory."""
    return named("bound_falls", maximum(now - more, 0.0), "s")


def with_more(capacity: tuple[int, int, int], index: int) -> tuple[int, int, int]:
    """One GiB more of one tier."""
    hbm, ddr, ssd = (size + GIB * (i == index) for i, size in enumerate(capacity))
    return hbm, ddr, ssd


def bound_at(space: Space, capacity: tuple[int, int, int]) -> Bound:
    """The bound of the same items with other capacities."""
    return relaxed(dataclasses.replace(space, capacity=capacity)).bound
