"""Where a step's seconds go: by part, along the critical path, on the worst ranks, in waiting."""

from __future__ import annotations

import math

from shardwright.core.plan import Plan
from shardwright.core.statistics import (
    Bottleneck,
    CriticalPath,
    CriticalTerm,
    Measure,
    PartMaximum,
    TableShare,
    Waiting,
)
from shardwright.core.timeline import PHASES
from shardwright.planner import profiles
from shardwright.planner.statistics.holdings import Holdings
from shardwright.planner.statistics.memory import decisive, filled
from shardwright.planner.statistics.ranks import idle_seconds, ranks_with

MOST_TABLES = 5
EXCHANGES = ("exchange_ids", "exchange_rows", "reduce")  # phases in which ranks talk


def parts_of(plan: Plan) -> dict[str, list[float]]:
    """Seconds of every rank by part, in the order of a step."""
    names = {part for totals in plan.ranks for part in totals.parts}
    order = (*profiles.phase_of_part(plan.job.planner.constants), *PHASES)
    known = [part for part in order if part in names]
    names = {*names} - {*known}
    return {
        part: [totals.parts.get(part, 0.0) for totals in plan.ranks]
        for part in (*known, *sorted(names))
    }


def part_maxima(plan: Plan) -> tuple[PartMaximum, ...]:
    """The slowest ranks of each part."""
    return tuple(
        PartMaximum(part, max(values), ranks_with(values, max(values)), mean(values))
        for part, values in parts_of(plan).items()
    )


def excess(plan: Plan) -> float:
    """The share by which the slowest rank is above the mean."""
    usual = mean([totals.seconds for totals in plan.ranks])
    return plan.max_rank_seconds / usual - 1 if usual else 0.0


def mean(values: list[float]) -> float:
    """The arithmetic mean."""
    return math.fsum(values) / len(values)


def critical_path(plan: Plan, held: Holdings) -> CriticalPath:
    """What all ranks wait for together.

    TorchRec's costs: the communication of each module and sharding type and all compute, forward
    and backward; a prefetch is in none. Ours: each phase, for a phase ends when all ranks are done.
    """
    if plan.job.planner.constants == "torchrec-1.9":
        terms = tuple(profiles.torchrec.critical_terms(held.tables, plan.world_size))
    else:
        terms = tuple(
            CriticalTerm(part, part in EXCHANGES, max(values), values.index(max(values)))
            for part, values in parts_of(plan).items()
        )
    return CriticalPath(
        sum(term.seconds for term in terms if term.communication),
        sum(term.seconds for term in terms if not term.communication),
        terms,
    )


def bottlenecks(plan: Plan, held: Holdings) -> tuple[Bottleneck, ...]:
    """What fills the worst ranks: the slowest ones, and those with most bytes."""
    tier = decisive(plan)
    most: tuple[tuple[Measure, list[float]], ...] = (
        ("seconds", [totals.seconds for totals in plan.ranks]),
        ("hbm_bytes" if tier == "hbm" else "ddr_bytes", [*filled(plan, tier)]),
    )
    return tuple(_bottleneck(held, of, values) for of, values in most)


def _bottleneck(held: Holdings, of: Measure, values: list[float]) -> Bottleneck:
    total = max(values)
    rank = values.index(total)
    shares = []
    for placed, seconds, storage in held.on_rank(rank):
        amount = seconds if of == "seconds" else storage[0 if of == "hbm_bytes" else 1]
        name, kind = placed.choice.table.name, placed.choice.option.sharding_type
        if amount:
            shares.append(TableShare(name, kind, amount))
    shares.sort(key=lambda share: -share.amount)
    return Bottleneck(of, rank, ranks_with(values, total), total, tuple(shares[:MOST_TABLES]))


def waiting(plan: Plan) -> Waiting:
    """How long ranks wait for the slowest one, and where that one loses most."""
    seconds = [totals.seconds for totals in plan.ranks]
    slowest = seconds.index(max(seconds))
    idle = [idle_seconds(seconds[slowest], own) for own in seconds]
    longest = idle.index(max(idle))
    lost = {part: (values[slowest], mean(values)) for part, values in parts_of(plan).items()}
    part = max(lost, key=lambda name: lost[name][0] - lost[name][1], default="")
    if not any(idle):
        part = ""
    here, there = lost.get(part, (0.0, 0.0))
    return Waiting(slowest, mean(idle), longest, idle[longest], part, here, there)
