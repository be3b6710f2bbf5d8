"""The slowest ranks of each part, what fills the worst ranks, and what ranks wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.core.amount import leaf, maximum, named
from shardwright.core.statistics import Bottleneck
from shardwright.planner.explain.explanation import (
    Explanation,
    alike,
    alike_ranks,
    finished,
    largest,
    ranks_label,
    summed,
)
from shardwright.planner.explain.subject import RELATIVE, Subject
from shardwright.planner.statistics.ranks import SAME_SECONDS
from shardwright.planner.statistics.times import parts_of

SOURCE = "--statistic ranks --rank R"


def _part(subject: Subject, part: str) -> tuple[Any, Any]:
    """The most and the mean that ranks spend on a part."""
    groups = alike_ranks(parts_of(subject.plan)[part])
    terms = [
        (leaf(value, f"{part}[{label}]", "s", SOURCE), count) for label, value, count in groups
    ]
    ranks = leaf(subject.plan.world_size, "ranks", "", "cluster.world_size")
    weighed = [term * count if count > 1 else term for term, count in terms]
    most = largest(f"most_{part}", [term for term, _ in terms], "s")
    mean = named(f"mean_{part}", summed(f"{part}_of_all_ranks", weighed, "s") / ranks, "s")
    return most, mean


def explain_parts(subject: Subject) -> Iterator[Explanation]:
    """Most and mean of every part, the sum of the maxima, and the slowest rank above the mean."""
    maxima = []
    for told in subject.statistics.parts:
        most, mean = _part(subject, told.part)
        maxima.append(most)
        yield finished(f"{told.part}: most of any rank", told.seconds, most, ranks=told.ranks)
        yield finished(f"{told.part}: mean of all ranks", told.mean, mean, relative=RELATIVE)
    yield finished(
        "sum of the maxima of all parts",
        subject.statistics.sum_of_maxima,
        summed("sum_of_maxima", maxima, "s"),
        relative=RELATIVE,
        notes=["a step in which every part takes as long as on the slowest rank for it"],
    )
    yield _excess(subject)


def _excess(subject: Subject) -> Explanation:
    groups = alike_ranks([totals.seconds for totals in subject.plan.ranks])
    terms = [
        (leaf(value, f"seconds[{label}]", "s", SOURCE), count) for label, value, count in groups
    ]
    ranks = leaf(subject.plan.world_size, "ranks", "", "cluster.world_size")
    weighed = [term * count if count > 1 else term for term, count in terms]
    mean = named("mean_seconds", summed("seconds_of_all_ranks", weighed, "s") / ranks, "s")
    most = largest("seconds_of_slowest_rank", [term for term, _ in terms], "s")
    return finished(
        "share by which the slowest rank is above the mean",
        subject.statistics.excess,
        named("excess", most / mean - 1),
        absolute=RELATIVE,
    )


def explain_bottlenecks(subject: Subject) -> Iterator[Explanation]:
    """The tables that take most of the slowest and of the fullest rank."""
    for told in subject.statistics.bottlenecks:
        yield from _bottleneck(subject, told)


def _bottleneck(subject: Subject, told: Bottleneck) -> Iterator[Explanation]:
    seconds = told.of == "seconds"
    tier = 0 if told.of == "hbm_bytes" else 1
    found = {p.choice.table.name: p for p, _, _ in subject.held.on_rank(told.rank)}
    for table in told.tables:
        terms = []
        for number, (first, run, cost) in enumerate(found[table.name].stretches()):
            if first <= told.rank < first + run.count:
                amount = cost.total_seconds if seconds else cost.storage[tier]
                name = f"{told.of}[{run.rows} x {run.columns}, {number}]"
                source = f"a shard on this rank; --tensor {table.name}"
                terms.append(leaf(amount, name, "s" if seconds else "B", source))
        yield finished(
            f"{table.name} on rank {told.rank}: {told.of}",
            table.amount,
            summed(f"{told.of}_of_table", terms, "s" if seconds else "B"),
            ranks=[told.rank],
            relative=RELATIVE,
            notes=[f"as much of {told.of}: {ranks_label(told.ranks)}"],
        )


def explain_waiting(subject: Subject) -> Iterator[Explanation]:
    """What ranks wait on average and at most, and the part in which the slowest rank loses."""
    told = subject.statistics.waiting
    plan = subject.plan
    slowest = leaf(plan.max_rank_seconds, "seconds_of_slowest_rank", "s", f"rank {told.slowest}'s")
    ranks = leaf(plan.world_size, "ranks", "", "cluster.world_size")
    terms, longest = [], []
    for label, value, count in alike_ranks([totals.seconds for totals in plan.ranks]):
        own = leaf(value, f"seconds[{label}]", "s", SOURCE)
        idle = named(f"idle[{label}]", maximum(slowest - own, 0.0), "s")
        terms.append(idle * count if count > 1 else idle)
        longest.append(idle)
    near = SAME_SECONDS * plan.max_rank_seconds
    yield finished(
        f"seconds that a rank waits for rank {told.slowest}, on average",
        told.mean_seconds,
        named("mean_idle", summed("idle_of_all_ranks", terms, "s") / ranks, "s"),
        absolute=near,
    )
    yield finished(
        f"seconds that rank {told.longest} waits, which waits longest",
        told.longest_seconds,
        largest("longest_idle", longest, "s"),
        ranks=[told.longest],
        absolute=near,
    )
    if told.part:
        values = alike("part", {f"rank {told.slowest}": told.part_seconds}, "s", SOURCE)
        _, mean = _part(subject, told.part)
        yield finished(
            f"{told.part}: by how much rank {told.slowest} is slower than the mean",
            told.part_seconds - told.part_mean,
            named("lost", values[0] - mean, "s"),
            ranks=[told.slowest],
            absolute=near,
            notes=["the part in which the slowest rank loses most"],
        )
