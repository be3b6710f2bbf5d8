"""What a plan adds up to, rank by rank and table by table, and how evenly.

Every value follows from the plan alone. Bytes are exact integers, seconds are per training step,
ranks are their true numbers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shardwright.core.cluster import Tier

Measure = Literal["seconds", "hbm_bytes", "ddr_bytes", "ssd_bytes"]
MEASURE_WORDS: dict[Measure, str] = {
    "seconds": "seconds",
    "hbm_bytes": "HBM",
    "ddr_bytes": "DDR",
    "ssd_bytes": "SSD",
}


def unit_of(measure: Measure) -> str:
    """Seconds or bytes."""
    return "s" if measure == "seconds" else "B"


class RankStatistics(msgspec.Struct, frozen=True):
    """One rank: what it fills of each memory, what its step takes, and what passes through it.

    Shares are of the bytes that may be filled. ``input_bytes`` are ids that reach its shards in a
    step, ``output_bytes`` the rows that they hand out; ``shards`` are counted by sharding type.
    ``idle_seconds`` it waits for the slowest rank.
    """

    rank: int
    seconds: float
    parts: dict[str, float]
    idle_seconds: float
    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int
    hbm_share: float
    ddr_share: float
    ssd_share: float
    input_bytes: int
    output_bytes: int
    shards: dict[str, int]


class TableStatistics(msgspec.Struct, frozen=True):
    """One table: seconds and bytes are sums over its shards.

    ``pooling_factor`` and ``num_poolings`` are sums over its features, ``ids`` those of one rank's
    batch. ``columns`` is the width of its shards; ``load_factor`` the cached share of its rows,
    where its kernel caches.
    """

    name: str
    fqn: str
    sharding_type: str
    compute_kernel: str
    seconds: float
    parts: dict[str, float]
    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int
    load_factor: float | None
    pooling_factor: float
    num_poolings: float
    ids: float
    pooled: bool
    weighted: bool
    features: int
    rows: int
    dim: int
    columns: int
    ranks: tuple[int, ...]
    batch_sizes: tuple[int, ...] | None = None


class KernelStatistics(msgspec.Struct, frozen=True):
    """The tables of one compute kernel; bytes of all their shards, replicas counted each.

    Weights, optimizer states and the rest add up to the bytes of the three memories. The job names
    a kernel for ``named`` of the tables.
    """

    kernel: str
    tables: int
    named: int
    weight_bytes: int
    optimizer_bytes: int
    other_bytes: int
    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int


class Unevenness(msgspec.Struct, frozen=True):
    """How unevenly ``of`` lies on the ranks; 0 is even. The shares of k ranks are compared to 1/k.

    ``largest_deviation`` is at most (k - 1) / k, ``total_distance`` at most twice that; ``chi`` and
    ``relative_entropy`` are 1 where one rank has all.
    """

    of: Measure
    largest_deviation: float
    total_distance: float
    chi: float
    relative_entropy: float
    highest_deviation: float
    highest_distance: float


class RankSpread(msgspec.Struct, frozen=True):
    """The largest and the smallest of ``of`` with the ranks that have it, and what lies between."""

    of: Measure
    largest: float
    largest_ranks: tuple[int, ...]
    smallest: float
    smallest_ranks: tuple[int, ...]
    mean: float
    low_median: float
    high_median: float


class PartMaximum(msgspec.Struct, frozen=True):
    """The ranks on which one part of a step takes longest, and its mean over all ranks."""

    part: str
    seconds: float
    ranks: tuple[int, ...]
    mean: float


class CriticalTerm(msgspec.Struct, frozen=True):
    """What every rank has to wait for together: as long as the slowest ``rank`` takes."""

    name: str
    communication: bool
    seconds: float
    rank: int


class CriticalPath(msgspec.Struct, frozen=True):
    """Seconds that no rank can go around if all meet after each term."""

    communication: float
    compute: float
    terms: tuple[CriticalTerm, ...]

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.communication + self.compute


class PeakTier(msgspec.Struct, frozen=True):
    """The ranks whose bytes are within 1 MiB of ``nbytes``, the most of those not yet listed."""

    nbytes: int
    ranks: tuple[int, ...]


class LedgerLine(msgspec.Struct, frozen=True):
    """What a part of a rank's memory goes to."""

    what: str
    nbytes: int


class MemoryLedger(msgspec.Struct, frozen=True):
    """Where every byte of one memory goes on its fullest rank: the lines sum to ``capacity``."""

    tier: Tier
    rank: int
    capacity: int
    lines: tuple[LedgerLine, ...]


class TableShare(msgspec.Struct, frozen=True):
    """What one table takes of a rank."""

    name: str
    sharding_type: str
    amount: float


class Bottleneck(msgspec.Struct, frozen=True):
    """The tables that take most of the worst rank; ``ranks`` are all that are as bad as it."""

    of: Measure
    rank: int
    ranks: tuple[int, ...]
    total: float
    tables: tuple[TableShare, ...]


class RankWaiting(msgspec.Struct, frozen=True):
    """What the ranks wait for: the slowest rank, and the part in which it loses most to the mean.

    ``longest`` is the rank that waits longest; ``part`` is empty where none waits.
    """

    slowest: int
    mean_seconds: float
    longest: int
    longest_seconds: float
    part: str
    part_seconds: float
    part_mean: float


class MemoryPrice(msgspec.Struct, frozen=True):
    """What one more GiB of a memory on every rank would buy.

    ``bound_falls`` is by how many seconds the lower bound falls; 0 where that memory is not what
    limits it. ``price`` is the bound's own, in seconds for the first further GiB at its present
    slope.
    """

    tier: Tier
    bound_falls: float
    price: float


class Statistics(msgspec.Struct, frozen=True):
    """Everything at once; lists over ranks and tables are in the plan's order.

    ``decisive`` is the memory that weights live in, whose peaks these are. ``sum_of_maxima`` are
    the seconds of a step whose every part takes as long as on the slowest rank for it; ``excess``
    is by what share the slowest rank is above the mean.
    """

    decisive: Tier
    ranks: tuple[RankStatistics, ...]
    tables: tuple[TableStatistics, ...]
    kernels: tuple[KernelStatistics, ...]
    unevenness: tuple[Unevenness, ...]
    spreads: tuple[RankSpread, ...]
    parts: tuple[PartMaximum, ...]
    sum_of_maxima: float
    excess: float
    critical_path: CriticalPath
    peak_tiers: tuple[PeakTier, ...]
    ledgers: tuple[MemoryLedger, ...]
    bottlenecks: tuple[Bottleneck, ...]
    waiting: RankWaiting
