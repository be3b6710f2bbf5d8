"""The machine a plan is for: ranks, memory per rank, the constants its times rest on, and the TOML
file of a measured one."""

# A capacity or a constant without a source is worth nothing: a plan is refused or chosen by it. So
# a cluster file says of each number where it is from and of how many measurements it is the
# median, and what was not measured is listed. `compare` gates on seconds of a calibrated cluster
# only.

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shardwright.core.document import (
    convert,
    encode_toml,
    parse_toml,
    read_bytes,
    unknown_key,
    write_atomically,
)
from shardwright.core.errors import InputError

Device = Literal["cpu", "cuda"]
Tier = Literal["hbm", "ddr", "ssd"]
TIERS: tuple[Tier, ...] = ("hbm", "ddr", "ssd")


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number no formula may hide: its value, unit, source and the date of the source."""

    value: float
    unit: str
    source: str
    date: str


def decisive(device: Device) -> Tier:
    """The memory that weights live in: HBM on an accelerator, its host's on a CPU."""
    return "ddr" if device == "cpu" else "hbm"


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
    def linked(self) -> int | None:
        """``group``; None where that is all ranks."""
        # None, not the number of ranks: formulas then have one link for all bytes, where with a
        # number they would derive a network that is never crossed.
        return None if self.group >= self.world_size else self.group

    @property
    def decisive_tier(self) -> Tier:
        """The memory that weights live in."""
        return decisive(self.compute_device)

    @property
    def memory_per_rank(self) -> int:
        """Bytes a rank may fill of that."""
        return self.capacity[TIERS.index(self.decisive_tier)]

    @property
    def capacity(self) -> tuple[int, int, int]:
        """Bytes per rank of HBM, DDR and SSD."""
        return self.hbm_cap, self.ddr_cap, self.ssd_cap

    @property
    def values(self) -> dict[str, float]:
        """The constants' values by name."""
        return {name: constant.value for name, constant in self.constants.items()}


SCHEMA = "shardwright.cluster/1"
MAKE = "Make one with `shardwright calibrate -o cluster.toml`."
CAPACITIES = ("hbm_cap", "ddr_cap", "ssd_cap")

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
MAX_PLANNED = 2**14  # ranks of a job that is planned
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_PLANNED)]
Value = Annotated[float, msgspec.Meta(ge=0, le=1e20)]
Day = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}(-\d{2})?$")]


class SourcedFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A number with its unit, and where it is from.

    ``median_of`` is the number of measurements, 0 of a number that was not measured; ``spread`` is
    half of the distance between their quartiles, as a share of the value.
    """

    value: Value
    unit: Text
    source: Text
    date: Day
    median_of: Count = 0
    spread: Value = 0.0


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine as ``world_size`` ranks of it found it; ``capacities`` are bytes per rank."""

    schema: Text
    date: Day
    world_size: Ranks
    compute_device: Device
    backend: Text
    machine: dict[Text, Text]
    capacities: dict[Text, SourcedFigure]
    constants: dict[Text, SourcedFigure]

    @property
    def busy(self) -> str:
        """How busy the machine was while it was measured; empty where it was quiet."""
        return "made on a busy machine" + said if (said := busy(self.machine)) else ""

    @property
    def carried_over(self) -> tuple[str, ...]:
        """The constants that were not measured, sorted."""
        return tuple(sorted(n for n, figure in self.constants.items() if not figure.median_of))


BUSY = 0.5  # of the cores, that others want: seconds are then of another machine than a quiet one


def busy(machine: Mapping[str, str]) -> str:
    """The load that facts of a machine tell, in brackets, if it is above half of its cores."""
    load, cores = machine.get("load", machine.get("load_before", "")), machine.get("cores", "")
    try:
        above = float(load) > BUSY * int(cores)
    except ValueError:
        return ""
    return f" (load {load} of others on {cores} cores)" if above else ""


def read_calibration(path: Path | str) -> Calibration:
    """Read a cluster file; whatever it cannot be is one line that names the key."""
    raw = read_bytes(path, "cluster", MAKE)
    return parse_calibration(parse_toml(raw, str(path), "a cluster"), str(path))


def parse_calibration(document: dict[str, Any], where: str) -> Calibration:
    """Check a decoded cluster file."""
    found = document.get("schema", "none")
    if found != SCHEMA:
        raise InputError(f"{where}: schema", f"'{SCHEMA}'", repr(found)[:60], MAKE)
    # Figure by figure first, for an error of the whole would name the section only.
    for group in ("capacities", "constants"):
        figures = document.get(group)
        for name, figure in figures.items() if isinstance(figures, dict) else ():
            if group == "capacities" and name not in CAPACITIES:
                raise unknown_key(where, f"{group}.{name}", name, CAPACITIES)
            convert(figure, SourcedFigure, where, f"{group}.{name}")
    return convert(document, Calibration, where)


def write_calibration(calibration: Calibration, path: Path | str) -> None:
    """Write the file, whole or not at all."""
    write_atomically(path, to_toml(calibration).encode())


def to_toml(calibration: Calibration) -> str:
    """The file's text: plain keys first, then a section for each figure."""
    document: dict[str, Any] = msgspec.to_builtins(calibration)
    lines = [
        "# Measured by `shardwright calibrate`. A job names this file instead of a preset:",
        "# [cluster]",
        '# file = "cluster.toml"',
        "\n",
    ]
    return "\n".join(lines) + encode_toml(document)
