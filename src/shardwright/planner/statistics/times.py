"""Where a step's seconds go: by part, along the critical path, on the worst ranks, in waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.core.amount import largest, named, noted, plain, summed
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
from shardwright.cost.imbalance import Ranks, each_rank, mean
from shardwright.job.plan import Plan
from shardwright.planner import profiles
from shardwright.planner.statistics.holdings import Holdings
from shardwright.planner.statistics.memory import decisive, filled
from shardwright.planner.statistics.ranks import idle_seconds, ranks_with
from shardwright.planner.statistics.tables import on_rank

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
    parts = parts_of(plan).items()
    return tuple(part_maximum(part, each_rank(values)) for part, values in parts)


def part_maximum(part: str, groups: Sequence[Ranks]) -> PartMaximum:
    """The same of one part."""
    most = largest(f"most_{part}", [group.value for group in groups], "s")
    return PartMaximum(part, most, ranks_with(groups, plain(most)), mean(part, groups, "s"))


def sum_of_maxima(parts: Sequence[PartMaximum]) -> Any:
    """Seconds of a step whose every part takes as long as on the slowest rank for it."""
    return summed("sum_of_maxima", [part.seconds for part in parts], "s")


def excess(groups: Sequence[Ranks]) -> Any:
    """The share by which the slowest rank is above the mean."""
    usual = mean("seconds", groups, "s")
    if not plain(usual):
        return noted(0.0, "excess", "", "no rank takes any time", like=usual)
    most = largest("seconds_of_slowest_rank", [group.value for group in groups], "s")
    return named("excess", most / usual - 1)


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
    return path_of(terms)


def path_of(terms: tuple[CriticalTerm, ...]) -> CriticalPath:
    """The sums of terms."""
    communication = [term.seconds for term in terms if term.communication]
    compute = [term.seconds for term in terms if not term.communication]
    return CriticalPath(
        summed("communication", communication, "s"), summed("compute", compute, "s"), terms
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
    for placed in held.tables:
        amount = on_rank(placed, rank, of)
        if amount:
            name, kind = placed.choice.table.name, placed.choice.option.sharding_type
            shares.append(TableShare(name, kind, amount))
    shares.sort(key=lambda share: -share.amount)
    alike = ranks_with(each_rank(values), total)
    return Bottleneck(of, rank, alike, total, tuple(shares[:MOST_TABLES]))


def waiting(plan: Plan) -> Waiting:
    """How long ranks wait for the slowest one, and where that one loses most."""
    seconds = [totals.seconds for totals in plan.ranks]
    slowest = seconds.index(max(seconds))
    waits = idle(each_rank(seconds), seconds[slowest])
    longest = max(waits, key=lambda group: group.value)
    parts = parts_of(plan).items()
    lost = {part: (values[slowest], mean(part, each_rank(values), "s")) for part, values in parts}
    part = max(lost, key=lambda name: lost[name][0] - lost[name][1], default="")
    if not longest.value:
        part = ""
    here, there = lost.get(part, (0.0, 0.0))
    mean_seconds = mean("idle", waits, "s")
    return Waiting(slowest, mean_seconds, longest.ranks[0], longest.value, part, here, there)


def idle(groups: Sequence[Ranks], slowest: Any) -> list[Ranks]:
    """What ranks wait for the slowest one."""
    return [
        group._replace(value=idle_seconds(slowest, group.value, f"[{group.label}]"))
        for group in groups
    ]
