from __future__ import annotations

import json
from typing import Any

import footprints
from footprints import footprint

from shardwright.report.traces import chrome_trace


def events(phase: str) -> list[dict[str, Any]]:
    document = json.loads(chrome_trace(footprint()))
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_counters_add_up_to_all_at_every_moment() -> None:
    level: dict[str, int] = {}
    at: dict[int, dict[str, int]] = {}
    for event in events("C"):
        level[event["name"]] = event["args"]["bytes"]
        at[event["ts"]] = dict(level)
    for moment, levels in at.items():
        total = levels.pop("all")
        assert total == sum(levels.values()) == sum(footprints.samples()[moment].bytes)


def test_the_highest_counter_is_the_peak() -> None:
    highest = max(e["args"]["bytes"] for e in events("C") if e["name"] == "all")
    assert highest == footprint().worst.peak_bytes


def test_phases_and_what_runs_are_slices_without_gaps() -> None:
    phases = [e for e in events("X") if e["cat"] == "phase"]
    assert [e["name"] for e in phases] == ["forward", "backward", "step"]
    assert sum(e["dur"] for e in phases) == len(footprints.samples())
    names = [e["name"] for e in events("X") if e["cat"] == "forward"]
    assert names == ["layers.0", "layers.1", "layers.2", "layers.3", "output"]


def test_the_trace_says_that_its_axis_is_not_time() -> None:
    document = json.loads(chrome_trace(footprint()))
    assert "not time" in document["otherData"]["axis"]
    assert "stage 0" in document["traceEvents"][0]["args"]["name"]
