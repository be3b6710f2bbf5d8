"""A footprint's timeline as Chrome trace JSON, which Perfetto opens.

Memory has no clock here: a microsecond of the trace is a moment of the step, in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from shardwright.core.categories import category, in_order
from shardwright.core.footprint import Footprint, RankMemory, Sample
from shardwright.report.memory_wording import headline, peak_text

_PHASES, _PLACES = 1, 2  # rows of slices
AXIS = "moments of a step in order, not time: each microsecond is one"


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
            "axis": AXIS,
            "peak": f"{rank.peak_bytes} bytes in {peak_text(rank)}",
        },
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def _names(rank: RankMemory) -> Iterator[dict[str, Any]]:
    process = {"name": f"{rank.name} ({AXIS})"}
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
