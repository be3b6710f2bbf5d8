"""One way to shard a table with what each shard costs, and what placed tables add up to on every
rank: seconds by part, bytes by tier and kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import TIERS, Tier
from shardwright.core.model import TableSpec
from shardwright.core.optimizers import BY_ROW
from shardwright.core.option import Option, ShardRun
from shardwright.core.timeline import stretches
from shardwright.cost.embedding import Part, replica_part

MAX_EXACT = 2**62  # sums below this are exact in int64; above, Python's integers are used


class Cost(msgspec.Struct, frozen=True, gc=False):
    """What one shard costs a rank: seconds of a step by part, bytes by memory tier and kind.

    ``hidden`` are seconds that are shown but belong to no total.
    """

    seconds: dict[str, float]
    hbm: dict[str, int]
    ddr: dict[str, int]
    ssd: dict[str, int]
    hidden: dict[str, float]
    total_seconds: float
    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int

    @property
    def storage(self) -> tuple[int, int, int]:
        """Bytes of HBM, DDR and SSD."""
        return self.hbm_bytes, self.ddr_bytes, self.ssd_bytes

    def kinds(self, tier: Tier) -> dict[str, int]:
        """Bytes in one tier by kind."""
        return {"hbm": self.hbm, "ddr": self.ddr, "ssd": self.ssd}[tier]


def cost(
    seconds: dict[str, float],
    *,
    hbm: dict[str, int] | None = None,
    ddr: dict[str, int] | None = None,
    ssd: dict[str, int] | None = None,
    hidden: dict[str, float] | None = None,
) -> Cost:
    """A cost with its totals."""
    hbm, ddr, ssd = hbm or {}, ddr or {}, ssd or {}
    return Cost(
        seconds,
        hbm,
        ddr,
        ssd,
        hidden or {},
        sum(seconds.values()),
        sum(hbm.values()),
        sum(ddr.values()),
        sum(ssd.values()),
    )


class Choice(msgspec.Struct, frozen=True, dict=True):
    """A table's option; ``costs[i]`` is what each shard of ``option.runs[i]`` costs.

    ``everywhere`` are seconds that every rank spends whoever holds the shards, ``latency`` those
    of the collectives of an exchange that the table has for itself; 0 where it shares one. With
    ``dedup`` a row that a rank asks for several times travels once.
    """

    table: TableSpec
    option: Option
    costs: tuple[Cost, ...]
    everywhere: float = 0.0
    latency: float = 0.0
    dedup: bool = False

    @cached_property
    def shard_costs(self) -> tuple[Cost, ...]:
        """The cost of every shard, one by one."""
        runs = zip(self.option.runs, self.costs, strict=True)
        return tuple(cost for run, cost in runs for _ in range(run.count))

    # Kept, for every draft that has the choice asks again.
    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank keeps the table whole."""
        return self.option.traits.replicated

    def part(self, ranks: int) -> Part:
        """That of which it has the latencies in an exchange of its own."""
        if self.is_replicated:
            return replica_part(self.option.compute_kernel, False)
        return "steady" if ranks > 1 and self.is_steady else "routed"

    @cached_property
    def is_steady(self) -> bool:
        """Whether as many ids go to every rank in each step: one of each bag, all to one rank."""
        cut = self.option.traits.cuts_rows and self.option.runs[0].rows < self.table.rows
        return not (cut or self.dedup or self.table.jagged)

    @cached_property
    def has_strips(self) -> bool:
        """Whether its update needs sums over columns that lie in several blocks."""
        routed = not self.is_replicated and self.table.optimizer in BY_ROW
        return routed and any(run.columns < self.table.dim for run in self.option.runs)

    @cached_property
    def total_storage(self) -> tuple[int, int, int]:
        """Bytes of HBM, DDR and SSD summed over all shards."""
        hbm = ddr = ssd = 0
        for run, cost in zip(self.option.runs, self.costs, strict=True):
            hbm += run.count * cost.hbm_bytes
            ddr += run.count * cost.ddr_bytes
            ssd += run.count * cost.ssd_bytes
        return hbm, ddr, ssd


@dataclass(frozen=True)
class Placed:
    """A table's choice and the rank of each of its shards; a ``range`` where they follow."""

    choice: Choice
    ranks: Sequence[int]

    def stretches(self) -> Iterator[tuple[int, ShardRun, Cost]]:
        """Shards alike on ranks that follow one another: the first rank, the shards, their cost."""
        # Runs, not shards: a table cut by rows over hundreds of ranks is one run, and everything
        # that adds up placed tables goes through here.
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
