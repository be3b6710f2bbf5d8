"""A plan rank by rank, and how evenly seconds and bytes lie on the ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.plan import Plan
from shardwright.core.statistics import Measure, RankStatistics, Spread, Unevenness
from shardwright.cost.imbalance import imbalance
from shardwright.planner.statistics.holdings import Holdings
from shardwright.planner.statistics.traffic import shard_traffic

SAME_SECONDS = 1e-9  # relative; closer ones differ by rounding
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
            hbm_share=_share(totals.hbm_bytes, left.hbm_left),
            ddr_share=_share(totals.ddr_bytes, left.ddr_left),
            ssd_share=_share(totals.ssd_bytes, left.ssd_left),
            input_bytes=ids[totals.rank],
            output_bytes=rows[totals.rank],
            shards={kind: int(n[totals.rank]) for kind, n in shards if n[totals.rank]},
        )
        for totals in plan.ranks
    )


def idle_seconds(slowest: float, own: float) -> float:
    """What a rank waits for the slowest one; nothing where they differ by rounding."""
    idle = slowest - own
    return idle if idle > SAME_SECONDS * slowest else 0.0


def _share(nbytes: int, most: int) -> float:
    return nbytes / most if most > 0 else 0.0


def _traffic(plan: Plan, held: Holdings) -> tuple[list[int], list[int]]:
    """Bytes of ids in and of rows out on every rank."""
    ids, rows = [0] * plan.world_size, [0] * plan.world_size
    for placed in held.tables:
        kind = placed.choice.option.sharding_type
        for first, run, _ in placed.stretches():
            one = shard_traffic(plan, placed.choice.table, kind, run.rows, run.columns)
            for rank in range(first, first + run.count):
                ids[rank] += int(one[0])
                rows[rank] += int(one[1])
    return ids, rows


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


def unevenness(plan: Plan) -> tuple[Unevenness, ...]:
    """How far seconds and bytes are from lying evenly on the ranks."""
    found = []
    for measure, values in measured(plan):
        told = imbalance(values)
        if told is not None:
            most = (len(values) - 1) / len(values)
            found.append(
                Unevenness(
                    measure,
                    told.total_variation,
                    told.total_distance,
                    told.chi,
                    max(told.kl, 0.0),  # it is never negative but by rounding
                    most,
                    2 * most,
                )
            )
    return tuple(found)


def spreads(plan: Plan) -> tuple[Spread, ...]:
    """Largest, smallest, mean and medians of seconds and bytes."""
    return tuple(
        Spread(
            measure,
            max(values),
            ranks_with(values, max(values)),
            min(values),
            ranks_with(values, min(values)),
            sum(values) / len(values),
            statistics.median_low(values),
            statistics.median_high(values),
        )
        for measure, values in measured(plan)
    )


def ranks_with(values: Sequence[float], wanted: float) -> tuple[int, ...]:
    """The ranks that have a value, rounding apart."""
    near = SAME_SECONDS * abs(wanted) if isinstance(wanted, float) else 0
    return tuple(rank for rank, value in enumerate(values) if abs(value - wanted) <= near)
