"""The machine a plan is for: ranks, memory per rank, and the constants its times rest on."""

from __future__ import annotations

from typing import Literal

import msgspec

Device = Literal["cpu", "cuda"]
Tier = Literal["hbm", "ddr", "ssd"]
TIERS: tuple[Tier, ...] = ("hbm", "ddr", "ssd")


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number no formula may hide: its value, unit, source and the date of the source."""

    value: float
    unit: str
    source: str
    date: str


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``world_size`` ranks, ``local_world_size`` to a host; capacities are bytes per rank.

    ``group`` ranks are linked as closely as those of one host: a host, or a pod of several.
    """

    name: str
    world_size: int
    local_world_size: int
    compute_device: Device
    hbm_cap: int
    ddr_cap: int
    ssd_cap: int
    group: int
    constants: dict[str, Constant]

    @property
    def memory_per_rank(self) -> int:
        """Bytes a rank may fill: HBM on an accelerator, its share of host memory on a CPU."""
        return self.ddr_cap if self.compute_device == "cpu" else self.hbm_cap

    @property
    def capacity(self) -> tuple[int, int, int]:
        """Bytes per rank of HBM, DDR and SSD."""
        return self.hbm_cap, self.ddr_cap, self.ssd_cap

    @property
    def values(self) -> dict[str, float]:
        """The constants' values by name."""
        return {name: constant.value for name, constant in self.constants.items()}
