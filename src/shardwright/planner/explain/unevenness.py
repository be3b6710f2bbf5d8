"""The measures of unevenness and the spread of seconds and bytes over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.core.amount import Amount, leaf, maximum, named
from shardwright.core.statistics import Measure, Spread, Unevenness
from shardwright.planner.explain.explanation import (
    Explanation,
    alike_ranks,
    finished,
    largest,
    logarithm,
    smallest,
    summed,
)
from shardwright.planner.explain.subject import RELATIVE, Subject
from shardwright.planner.statistics.ranks import measured

WORDS: dict[Measure, tuple[str, str]] = {
    "seconds": ("seconds", "s"),
    "hbm_bytes": ("HBM", "B"),
    "ddr_bytes": ("DDR", "B"),
    "ssd_bytes": ("SSD", "B"),
}
NEAR = 1e-12  # of measures from 0 to 2: what rounding makes of 0


@dataclass(frozen=True)
class Term:
    """Ranks with equal values: what they are called, their value, how many they are."""

    label: str
    value: Amount
    count: int

    def times(self, amount: Any) -> Any:
        """An amount of each of the ranks, of all of them."""
        return amount * self.count if self.count > 1 else amount


def terms_of(subject: Subject, of: Measure) -> list[Term]:
    """The ranks by what they have of a measure."""
    values = dict(measured(subject.plan))[of]
    unit = WORDS[of][1]
    source = "--statistic ranks --rank R"
    return [
        Term(label, leaf(value, f"{of}[{label}]", unit, source), count)
        for label, value, count in alike_ranks(values)
    ]


def explain(subject: Subject) -> Iterator[Explanation]:
    """The four measures of seconds and of each memory."""
    for told in subject.statistics.unevenness:
        yield from _measures(subject, told)


def _measures(subject: Subject, told: Unevenness) -> Iterator[Explanation]:
    terms = terms_of(subject, told.of)
    ranks = leaf(subject.plan.world_size, "ranks", "", "cluster.world_size")
    whole = summed(f"{told.of}_of_all_ranks", [t.times(t.value) for t in terms], WORDS[told.of][1])
    even = named("even_share", Amount(1) / ranks)
    shares = [named(f"share[{t.label}]", t.value / whole) for t in terms]
    away = [
        named(f"deviation[{t.label}]", maximum(share - even, even - share))
        for t, share in zip(terms, shares, strict=True)
    ]
    where = WORDS[told.of][0]
    yield finished(
        f"{where}: largest deviation from the even share (TorchRec: total variation)",
        told.largest_deviation,
        largest("largest_deviation", away, ""),
        absolute=NEAR,
        notes=[f"from 0 to {told.highest_deviation:g}, (ranks - 1) / ranks"],
    )
    yield finished(
        f"{where}: sum of all deviations (TorchRec: total distance)",
        told.total_distance,
        summed("total_distance", [t.times(d) for t, d in zip(terms, away, strict=True)], ""),
        absolute=NEAR,
        notes=[f"from 0 to {told.highest_distance:g}, 2 (ranks - 1) / ranks"],
    )
    yield finished(
        f"{where}: chi-square divergence (TorchRec: chi divergence)",
        told.chi,
        _chi(terms, away, ranks),
        absolute=NEAR,
        notes=["from 0 to 1, where one rank has all"],
    )
    yield finished(
        f"{where}: relative entropy (TorchRec: KL divergence)",
        told.relative_entropy,
        _entropy(terms, shares, ranks),
        absolute=NEAR,
        notes=["from 0 to 1, where one rank has all; a share of 0 adds nothing"],
    )


def _chi(terms: list[Term], away: list[Any], ranks: Any) -> Any:
    """The sum of squared deviations, by what it is where one rank has all."""
    if ranks.value == 1:
        return leaf(0.0, "chi", "", "one rank is always even")
    squares = [
        t.times(named(f"square[{t.label}]", d * d * ranks))
        for t, d in zip(terms, away, strict=True)
    ]
    others = named("others_share", (ranks - 1) / ranks)
    most = named("chi_of_one_rank_with_all", others * others * ranks + others)
    return named("chi", summed("chi_square", squares, "") / most)


def _entropy(terms: list[Term], shares: list[Any], ranks: Any) -> Any:
    """Shares times the logarithm of share by even share, by its value where one rank has all."""
    if ranks.value == 1:
        return leaf(0.0, "relative_entropy", "", "one rank is always even")
    products = []
    for term, share in zip(terms, shares, strict=True):
        if share.value > 0:
            ratio = named(f"by_even_share[{term.label}]", share * ranks)
            log = named(f"log[{term.label}]", logarithm(ratio))
            products.append(term.times(named(f"product[{term.label}]", share * log)))
    most = named("entropy_of_one_rank_with_all", logarithm(ranks))
    found = named("entropy_by_most", summed("entropy", products, "") / most)
    return named("relative_entropy", maximum(found, 0.0))  # below 0 by rounding alone


def _nearest(amounts: list[Amount], wanted: float) -> Amount:
    return min(amounts, key=lambda amount: float(abs(amount.value - wanted)))


def explain_spreads(subject: Subject) -> Iterator[Explanation]:
    """Largest, smallest and mean of seconds and of each memory."""
    for told in subject.statistics.spreads:
        yield from _spread(subject, told)


def _spread(subject: Subject, told: Spread) -> Iterator[Explanation]:
    terms = terms_of(subject, told.of)
    words, unit = WORDS[told.of]
    values = [t.value for t in terms]
    ranks = leaf(subject.plan.world_size, "ranks", "", "cluster.world_size")
    yield finished(
        f"{words}: most of any rank",
        told.largest,
        largest("largest", values, unit),
        ranks=told.largest_ranks,
    )
    yield finished(
        f"{words}: least of any rank",
        told.smallest,
        smallest("smallest", values, unit),
        ranks=told.smallest_ranks,
    )
    whole = summed("of_all_ranks", [t.times(t.value) for t in terms], unit)
    yield finished(
        f"{words}: mean of all ranks",
        told.mean,
        named("mean", whole / ranks, unit),
        relative=RELATIVE,
    )
    for name, stored in (("low", told.low_median), ("high", told.high_median)):
        middle = _nearest(values, stored)
        yield finished(
            f"{words}: {name} median of all ranks",
            stored,
            named(f"{name}_median", middle, unit),
            notes=["half of the ranks have at most this"],
        )
