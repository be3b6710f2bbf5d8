"""One way to shard one table, with what each of its shards costs."""

from __future__ import annotations

from functools import cached_property

import msgspec

from shardwright.core.cluster import Tier
from shardwright.core.model import TableSpec
from shardwright.core.optimizers import BY_ROW
from shardwright.core.option import Option


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

    @property
    def is_steady(self) -> bool:
        """Whether as many ids go to every rank in each step: one of each bag, all to one rank."""
        cut = self.option.traits.cuts_rows and self.option.runs[0].rows < self.table.rows
        return not (cut or self.dedup or self.table.jagged)

    @property
    def has_strips(self) -> bool:
        """Whether its update needs sums over columns that lie in several blocks."""
        routed = not self.option.traits.replicated and self.table.optimizer in BY_ROW
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
