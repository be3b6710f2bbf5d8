"""What one rank leaves behind after a run; the launcher merges all of them."""

from __future__ import annotations

from typing import Literal

import msgspec

from shardwright.core.timeline import Event

SCHEMA = "shardwright.record/1"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's events, its own losses (mean over its batch, every step) and its throughput."""

    schema: Literal["shardwright.record/1"]
    plan_fingerprint: str
    rank: int
    events: tuple[Event, ...]
    losses: tuple[float, ...]
    seconds_per_step: float
    memory_steps: tuple[int, ...]
    time_steps: tuple[int, ...]
    bad_rows: int
    versions: dict[str, str]
    machine: dict[str, str]
