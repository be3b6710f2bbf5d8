from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.cluster import (
    SCHEMA,
    Calibration,
    SourcedFigure,
    parse_calibration,
    read_calibration,
    to_toml,
    write_calibration,
)
from shardwright.core.errors import InputError
from shardwright.job.job import parse_job, read_job

RATE = SourcedFigure(2.5e9, "B/s", "measured: copy", "2026-11-21", 9, 0.04)
FOUND = Calibration(
    SCHEMA,
    "2026-11-21",
    2,
    "cpu",
    "gloo",
    {"cores": "2"},
    {"ddr_cap": SourcedFigure(1e9, "B", "the host's", "2026-11-21", 1)},
    {"memory_rate": RATE, "ssd_rate": SourcedFigure(5e8, "B/s", "carried over", "2026-11")},
)
DOCUMENT: dict[str, Any] = tomllib.loads(to_toml(FOUND))

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
NUMBER = st.floats(0, 1e20)


def _refused(document: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        parse_calibration(document, "c.toml")
    message = str(caught.value)
    assert "\n" not in message
    return message


def _with(**figure: Any) -> dict[str, Any]:
    constants = DOCUMENT["constants"]
    return DOCUMENT | {"constants": constants | {"memory_rate": constants["memory_rate"] | figure}}


def test_a_cluster_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_calibration(FOUND, tmp_path / "c.toml")
    assert read_calibration(tmp_path / "c.toml") == FOUND


@given(st.dictionaries(TEXT, TEXT), TEXT, NUMBER, NUMBER)
def test_any_text_and_number_survives_the_file(
    machine: dict[str, str], source: str, value: float, spread: float
) -> None:
    figure = SourcedFigure(value, "B/s", source, "2026-11", 3, spread)
    found = msgspec.structs.replace(FOUND, machine=machine, constants={source: figure})
    assert parse_calibration(tomllib.loads(to_toml(found)), "c.toml") == found


def test_what_was_not_measured_is_listed_apart() -> None:
    assert FOUND.carried_over == ("ssd_rate",)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, f"c.toml: schema: expected '{SCHEMA}', got 'none'. Make one with "),
        (DOCUMENT | {"schema": 3}, f"c.toml: schema: expected '{SCHEMA}', got 3. Make one with "),
        (
            DOCUMENT | {"wrld_size": 2},
            "c.toml: unknown key 'wrld_size'. Did you mean 'world_size'? Known here: ",
        ),
        (
            _with(spred=0.1),
            "c.toml: unknown key 'constants.memory_rate.spred'. Did you mean 'spread'? Known ",
        ),
        (
            DOCUMENT | {"capacities": {"dr_cap": {}}},
            "c.toml: unknown key 'capacities.dr_cap'. Did you mean 'ddr_cap'? Known here: ",
        ),
        (
            DOCUMENT | {"world_size": 0},
            "c.toml: world_size: expected int >= 1, got 0.",
        ),
        (
            DOCUMENT | {"compute_device": "gpu"},
            "c.toml: compute_device: expected one of cpu, cuda, got 'gpu'.",
        ),
        (
            _with(value="fast"),
            "c.toml: constants.memory_rate.value: expected float, got 'fast'.",
        ),
        (
            _with(value=-1.0),
            "c.toml: constants.memory_rate.value: expected float >= 0.0, got -1.0.",
        ),
        (
            _with(value=float("nan")),
            "c.toml: constants.memory_rate.value: expected float >= 0.0, got nan.",
        ),
        (
            _with(value=float("inf")),
            "c.toml: constants.memory_rate.value: expected float <= 1e+20, got inf.",
        ),
        (
            _with(date="yesterday"),
            "c.toml: constants.memory_rate.date: expected str matching regex ",
        ),
        (
            DOCUMENT | {"constants": {"memory_rate": {"value": 1.0}}},
            "c.toml: constants.memory_rate.unit: expected a value, got none.",
        ),
        (
            DOCUMENT | {"constants": {"memory_rate": 3}},
            "c.toml: constants.memory_rate: expected a section, { KEY = VALUE }, got 3.",
        ),
        (
            DOCUMENT | {"constants": 3},
            "c.toml: constants: expected a section, { KEY = VALUE }, got 3.",
        ),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_the_key(
    document: dict[str, Any], message: str
) -> None:
    assert _refused(document).startswith(message)


def test_a_file_that_is_no_toml_or_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    with pytest.raises(InputError, match=r"expected a cluster file, got no such file\. Make one"):
        read_calibration(path)
    path.write_text("x = \n")
    with pytest.raises(InputError, match="expected a cluster in TOML"):
        read_calibration(path)


TABLE = {"name": "a", "rows": 10, "dim": 16}
JOB = '[cluster]\nfile = "c.toml"\n[[tables]]\nname = "a"\nrows = 10\ndim = 16\n'


def test_a_job_finds_its_cluster_file_beside_itself_and_keeps_what_it_said(tmp_path: Path) -> None:
    write_calibration(FOUND, tmp_path / "c.toml")
    (tmp_path / "job.toml").write_text(JOB)
    assert read_job(tmp_path / "job.toml").cluster.measured == FOUND


def test_the_working_directory_comes_before_the_jobs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.toml").write_text(JOB)
    write_calibration(FOUND, tmp_path / "jobs" / "c.toml")
    here = msgspec.structs.replace(FOUND, world_size=4)
    write_calibration(here, tmp_path / "c.toml")
    monkeypatch.chdir(tmp_path)
    assert read_job("jobs/job.toml").cluster.measured == here


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"file": "c.toml", "preset": "local"},
            "job: cluster: expected a file or a preset, got both. Leave one of the two out; on the "
            "command line --set cluster.preset= takes the preset away",
        ),
        ({"file": "no.toml"}, "no.toml: expected a cluster file, got no such file. Make one"),
        ({"file": "a\0b"}, "job: cluster.file: expected the name of a file, got 'a\\x00b'."),
        ({"measured": {}}, "job: unknown key 'cluster.measured'. Known here: "),
    ],
)
def test_a_job_with_a_bad_cluster_file_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_job({"cluster": section, "tables": [TABLE]})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"cores": "2", "load": "1.0"}, ""),
        ({"cores": "2", "load": "1.1"}, "made on a busy machine (load 1.1 of others on 2 cores)"),
        ({"cores": "2", "load_before": "5.4"}, "made on a busy machine (load 5.4 of others on 2 "),
        ({"cores": "many", "load": "5"}, ""),
        ({}, ""),
    ],
)
def test_a_file_made_on_a_busy_machine_says_so(facts: dict[str, str], said: str) -> None:
    found = msgspec.structs.replace(FOUND, machine=facts).busy
    assert (found.startswith(said) and bool(found)) == bool(said)
