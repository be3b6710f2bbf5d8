"""The critical path as the sum of what the slowest rank of each of its terms takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.core.amount import leaf, named
from shardwright.core.statistics import CriticalTerm
from shardwright.planner import profiles
from shardwright.planner.explain.explanation import Explanation, alike, finished, summed
from shardwright.planner.explain.rank_sums import shared_parts, table_parts
from shardwright.planner.explain.subject import RELATIVE, Subject

OURS = "every phase takes as long as on its slowest rank, for a phase ends when all ranks are done"
TORCHRECS = (
    "ranks meet after the communication of each module and sharding type, and after all compute, "
    "forward and backward; a prefetch is in no term"
)


def explain(subject: Subject) -> Iterator[Explanation]:
    """Each term, then communication and compute together."""
    path = subject.statistics.critical_path
    terms: dict[bool, list[Any]] = {True: [], False: []}
    for told in path.terms:
        yield finished(
            f"{told.name}: seconds of its slowest rank, rank {told.rank}",
            told.seconds,
            _term(subject, told),
            ranks=[told.rank],
            relative=RELATIVE,
        )
        terms[told.communication].append(leaf(told.seconds, told.name, "s", "above"))
    note = TORCHRECS if subject.plan.job.planner.constants == "torchrec-1.9" else OURS
    communication = summed("communication", terms[True], "s")
    compute = summed("compute", terms[False], "s")
    yield finished(
        "seconds of the critical path",
        path.seconds,
        named("critical_path", communication + compute, "s"),
        relative=RELATIVE,
        notes=[note],
    )


def _term(subject: Subject, told: CriticalTerm) -> Any:
    """What a term takes on its slowest rank, table by table."""
    group, _, part = told.name.rpartition(" ")
    tables = table_parts(subject, told.rank, part)
    if group:
        members = profiles.torchrec.modules(subject.held.tables)[group]
        inside = {placed.choice.table.name for placed in members}
        tables = {name: value for name, value in tables.items() if name in inside}
    where = {f"{name} on rank {told.rank}": value for name, value in tables.items()}
    terms = alike(part, where, "s", "--tensor of that table")
    terms += shared_parts(subject, part)
    return summed(told.name, terms, "s")
