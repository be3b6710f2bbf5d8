"""What placed tables add up to on every rank: seconds by part, bytes by tier and kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import TIERS, Tier
from shardwright.core.option import ShardRun
from shardwright.core.timeline import stretches
from shardwright.planner.choice import Choice, Cost

MAX_EXACT = 2**62  # sums below this are exact in int64; above, Python's integers are used


@dataclass(frozen=True)
class Placed:
    """A table's choice and the rank of each of its shards; a ``range`` where they follow."""

    choice: Choice
    ranks: Sequence[int]

    def stretches(self) -> Iterator[tuple[int, ShardRun, Cost]]:
        """Shards alike on ranks that follow one another: the first rank, the shards, their cost."""
        start = 0
        for run, cost in zip(self.choice.option.runs, self.choice.costs, strict=True):
            ranks = self.ranks[start : start + run.count]
            start += run.count
            done = 0
            for first, count in stretches(ranks):
                yield first, _part(run, done, count), cost
                done += count

    def on_rank(self, rank: int) -> Iterator[tuple[int, ShardRun, Cost]]:
        """The stretches that reach ``rank``: the number of each, its shards, their cost."""
        for number, (first, run, cost) in enumerate(self.stretches()):
            if first <= rank < first + run.count:
                yield number, run, cost


def _part(run: ShardRun, start: int, count: int) -> ShardRun:
    if count == run.count:
        return run
    row, column = run.row + start * run.row_step, run.column + start * run.column_step
    steps = (run.row_step, run.column_step) if count > 1 else (0, 0)
    return ShardRun(run.rows, run.columns, count, row, column, *steps)


@dataclass(frozen=True)
class Tally:
    """``seconds`` [ranks] of each part; bytes [ranks] of each tier and kind, as exact integers."""

    seconds: dict[str, NDArray[np.float64]]
    storage: dict[Tier, dict[str, NDArray[Any]]]

    def parts(self, rank: int) -> dict[str, float]:
        """Seconds of one rank by part."""
        return {part: float(values[rank]) for part, values in self.seconds.items()}

    def kinds(self, tier: Tier, rank: int) -> dict[str, int]:
        """Bytes of one rank in a tier by kind."""
        return {kind: int(values[rank]) for kind, values in self.storage[tier].items()}

    def tier_bytes(self, tier: Tier, ranks: int) -> list[int]:
        """Bytes of every rank in a tier."""
        kinds = self.storage[tier].values()
        return [sum(int(values[rank]) for values in kinds) for rank in range(ranks)]


def tally(placed: Iterable[Placed], ranks: int) -> Tally:
    """Add everything up."""
    placed = tuple(placed)
    total = sum(sum(p.choice.total_storage) for p in placed)
    dtype: Any = np.int64 if total < MAX_EXACT else object
    seconds: dict[str, NDArray[np.float64]] = {}
    storage: dict[Tier, dict[str, NDArray[Any]]] = {tier: {} for tier in TIERS}
    for item in placed:
        for first, run, cost in item.stretches():
            where = slice(first, first + run.count)
            for part, value in cost.seconds.items():
                _row(seconds, part, ranks, np.float64)[where] += value
            for tier in TIERS:
                for kind, size in cost.kinds(tier).items():
                    _row(storage[tier], kind, ranks, dtype)[where] += size
    return Tally(seconds, storage)


def _row(rows: dict[str, NDArray[Any]], name: str, ranks: int, dtype: Any) -> NDArray[Any]:
    if name not in rows:
        rows[name] = np.zeros(ranks, dtype)
    return rows[name]
