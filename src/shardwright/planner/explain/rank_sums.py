"""A rank's seconds and bytes as the sums of what its tables and its share of a step take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.core.amount import leaf, named
from shardwright.core.cluster import TIERS
from shardwright.core.statistics import RankStatistics
from shardwright.planner.explain.explanation import Explanation, alike, finished, summed
from shardwright.planner.explain.subject import RELATIVE, Subject
from shardwright.planner.statistics.memory import decisive, filled
from shardwright.planner.statistics.times import parts_of
from shardwright.planner.statistics.traffic import shard_traffic
from shardwright.planner.step_draft import StepDraft

SHARES = {"hbm": "hbm_share", "ddr": "ddr_share", "ssd": "ssd_share"}


def explain(subject: Subject) -> Iterator[Explanation]:
    """The rank that is asked for, or the slowest and the fullest one."""
    for rank in worst_ranks(subject):
        told = subject.statistics.ranks[rank]
        yield _seconds(subject, told)
        yield _idle(subject, told)
        yield from _bytes(subject, told)
        yield from _traffic(subject, told)


def worst_ranks(subject: Subject) -> list[int]:
    """The rank that is asked for, or the slowest and the fullest one."""
    if subject.rank is not None:
        return [subject.rank]
    nbytes = filled(subject.plan, decisive(subject.plan))
    return sorted({subject.statistics.waiting.slowest, nbytes.index(max(nbytes))})


def table_parts(subject: Subject, rank: int, part: str) -> dict[str, float]:
    """Seconds of one part that each table takes of a rank."""
    found: dict[str, float] = {}
    for placed in subject.held.tables:
        for first, run, cost in placed.stretches():
            if first <= rank < first + run.count and cost.seconds.get(part):
                name = placed.choice.table.name
                found[name] = found.get(name, 0.0) + cost.seconds[part]
    return found


def shared_parts(subject: Subject, part: str) -> list[Any]:
    """Seconds of one part that every rank spends: each unit's, and what no unit takes."""
    draft, terms = subject.draft, []
    others = draft.shared_seconds
    if isinstance(draft, StepDraft):
        others = draft.other_seconds
        units = {
            name: phases[part]
            for name, phases in draft.dense_seconds.items()
            if name and part in phases
        }
        terms = alike(part, units, "s", "--tensor of that unit")
    if part in others:
        source = "of every rank, whatever it holds"
        terms.append(leaf(others[part], f"{part}[every rank]", "s", source))
    return terms


def _seconds(subject: Subject, told: RankStatistics) -> Explanation:
    parts = []
    for part in parts_of(subject.plan):
        terms = alike(part, table_parts(subject, told.rank, part), "s", "--tensor of that table")
        parts.append(summed(part, [*terms, *shared_parts(subject, part)], "s"))
    return finished(
        f"rank {told.rank}: seconds per step",
        told.seconds,
        summed("seconds_of_rank", parts, "s"),
        ranks=[told.rank],
        relative=RELATIVE,
    )


def _idle(subject: Subject, told: RankStatistics) -> Explanation:
    slowest = leaf(
        subject.plan.max_rank_seconds, "seconds_of_slowest_rank", "s", "the slowest rank's"
    )
    own = leaf(told.seconds, "seconds_of_rank", "s", f"rank {told.rank}'s")
    return finished(
        f"rank {told.rank}: seconds it waits for the slowest rank",
        told.idle_seconds,
        named("idle_seconds", slowest - own, "s"),
        ranks=[told.rank],
        absolute=RELATIVE * subject.plan.max_rank_seconds,
    )


def _bytes(subject: Subject, told: RankStatistics) -> Iterator[Explanation]:
    plan, rank = subject.plan, told.rank
    for index, tier in enumerate(TIERS):
        stored = getattr(told, f"{tier}_bytes")
        if not stored and tier != decisive(plan):
            continue
        name = f"{tier}_bytes"
        if plan.units and tier == decisive(plan):
            terms = _at_peak(subject, rank)
        else:
            tables = {
                placed.choice.table.name: storage[index]
                for placed, _, storage in subject.held.on_rank(rank)
                if storage[index]
            }
            terms = alike(name, tables, "B", "--tensor of that table")
        amount = summed(name, terms, "B")
        yield finished(f"rank {rank}: {tier.upper()} bytes", stored, amount, ranks=[rank])
        left = getattr(plan.reserved, f"{tier}_left")
        if left > 0:
            most = leaf(left, f"{tier}_left", "B", "--statistic reservation")
            yield finished(
                f"rank {rank}: share of the {tier.upper()} that may be filled",
                getattr(told, SHARES[tier]),
                named(SHARES[tier], amount / most),
                ranks=[rank],
            )


def _at_peak(subject: Subject, rank: int) -> list[Any]:
    totals = subject.plan.ranks[rank]
    source = f"live at the peak in {totals.peak_phase}, simulated"
    return [leaf(n, kind, "B", source) for kind, n in totals.at_peak.items()]


def _traffic(subject: Subject, told: RankStatistics) -> Iterator[Explanation]:
    moved: list[dict[str, float]] = [{}, {}]
    for placed in subject.held.tables:
        kind = placed.choice.option.sharding_type
        for first, run, _ in placed.stretches():
            if first <= told.rank < first + run.count:
                table = placed.choice.table
                one = shard_traffic(subject.plan, table, kind, run.rows, run.columns)
                for found, nbytes in zip(moved, one, strict=True):
                    found[table.name] = found.get(table.name, 0) + int(nbytes)
    for name, values, stored in (
        ("input_bytes", moved[0], told.input_bytes),
        ("output_bytes", moved[1], told.output_bytes),
    ):
        words = {"input_bytes": "ids that reach", "output_bytes": "rows handed out by"}[name]
        yield finished(
            f"rank {told.rank}: bytes of {words} its shards per step",
            stored,
            summed(name, alike(name, _nonzero(values), "B", "--tensor of that table"), "B"),
            ranks=[told.rank],
        )


def _nonzero(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value}
