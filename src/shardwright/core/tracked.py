"""What a tracker saw of a training step's memory on one rank: the measured side of a footprint.

Bytes are those of distinct storages that were alive, by what they are for.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shardwright.core.footprint import Alive, ModuleMemory, PhasePeak
from shardwright.core.timeline import Kind

SCHEMA = "shardwright.tracked/1"

State = Literal[
    "before pre-forward",
    "after pre-forward",
    "peak forward",
    "before post-forward",
    "after post-forward",
    "before pre-backward",
    "after pre-backward",
    "before recompute",
    "after recompute",
    "peak backward",
    "before post-backward",
    "after post-backward",
]
STATES: tuple[State, ...] = State.__args__  # type: ignore[attr-defined]


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Live bytes at one moment of a module's step.

    ``pre`` and ``post`` are what hooks do around a forward or backward: where a unit of FSDP is
    gathered, freed and reduced. ``call`` counts the module's forwards of an iteration from 1, and
    its backwards have the number of their forward. A peak is the highest moment of all calls.
    """

    module: str
    state: State
    iteration: int
    call: int
    bytes: int
    by_category: dict[Kind, int]


class DeviceMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the allocator of an accelerator said for the same time. ``before`` is what was active
    when tracking began; ``retries`` are allocations that first had to give cached memory back."""

    device: str
    before: int
    active_peak: int
    allocated_peak: int
    reserved_peak: int
    retries: int
    out_of_memory: int


class Tracked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that was seen. ``iterations`` are the peaks of each, ``phases`` those over all of them;
    ``largest`` is what was alive at the peak."""

    model: str
    fake: bool
    peak: PhasePeak
    phases: tuple[PhasePeak, ...]
    iterations: tuple[PhasePeak, ...]
    modules: tuple[ModuleMemory, ...] = ()
    largest: tuple[Alive, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    device: DeviceMemory | None = None
    schema: str = SCHEMA

    @property
    def accuracy(self) -> float | None:
        """The tracked peak over the device's active peak: near 1 is good, less means that a
        category is missing; None without a device."""
        if self.device is None or not self.device.active_peak:
            return None
        return self.peak.bytes / self.device.active_peak
