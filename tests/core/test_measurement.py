from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shardwright.core.errors import InputError
from shardwright.core.measurement import (
    SCHEMA,
    Curve,
    Measurement,
    read_measurement,
    write_measurement,
)
from shardwright.core.timeline import Event, EventRun, encode


def test_a_measurement_comes_back_from_its_file(tmp_path: Path) -> None:
    events = encode([Event(rank, 1, "load", "input", "ids", 8) for rank in range(2)])
    measured = Measurement(
        SCHEMA, "f", 2, 1, (1,), (1,), events, Curve((1,), (0.5,)), None, 2.0, 0, {}, {}
    )
    write_measurement(measured, tmp_path / "measured.json")
    assert read_measurement(tmp_path / "measured.json") == measured


def test_a_missing_measurement_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    with pytest.raises(InputError) as caught:
        read_measurement(path)
    assert str(caught.value) == (
        f"{path}: expected a measurement file, got no such file. "
        "Make one with `shardwright train JOB.toml`."
    )


def test_ranks_that_a_run_did_not_have_and_more_events_than_memory_is_for_are_refused(
    tmp_path: Path,
) -> None:
    event = Event(0, 1, "load", "input", "ids", 8)
    measured = Measurement(
        SCHEMA, "f", 2, 1, (1,), (1,), (EventRun(event, 3),), Curve(), None, 2.0, 0, {}, {}
    )
    path = tmp_path / "measured.json"
    write_measurement(measured, path)
    with pytest.raises(InputError, match="timeline: expected 2 ranks, got rank 2"):
        read_measurement(path)
    many = msgspec.structs.replace(
        measured, world_size=2**20, timeline=(EventRun(event, 2**20),) * 3
    )
    write_measurement(many, path)
    with pytest.raises(InputError, match="timeline: expected at most 2097152 events, got 3145728"):
        read_measurement(path)
