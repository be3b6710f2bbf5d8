"""How seconds and bytes lie on the ranks: the statistics' own functions, called with Amounts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.core.amount import largest, leaf, named
from shardwright.core.quantities import SAME_SECONDS
from shardwright.core.statistics import Measure
from shardwright.cost.imbalance import Ranks, mean, unevenness, unit_of
from shardwright.planner.explain.explanation import (
    REORDERED,
    Explanation,
    Subject,
    finished,
    rank_groups,
)
from shardwright.planner.statistics import ranks, times

WORDS: dict[Measure, str] = {
    "seconds": "seconds",
    "hbm_bytes": "HBM",
    "ddr_bytes": "DDR",
    "ssd_bytes": "SSD",
}
NEAR = 1e-12  # of measures from 0 to 2: what rounding makes of 0
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


def _groups(subject: Subject, of: Measure) -> list[Ranks]:
    """The ranks by what they have of a measure."""
    values = {totals.rank: getattr(totals, of) for totals in subject.plan.ranks}
    return rank_groups(of, values, unit_of(of))


def _part(subject: Subject, part: str) -> list[Ranks]:
    return rank_groups(part, dict(enumerate(times.parts_of(subject.plan)[part])), "s")


def explain_imbalance(subject: Subject) -> Iterator[Explanation]:
    """The four measures of seconds and of each memory."""
    for record in subject.statistics.unevenness:
        found: Any = unevenness(record.of, _groups(subject, record.of))
        for field, (words, note) in MEASURES.items():
            yield finished(
                f"{WORDS[record.of]}: {words}",
                getattr(record, field),
                getattr(found, field),
                absolute=NEAR,
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
            title = f"{WORDS[record.of]}: {words}"
            yield finished(title, stored, amount, ranks=on, notes=notes, relative=REORDERED)


def explain_parts(subject: Subject) -> Iterator[Explanation]:
    """Most and mean of every part, the sum of the maxima, and the slowest rank above the mean."""
    maxima: list[Any] = []
    for record in subject.statistics.parts:
        found: Any = times.part_maximum(record.part, _part(subject, record.part))
        maxima.append(found)
        title = f"{record.part}: most of any rank"
        yield finished(title, record.seconds, found.seconds, ranks=record.ranks)
        title = f"{record.part}: mean of all ranks"
        yield finished(title, record.mean, found.mean, relative=REORDERED)
    yield finished(
        "sum of the maxima of all parts",
        subject.statistics.sum_of_maxima,
        times.sum_of_maxima(maxima),
        relative=REORDERED,
        notes=["a step in which every part takes as long as on the slowest rank for it"],
    )
    yield finished(
        "share by which the slowest rank is above the mean",
        subject.statistics.excess,
        times.excess(_groups(subject, "seconds")),
        absolute=REORDERED,
    )


def explain_waiting(subject: Subject) -> Iterator[Explanation]:
    """What ranks wait on average and at most, and the part in which the slowest rank loses."""
    wait, plan = subject.statistics.waiting, subject.plan
    slowest = leaf(plan.max_rank_seconds, "seconds_of_slowest_rank", "s", f"rank {wait.slowest}'s")
    waits = times.idle(_groups(subject, "seconds"), slowest)
    near = SAME_SECONDS * plan.max_rank_seconds
    yield finished(
        f"seconds that a rank waits for rank {wait.slowest}, on average",
        wait.mean_seconds,
        mean("idle", waits, "s"),
        absolute=near,
    )
    yield finished(
        f"seconds that rank {wait.longest} waits, which waits longest",
        wait.longest_seconds,
        largest("longest_idle", [group.value for group in waits], "s"),
        ranks=[wait.longest],
        absolute=near,
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
            absolute=near,
            notes=["the part in which the slowest rank loses most"],
        )
