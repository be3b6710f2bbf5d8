"""Chrome trace JSON, which Perfetto opens: a step as planned and as measured, and its live bytes.

The trace of bytes has no clock: a microsecond is a moment of the step, in order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from shardwright.core.footprint import Footprint, RankMemory, Sample
from shardwright.core.measurement import Measurement
from shardwright.core.timeline import EventRun, Kind, category, decode, in_order
from shardwright.job.plan import Plan
from shardwright.report.wording import headline, peak_text, printable

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
        # A trace with an infinity is no JSON, and a viewer opens none of it.
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


_PHASES, _PLACES = 1, 2  # rows of slices
TRACE_AXIS = "moments of a step in order, not time: each microsecond is one"


def chrome_trace(footprint: Footprint, rank: RankMemory | None = None) -> str:
    """Live bytes as counters by category and in all; phases, and what they run, as slices."""
    rank = rank or footprint.worst
    events = [*_names(rank), *_counters(rank), *_slices(rank, "phase"), *_slices(rank, "name")]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "what": headline(footprint),
            "class": rank.name,
            "axis": TRACE_AXIS,
            "peak": f"{rank.peak_bytes} bytes in {peak_text(rank)}",
        },
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def _names(rank: RankMemory) -> Iterator[dict[str, Any]]:
    process = {"name": f"{rank.name} ({TRACE_AXIS})"}
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": process}
    for thread, name in ((_PHASES, "phases"), (_PLACES, "what runs")):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": {"name": name}}


def _counters(rank: RankMemory) -> Iterator[dict[str, Any]]:
    """A counter per category where it changes, and one of all together."""
    columns = {kind: rank.kinds.index(kind) for kind in in_order(rank.kinds)}
    known: dict[str, int] = {}
    for moment, sample in enumerate(rank.timeline):
        values = {category(kind): sample.bytes[column] for kind, column in columns.items()}
        for name, nbytes in ({"all": sum(sample.bytes)} | values).items():
            # Counters hold their value until the next event: most moments change one or two of
            # them.
            if known.get(name, 0) != nbytes:
                known[name] = nbytes
                yield {
                    "ph": "C",
                    "name": name,
                    "pid": 0,
                    "ts": moment,
                    "args": {"bytes": nbytes},
                }


def _slices(rank: RankMemory, of: str) -> Iterator[dict[str, Any]]:
    """Neighbouring samples of one phase, or of one name, as one slice."""
    moment = 0

    def key(sample: Sample) -> tuple[str, str]:
        return (sample.phase, "" if of == "phase" else sample.name)

    for (phase, name), samples in groupby(rank.timeline, key):
        length = sum(1 for _ in samples)
        if of == "phase" or name:
            yield {
                "ph": "X",
                "name": phase if of == "phase" else name,
                "cat": "phase" if of == "phase" else phase,
                "pid": 0,
                "tid": _PHASES if of == "phase" else _PLACES,
                "ts": moment,
                "dur": length,
            }
        moment += length
