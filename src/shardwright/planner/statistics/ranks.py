"""A plan rank by rank: how seconds and bytes lie on the ranks, how unevenly by TorchRec's measures
(1.9.2), where a step's seconds go, and what ranks wait for."""

# What takes groups of ranks is called twice: by ``statistics`` with the plan's numbers, a group for
# every rank, and by ``explain`` with Amounts, a group for all ranks that have the same. So a
# statistic is coded once, and its derivation cannot say anything else. ``plain`` is asked where a
# branch needs a number; what is added keeps its order, for TorchRec's measures are held to its own
# to the last digits.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.amount import (
    Fold,
    largest,
    log,
    maximum,
    named,
    noted,
    plain,
    smallest,
    summed,
    times,
    total,
    where,
)
from shardwright.core.quantities import SAME_SECONDS
from shardwright.core.timeline import PHASES
from shardwright.job.plan import Plan
from shardwright.planner import profiles
from shardwright.planner.statistics import records
from shardwright.planner.statistics.memory import filled
from shardwright.planner.statistics.tables import Holdings, on_rank, traffic


def rank_statistics(plan: Plan, held: Holdings) -> tuple[records.RankStatistics, ...]:
    """Every rank, in order."""
    ids, rows = _traffic(plan, held)
    shards = _shards(plan, held)
    left = plan.reserved
    return tuple(
        records.RankStatistics(
            rank=totals.rank,
            seconds=totals.seconds,
            parts=totals.parts,
            idle_seconds=idle_seconds(plan.max_rank_seconds, totals.seconds),
            hbm_bytes=totals.hbm_bytes,
            ddr_bytes=totals.ddr_bytes,
            ssd_bytes=totals.ssd_bytes,
            hbm_share=share_filled(totals.hbm_bytes, left.hbm_left),
            ddr_share=share_filled(totals.ddr_bytes, left.ddr_left),
            ssd_share=share_filled(totals.ssd_bytes, left.ssd_left),
            input_bytes=ids[totals.rank],
            output_bytes=rows[totals.rank],
            shards={kind: int(n[totals.rank]) for kind, n in shards if n[totals.rank]},
        )
        for totals in plan.ranks
    )


def idle_seconds(slowest: Any, own: Any, label: str = "") -> Any:
    """What a rank waits for the slowest one; nothing where they differ by rounding."""
    ahead = named(f"ahead{label}", slowest - own, "s")
    idle = where(ahead > SAME_SECONDS * slowest, ahead, 0.0)
    return named(f"idle{label}" if label else "idle_seconds", idle, "s")


def share_filled(nbytes: Any, most: Any) -> Any:
    """The share of the bytes that may be filled."""
    return nbytes / most if plain(most) > 0 else 0.0


def _traffic(plan: Plan, held: Holdings) -> NDArray[Any]:
    """Bytes of ids in and of rows out [2, ranks], exact whatever their size."""
    moved = np.zeros((2, plan.world_size), object)
    for placed in held.tables:
        for first, run, _ in placed.stretches():
            for sums, nbytes in zip(moved, traffic(plan, placed, run), strict=True):
                sums[first : first + run.count] += int(nbytes)
    return moved


def _shards(plan: Plan, held: Holdings) -> list[tuple[str, NDArray[np.int64]]]:
    """The number of shards on every rank by sharding type, in the order of the tables."""
    counts: dict[str, NDArray[np.int64]] = {}
    for placed in held.tables:
        kind = placed.choice.option.sharding_type
        if kind not in counts:
            counts[kind] = np.zeros(plan.world_size, np.int64)
        for first, run, _ in placed.stretches():
            counts[kind][first : first + run.count] += 1
    return list(counts.items())


def measured(plan: Plan) -> Iterator[tuple[records.Measure, list[float]]]:
    """Seconds and the bytes of every memory that is used, of each rank."""
    for measure in records.MEASURE_WORDS:
        values = [getattr(totals, measure) for totals in plan.ranks]
        if sum(values):
            yield measure, values


def all_unevenness(plan: Plan) -> tuple[records.Unevenness, ...]:
    """How far seconds and bytes are from lying evenly on the ranks."""
    found = (unevenness(measure, each_rank(values)) for measure, values in measured(plan))
    return tuple(one for one in found if one is not None)


def spreads(plan: Plan) -> tuple[records.RankSpread, ...]:
    """Largest, smallest, mean and medians of seconds and bytes."""
    return tuple(spread(measure, each_rank(values)) for measure, values in measured(plan))


def spread(of: records.Measure, groups: Sequence[RankGroup]) -> records.RankSpread:
    """The same of one measure."""
    unit = records.unit_of(of)
    values = [group.value for group in groups]
    most, least = largest("largest", values, unit), smallest("smallest", values, unit)
    low, high = medians(groups)
    return records.RankSpread(
        of,
        most,
        ranks_with(groups, plain(most)),
        least,
        ranks_with(groups, plain(least)),
        mean(of, groups, unit, total),
        named("low_median", low, unit),
        named("high_median", high, unit),
    )


def medians(groups: Sequence[RankGroup]) -> tuple[Any, Any]:
    """The value in the middle, and the one beside it where ranks are even in number."""
    ordered = sorted(groups, key=lambda group: float(plain(group.value)))
    each = [group.value for group in ordered for _ in group.ranks]
    return each[(len(each) - 1) // 2], each[len(each) // 2]


def ranks_with(groups: Sequence[RankGroup], wanted: float) -> tuple[int, ...]:
    """The ranks that have a value, rounding apart."""
    near = SAME_SECONDS * abs(wanted) if isinstance(wanted, float) else 0
    found = (group.ranks for group in groups if abs(plain(group.value) - wanted) <= near)
    return tuple(sorted(rank for ranks in found for rank in ranks))


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


def part_maxima(plan: Plan) -> tuple[records.PartMaximum, ...]:
    """The slowest ranks of each part."""
    parts = parts_of(plan).items()
    return tuple(part_maximum(part, each_rank(values)) for part, values in parts)


def part_maximum(part: str, groups: Sequence[RankGroup]) -> records.PartMaximum:
    """The same of one part."""
    most = largest(f"most_{part}", [group.value for group in groups], "s")
    return records.PartMaximum(part, most, ranks_with(groups, plain(most)), mean(part, groups, "s"))


def sum_of_maxima(parts: Sequence[records.PartMaximum]) -> Any:
    """Seconds of a step whose every part takes as long as on the slowest rank for it."""
    return summed("sum_of_maxima", [part.seconds for part in parts], "s")


def excess(groups: Sequence[RankGroup]) -> Any:
    """The share by which the slowest rank is above the mean."""
    usual = mean("seconds", groups, "s")
    if not plain(usual):
        return noted(0.0, "excess", "", "no rank takes any time", like=usual)
    most = largest("seconds_of_slowest_rank", [group.value for group in groups], "s")
    return named("excess", most / usual - 1)


def critical_path(plan: Plan, held: Holdings) -> records.CriticalPath:
    """What all ranks wait for together.

    TorchRec's costs: the communication of each module and sharding type and all compute, forward
    and backward; a prefetch is in none. Ours: each phase, for a phase ends when all ranks are done.
    """
    if plan.job.planner.constants == "torchrec-1.9":
        terms = tuple(profiles.torchrec.critical_terms(held.tables, plan.world_size))
    else:
        terms = tuple(
            records.CriticalTerm(part, part in EXCHANGES, max(values), values.index(max(values)))
            for part, values in parts_of(plan).items()
        )
    return path_of(terms)


def path_of(terms: tuple[records.CriticalTerm, ...]) -> records.CriticalPath:
    """The sums of terms."""
    communication = [term.seconds for term in terms if term.communication]
    compute = [term.seconds for term in terms if not term.communication]
    return records.CriticalPath(
        summed("communication", communication, "s"), summed("compute", compute, "s"), terms
    )


def bottlenecks(plan: Plan, held: Holdings) -> tuple[records.Bottleneck, ...]:
    """What fills the worst ranks: the slowest ones, and those with most bytes."""
    tier = plan.cluster.decisive_tier
    most: tuple[tuple[records.Measure, list[float]], ...] = (
        ("seconds", [totals.seconds for totals in plan.ranks]),
        ("hbm_bytes" if tier == "hbm" else "ddr_bytes", [*filled(plan, tier)]),
    )
    return tuple(_bottleneck(held, of, values) for of, values in most)


def _bottleneck(held: Holdings, of: records.Measure, values: list[float]) -> records.Bottleneck:
    total = max(values)
    rank = values.index(total)
    shares = []
    for placed in held.tables:
        amount = on_rank(placed, rank, of)
        if amount:
            name, kind = placed.choice.table.name, placed.choice.option.sharding_type
            shares.append(records.TableShare(name, kind, amount))
    shares.sort(key=lambda share: -share.amount)
    alike = ranks_with(each_rank(values), total)
    return records.Bottleneck(of, rank, alike, total, tuple(shares[:MOST_TABLES]))


def waiting(plan: Plan) -> records.RankWaiting:
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
    return records.RankWaiting(
        slowest, mean_seconds, longest.ranks[0], longest.value, part, here, there
    )


def idle(groups: Sequence[RankGroup], slowest: Any) -> list[RankGroup]:
    """What ranks wait for the slowest one."""
    return [
        group._replace(value=idle_seconds(slowest, group.value, f"[{group.label}]"))
        for group in groups
    ]


class RankGroup(NamedTuple):
    """``ranks`` that have the same ``value``; ``label`` is what a derivation calls them."""

    value: Any
    ranks: Sequence[int]
    label: str = ""

    def times(self, each: Any) -> Any:
        """What they have together of which each has ``each``."""
        return times(each, len(self.ranks))


def each_rank(values: Iterable[float]) -> list[RankGroup]:
    """Every rank by itself."""
    return [RankGroup(value, (rank,)) for rank, value in enumerate(values)]


def number_of(groups: Sequence[RankGroup]) -> Any:
    """How many ranks there are."""
    count = sum(len(group.ranks) for group in groups)
    return noted(count, "ranks", "", "cluster.world_size", like=groups[0].value)


def mean(name: str, groups: Sequence[RankGroup], unit: str, adds: Fold = math.fsum) -> Any:
    """The arithmetic mean over ranks; ``adds`` adds plain numbers."""
    terms = [group.times(group.value) for group in groups]
    whole = summed(f"{name}_of_all_ranks", terms, unit, adds)
    return named(f"mean_{name}", whole / number_of(groups), unit)


def unevenness(of: records.Measure, groups: Sequence[RankGroup]) -> records.Unevenness | None:
    """All measures of values of which none is negative; None if their sum is 0.

    ``largest_deviation`` is TorchRec's total variation: the largest deviation of a share from the
    even one, not half of their sum. ``chi`` and ``relative_entropy`` are divided by what they are
    where one rank has all: k - 1 and ln k. A share of 0 adds no entropy.
    """
    added = [group.times(group.value) for group in groups]
    whole = summed(f"{of}_of_all_ranks", added, records.unit_of(of))
    if not plain(whole):
        return None
    ranks = number_of(groups)
    even = named("even_share", 1 / ranks)
    shares = [group._replace(value=_share(group, whole)) for group in groups]
    away = [share._replace(value=_deviation(share, even)) for share in shares]
    highest = (plain(ranks) - 1) / plain(ranks)
    return records.Unevenness(
        of,
        largest("largest_deviation", [group.value for group in away], ""),
        summed("total_distance", [group.times(group.value) for group in away], ""),
        _chi(away, ranks),
        _relative_entropy(shares, ranks),
        highest,
        2 * highest,
    )


def _share(group: RankGroup, whole: Any) -> Any:
    return named(f"share[{group.label}]", group.value / whole)


def _deviation(share: RankGroup, even: Any) -> Any:
    return named(f"deviation[{share.label}]", maximum(share.value - even, even - share.value))


def _chi(away: Sequence[RankGroup], ranks: Any) -> Any:
    """The chi-square divergence from even shares, by that of one rank that has all."""
    count = plain(ranks)
    if count == 1:
        return noted(0.0, "chi", "", "one rank is always even", like=ranks)
    furthest = each_rank([1 - 1 / count] + [1 / count] * (count - 1))
    value = _chi_square(furthest, count)
    most = noted(value, "chi_of_one_rank_with_all", "", "ranks - 1, rounding apart", like=ranks)
    return named("chi", _chi_square(away, ranks) / most)


def _chi_square(away: Sequence[RankGroup], ranks: Any) -> Any:
    squares = [
        group.times(named(f"square[{group.label}]", group.value * group.value * ranks))
        for group in away
    ]
    return summed("chi_square", squares, "")


def _relative_entropy(shares: Sequence[RankGroup], ranks: Any) -> Any:
    """The relative entropy to even shares, by that of one rank that has all."""
    if plain(ranks) == 1:
        return noted(0.0, "relative_entropy", "", "one rank is always even", like=ranks)
    products = []
    for group in shares:
        if plain(group.value) > 0:
            ratio = named(f"by_even_share[{group.label}]", group.value * ranks)
            product = group.value * named(f"log[{group.label}]", log(ratio))
            products.append(group.times(named(f"product[{group.label}]", product)))
    most = named("entropy_of_one_rank_with_all", log(ranks))
    found = named("entropy_by_most", summed("entropy", products, "") / most)
    return named("relative_entropy", maximum(found, 0.0))  # below 0 by rounding alone
