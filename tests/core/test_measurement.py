from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.core.errors import InputError
from shardwright.core.measurement import (
    SCHEMA,
    Curve,
    Measurement,
    read_measurement,
    write_measurement,
)
from shardwright.core.timeline import Event, encode


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
