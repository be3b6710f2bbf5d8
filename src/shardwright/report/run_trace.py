"""A step as planned and as measured, side by side, as a Chrome trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from shardwright.core.measurement import Measurement
from shardwright.core.timeline import EventRun, Kind, decode
from shardwright.job.plan import Plan
from shardwright.report.wording import printable

MOST_RANKS: Final = 64  # of a trace: a viewer shows no more
_MICROSECONDS: Final = 1e6


def run_trace(plan: Plan, measurement: Measurement | None = None) -> str:
    """Seconds of the first ``MOST_RANKS`` ranks: a process per rank, with a row for what was
    planned and, where there is a measurement, one for what was measured, its phases one after the
    other; what tables exchange while a rank computes has rows of its own."""
    sides = [("planned", plan.timeline)]
    if measurement:
        sides.append(("measured", measurement.timeline))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(min(plan.world_size, MOST_RANKS))
    ]
    for row, (side, timeline) in enumerate(sides):
        events.extend(_row(row, side, timeline, "time"))
        events.extend(_row(len(sides) + row, f"{side}, beside compute", timeline, "hidden"))
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": printable(plan.job.model.name), "plan": plan.fingerprint},
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _row(row: int, side: str, timeline: Sequence[EventRun], kind: Kind) -> Iterator[dict[str, Any]]:
    named: set[int] = set()
    for event in decode(run for run in timeline if run.event.rank < MOST_RANKS):
        if event.kind != kind or event.duration <= 0 or event.rank >= MOST_RANKS:
            continue
        start, length = event.start * _MICROSECONDS, event.duration * _MICROSECONDS
        if not math.isfinite(start + length):
            continue
        place = {"pid": event.rank, "tid": row}
        if event.rank not in named:
            named.add(event.rank)
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": side}}
        yield {
            "ph": "X",
            "name": printable(event.name),
            "cat": event.phase,
            **place,
            "ts": start,
            "dur": length,
        }
