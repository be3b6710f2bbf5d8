"""A plan rank by rank, and how seconds and bytes lie on the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.core.amount import largest, named, plain, smallest, total, where
from shardwright.core.quantities import SAME_SECONDS
from shardwright.core.statistics import Measure, RankStatistics, Spread, Unevenness
from shardwright.cost.imbalance import Ranks, each_rank, mean, unevenness, unit_of
from shardwright.job.plan import Plan
from shardwright.planner.statistics.holdings import Holdings
from shardwright.planner.statistics.tables import traffic

MEASURES: tuple[Measure, ...] = ("seconds", "hbm_bytes", "ddr_bytes", "ssd_bytes")


def rank_statistics(plan: Plan, held: Holdings) -> tuple[RankStatistics, ...]:
    """Every rank, in order."""
    ids, rows = _traffic(plan, held)
    shards = _shards(plan, held)
    left = plan.reserved
    return tuple(
        RankStatistics(
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


def measured(plan: Plan) -> Iterator[tuple[Measure, list[float]]]:
    """Seconds and the bytes of every memory that is used, of each rank."""
    for measure in MEASURES:
        values = [getattr(totals, measure) for totals in plan.ranks]
        if sum(values):
            yield measure, values


def all_unevenness(plan: Plan) -> tuple[Unevenness, ...]:
    """How far seconds and bytes are from lying evenly on the ranks."""
    found = (unevenness(measure, each_rank(values)) for measure, values in measured(plan))
    return tuple(one for one in found if one is not None)


def spreads(plan: Plan) -> tuple[Spread, ...]:
    """Largest, smallest, mean and medians of seconds and bytes."""
    return tuple(spread(measure, each_rank(values)) for measure, values in measured(plan))


def spread(of: Measure, groups: Sequence[Ranks]) -> Spread:
    """The same of one measure."""
    unit = unit_of(of)
    values = [group.value for group in groups]
    most, least = largest("largest", values, unit), smallest("smallest", values, unit)
    low, high = medians(groups)
    return Spread(
        of,
        most,
        ranks_with(groups, plain(most)),
        least,
        ranks_with(groups, plain(least)),
        mean(of, groups, unit, total),
        named("low_median", low, unit),
        named("high_median", high, unit),
    )


def medians(groups: Sequence[Ranks]) -> tuple[Any, Any]:
    """The value in the middle, and the one beside it where ranks are even in number."""
    ordered = sorted(groups, key=lambda group: float(plain(group.value)))
    each = [group.value for group in ordered for _ in group.ranks]
    return each[(len(each) - 1) // 2], each[len(each) // 2]


def ranks_with(groups: Sequence[Ranks], wanted: float) -> tuple[int, ...]:
    """The ranks that have a value, rounding apart."""
    near = SAME_SECONDS * abs(wanted) if isinstance(wanted, float) else 0
    found = (group.ranks for group in groups if abs(plain(group.value) - wanted) <= near)
    return tuple(sorted(rank for ranks in found for rank in ranks))
