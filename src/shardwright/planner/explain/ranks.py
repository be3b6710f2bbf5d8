"""A rank's seconds and bytes as sums of what its tables take; how they lie on all ranks, and what
these wait for: the statistics' own functions, called with Amounts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from shardwright.core.amount import alike, largest, leaf, named, sum_of, summed
from shardwright.core.cluster import TIERS
from shardwright.core.quantities import SAME_SECONDS
from shardwright.cost.pipeline import hidden_seconds
from shardwright.planner import profiles
from shardwright.planner.exchange import Crossing
from shardwright.planner.explain.explanation import (
    REORDERED,
    Explanation,
    Subject,
    finished,
    rank_groups,
    ranks_label,
)
from shardwright.planner.pricing.evaluate import constants_of
from shardwright.planner.statistics import ranks, records
from shardwright.planner.statistics.memory import filled
from shardwright.planner.statistics.ranks import (
    RankGroup,
    idle_seconds,
    mean,
    parts_of,
    path_of,
    share_filled,
    unevenness,
)
from shardwright.planner.statistics.tables import STORED, on_rank, traffic
from shardwright.planner.step_draft import StepDraft

TABLE = "--tensor of that table"
OURS = "every phase takes as long as on its slowest rank, for a phase ends when all ranks are done"
TORCHRECS = (
    "ranks meet after the communication of each module and sharding type, and after all compute, "
    "forward and backward; a prefetch is in no term"
)


def explain(subject: Subject) -> Iterator[Explanation]:
    """The rank that is asked for, or the slowest and the fullest one."""
    for rank in worst_ranks(subject):
        record = subject.statistics.ranks[rank]
        yield _seconds(subject, record)
        yield _idle(subject, record)
        yield from _bytes(subject, record)
        yield from _traffic(subject, record)


def worst_ranks(subject: Subject) -> list[int]:
    """The rank that is asked for, or the slowest and the fullest one."""
    if subject.rank is not None:
        return [subject.rank]
    nbytes = filled(subject.plan, subject.plan.cluster.decisive_tier)
    return sorted({subject.statistics.waiting.slowest, nbytes.index(max(nbytes))})


def _table_parts(subject: Subject, rank: int, part: str) -> dict[str, float]:
    """Seconds of one part that each table takes of a rank."""
    found: dict[str, float] = {}
    for placed in subject.held.tables:
        for _, _, cost in placed.on_rank(rank):
            if cost.seconds.get(part):
                name = placed.choice.table.name
                found[name] = found.get(name, 0.0) + cost.seconds[part]
    return found


def _shared_parts(subject: Subject, rank: int, part: str) -> list[Any]:
    """Seconds of one part that every rank spends: each unit's, and what no unit takes; less what of
    an exchange is hidden on ``rank``."""
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
    for crossing in draft.crossings:
        if crossing.phase == part:
            less = -1 * _hidden(subject, rank, crossing)
            terms.append(named(f"less_hidden_{crossing.name}", less, "s"))
    return terms


def _hidden(subject: Subject, rank: int, crossing: Crossing) -> Any:
    """What of an exchange costs a rank nothing, by the function of the plan."""
    share = constants_of(subject.plan.cluster)["overlap"]
    pairs = []
    for leg in crossing.legs:
        path, what = leg.exchange.path, f"[{crossing.name} of {leg.exchange.path}]"
        moved = leaf(float(leg.moved[rank]), f"moved{what}", "s", "the tables of this rank, above")
        latency = leaf(leg.latency, f"latency{what}", "s", "of its collectives")
        units = alike(f"computed_beside{what}", leg.window, "s", f"while {path or 'it'} may travel")
        window = _sum(f"computed{what}", units)
        if np.ndim(crossing.taken) and units:
            taken = float(crossing.taken[rank])
            window = window - leaf(taken, f"taken{what}", "s", "hides rows and their gradients")
        pairs.append((named(f"seconds{what}", moved + latency, "s"), window))
    return named(f"hidden_{crossing.name}", hidden_seconds(pairs, share), "s")


def _sum(name: str, terms: list[Any]) -> Any:
    return summed(name, terms, "s") if terms else leaf(0, name, "s", "nothing adds to it")


def _seconds(subject: Subject, record: records.RankStatistics) -> Explanation:
    parts = []
    for part in parts_of(subject.plan):
        terms = alike(part, _table_parts(subject, record.rank, part), "s", TABLE)
        terms += _shared_parts(subject, record.rank, part)
        parts.append(_sum(part, terms))
    return finished(
        f"rank {record.rank}: seconds per step",
        record.seconds,
        summed("seconds_of_rank", parts, "s"),
        ranks=[record.rank],
        within=REORDERED * record.seconds,
    )


def _idle(subject: Subject, record: records.RankStatistics) -> Explanation:
    slowest = leaf(
        subject.plan.max_rank_seconds, "seconds_of_slowest_rank", "s", "the slowest rank's"
    )
    own = leaf(record.seconds, "seconds_of_rank", "s", f"rank {record.rank}'s")
    return finished(
        f"rank {record.rank}: seconds it waits for the slowest rank",
        record.idle_seconds,
        idle_seconds(slowest, own),
        ranks=[record.rank],
        within=REORDERED * subject.plan.max_rank_seconds,
    )


def _bytes(subject: Subject, record: records.RankStatistics) -> Iterator[Explanation]:
    plan, rank = subject.plan, record.rank
    for tier, name in zip(TIERS, STORED, strict=True):
        stored = getattr(record, name)
        if not stored and tier != plan.cluster.decisive_tier:
            continue
        if plan.units and tier == plan.cluster.decisive_tier:
            totals = plan.ranks[rank]
            source = f"live at the peak in {totals.peak_phase}, simulated"
            amount = summed(name, [leaf(n, k, "B", source) for k, n in totals.at_peak.items()], "B")
        else:
            sizes = {p.choice.table.name: on_rank(p, rank, name) for p in subject.held.tables}
            amount = sum_of(name, _nonzero(sizes), "B", TABLE)
        yield finished(f"rank {rank}: {tier.upper()} bytes", stored, amount, ranks=[rank])
        left = getattr(plan.reserved, f"{tier}_left")
        if left > 0:
            most = leaf(left, f"{tier}_left", "B", "--statistic reservation")
            yield finished(
                f"rank {rank}: share of the {tier.upper()} that may be filled",
                getattr(record, f"{tier}_share"),
                named(f"{tier}_share", share_filled(amount, most)),
                ranks=[rank],
            )


def _traffic(subject: Subject, record: records.RankStatistics) -> Iterator[Explanation]:
    moved = {
        placed.choice.table.name: [
            traffic(subject.plan, placed, run) for _, run, _ in placed.on_rank(record.rank)
        ]
        for placed in subject.held.tables
    }
    for index, (name, words, stored) in enumerate(
        (
            ("input_bytes", "ids that reach", record.input_bytes),
            ("output_bytes", "rows handed out by", record.output_bytes),
        )
    ):
        sums = {table: sum(int(both[index]) for both in runs) for table, runs in moved.items()}
        values = _nonzero(sums)
        title = f"rank {record.rank}: bytes of {words} its shards per step"
        yield finished(title, stored, sum_of(name, values, "B", TABLE), ranks=[record.rank])


def _nonzero(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def explain_bottlenecks(subject: Subject) -> Iterator[Explanation]:
    """The tables that take most of the slowest and of the fullest rank."""
    tables = {placed.choice.table.name: placed for placed in subject.held.tables}
    for record in subject.statistics.bottlenecks:
        for table in record.tables:
            yield finished(
                f"{table.name} on rank {record.rank}: {record.of}",
                table.amount,
                on_rank(tables[table.name], record.rank, record.of, leaf),
                ranks=[record.rank],
                within=REORDERED * table.amount,
                notes=[f"as much of {record.of}: {ranks_label(record.ranks)}"],
            )


def explain_critical_path(subject: Subject) -> Iterator[Explanation]:
    """Each term on its slowest rank, then communication and compute together."""
    path = subject.statistics.critical_path
    for record in path.terms:
        yield finished(
            f"{record.name}: seconds of its slowest rank, rank {record.rank}",
            record.seconds,
            _term(subject, record),
            ranks=[record.rank],
            within=REORDERED * record.seconds,
        )
    terms: list[Any] = [
        msgspec.structs.replace(record, seconds=leaf(record.seconds, record.name, "s", "above"))
        for record in path.terms
    ]
    found: Any = path_of(tuple(terms))
    note = TORCHRECS if subject.plan.job.planner.constants == "torchrec-1.9" else OURS
    yield finished(
        "seconds of the critical path",
        path.seconds,
        named("critical_path", found.seconds, "s"),
        within=REORDERED * path.seconds,
        notes=[note],
    )


def _term(subject: Subject, record: records.CriticalTerm) -> Any:
    """What a term takes on its slowest rank, table by table."""
    group, _, part = record.name.rpartition(" ")
    tables = _table_parts(subject, record.rank, part)
    if group:
        members = profiles.torchrec.modules(subject.held.tables)[group]
        inside = {placed.choice.table.name for placed in members}
        tables = {name: value for name, value in tables.items() if name in inside}
    where = {f"{name} on rank {record.rank}": value for name, value in tables.items()}
    terms = [*alike(part, where, "s", TABLE), *_shared_parts(subject, record.rank, part)]
    return _sum(record.name, terms)


NEAR = 2e-12  # of measures from 0 to 2: what rounding makes of them
HALF = "half of the ranks have at most this"
ONE = "from 0 to 1, where one rank has all"
MEASURES = {  # words and range
    "largest_deviation": (
        "largest deviation from the even share (TorchRec: total variation)",
        "from 0 to {0.highest_deviation:g}, (ranks - 1) / ranks",
    ),
    "total_distance": (
        "sum of all deviations (TorchRec: total distance)",
        "from 0 to {0.highest_distance:g}, 2 (ranks - 1) / ranks",
    ),
    "chi": ("chi-square divergence (TorchRec: chi divergence)", ONE),
    "relative_entropy": (
        "relative entropy (TorchRec: KL divergence)",
        f"{ONE}; a share of 0 adds nothing",
    ),
}


def _groups(subject: Subject, of: records.Measure) -> list[RankGroup]:
    """The ranks by what they have of a measure."""
    values = {totals.rank: getattr(totals, of) for totals in subject.plan.ranks}
    return rank_groups(of, values, records.unit_of(of))


def _part(subject: Subject, part: str) -> list[RankGroup]:
    return rank_groups(part, dict(enumerate(ranks.parts_of(subject.plan)[part])), "s")


def explain_imbalance(subject: Subject) -> Iterator[Explanation]:
    """The four measures of seconds and of each memory."""
    for record in subject.statistics.unevenness:
        found: Any = unevenness(record.of, _groups(subject, record.of))
        for field, (words, note) in MEASURES.items():
            yield finished(
                f"{records.MEASURE_WORDS[record.of]}: {words}",
                getattr(record, field),
                getattr(found, field),
                within=NEAR,
                notes=[note.format(record)],
            )


def explain_spreads(subject: Subject) -> Iterator[Explanation]:
    """Largest, smallest, mean and medians of seconds and of each memory."""
    for record in subject.statistics.spreads:
        found: Any = ranks.spread(record.of, _groups(subject, record.of))
        for field, words, on, notes in (
            ("largest", "most of any rank", record.largest_ranks, ()),
            ("smallest", "least of any rank", record.smallest_ranks, ()),
            ("mean", "mean of all ranks", (), ()),
            ("low_median", "low median of all ranks", (), (HALF,)),
            ("high_median", "high median of all ranks", (), (HALF,)),
        ):
            stored, amount = getattr(record, field), getattr(found, field)
            title = f"{records.MEASURE_WORDS[record.of]}: {words}"
            yield finished(title, stored, amount, ranks=on, notes=notes, within=REORDERED * stored)


def explain_parts(subject: Subject) -> Iterator[Explanation]:
    """Most and mean of every part, the sum of the maxima, and the slowest rank above the mean."""
    maxima: list[Any] = []
    for record in subject.statistics.parts:
        found: Any = ranks.part_maximum(record.part, _part(subject, record.part))
        maxima.append(found)
        title = f"{record.part}: most of any rank"
        yield finished(title, record.seconds, found.seconds, ranks=record.ranks)
        title = f"{record.part}: mean of all ranks"
        yield finished(title, record.mean, found.mean, within=REORDERED * record.mean)
    yield finished(
        "sum of the maxima of all parts",
        subject.statistics.sum_of_maxima,
        ranks.sum_of_maxima(maxima),
        within=REORDERED * subject.statistics.sum_of_maxima,
        notes=["a step in which every part takes as long as on the slowest rank for it"],
    )
    yield finished(
        "share by which the slowest rank is above the mean",
        subject.statistics.excess,
        ranks.excess(_groups(subject, "seconds")),
        within=REORDERED * (1 + subject.statistics.excess),
    )


def explain_waiting(subject: Subject) -> Iterator[Explanation]:
    """What ranks wait on average and at most, and the part in which the slowest rank loses."""
    wait, plan = subject.statistics.waiting, subject.plan
    slowest = leaf(plan.max_rank_seconds, "seconds_of_slowest_rank", "s", f"rank {wait.slowest}'s")
    waits = ranks.idle(_groups(subject, "seconds"), slowest)
    near = SAME_SECONDS * plan.max_rank_seconds
    yield finished(
        f"seconds that a rank waits for rank {wait.slowest}, on average",
        wait.mean_seconds,
        mean("idle", waits, "s"),
        within=near,
    )
    yield finished(
        f"seconds that rank {wait.longest} waits, which waits longest",
        wait.longest_seconds,
        largest("longest_idle", [group.value for group in waits], "s"),
        ranks=[wait.longest],
        within=near,
    )
    if wait.part:
        source = "--statistic ranks --rank R"
        own = leaf(wait.part_seconds, f"part[rank {wait.slowest}]", "s", source)
        usual = mean(wait.part, _part(subject, wait.part), "s")
        yield finished(
            f"{wait.part}: by how much rank {wait.slowest} is slower than the mean",
            wait.part_seconds - wait.part_mean,
            named("lost", own - usual, "s"),
            ranks=[wait.slowest],
            within=near,
            notes=["the part in which the slowest rank loses most"],
        )
