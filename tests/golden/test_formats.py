"""Documents that people and other programs keep must not change unnoticed."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwright.core.measurement import read_measurement, write_measurement
from shardwright.job.plan import read_plan, write_plan
from shardwright.launcher.ending import decode_outcome

FOLDER = Path(__file__).parent
GOLDEN = runpy.run_path(str(FOLDER / "regenerate.py"))
NAMES = sorted(GOLDEN["KINDS"])
CHANGED = "{} is no longer what is written. If that is meant: python tests/golden/regenerate.py"


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    found: dict[str, bytes] = GOLDEN["files"]()
    return found


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    found: dict[str, Any] = GOLDEN["values"]()
    return found


@pytest.mark.parametrize("name", [f"{name}.json" for name in [*NAMES, "schemas"]])
def test_a_document_is_written_as_its_golden_file(files: dict[str, bytes], name: str) -> None:
    assert files[name].decode() == (FOLDER / name).read_text(), CHANGED.format(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_document_comes_back_as_it_was(values: dict[str, Any], name: str) -> None:
    data = GOLDEN["encoded"](name, values[name])
    assert msgspec.json.decode(data, type=GOLDEN["KINDS"][name]) == values[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_file_is_read_and_written_without_a_change(name: str) -> None:
    data = (FOLDER / f"{name}.json").read_bytes()
    value = msgspec.json.decode(data, type=GOLDEN["KINDS"][name])
    assert GOLDEN["encoded"](name, value) == data


@pytest.mark.parametrize("name", NAMES)
def test_a_document_with_a_field_too_many_is_refused(name: str) -> None:
    data = (FOLDER / f"{name}.json").read_bytes().replace(b"{", b'{"colour": 3,', 1)
    with pytest.raises(msgspec.ValidationError, match="unknown field `colour`"):
        msgspec.json.decode(data, type=GOLDEN["KINDS"][name])


def test_a_plan_is_read_from_its_file(values: dict[str, Any], tmp_path: Path) -> None:
    write_plan(values["plan"], tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == values["plan"]


def test_a_measurement_is_read_from_its_file(values: dict[str, Any], tmp_path: Path) -> None:
    write_measurement(values["measurement"], tmp_path / "measured.json")
    assert read_measurement(tmp_path / "measured.json") == values["measurement"]


def test_an_outcome_is_read_from_its_file(values: dict[str, Any]) -> None:
    data = (FOLDER / "outcome.json").read_bytes()
    assert decode_outcome(data) == values["outcome"]


def test_the_golden_plan_has_every_type_and_both_unit_modes(values: dict[str, Any]) -> None:
    made = values["plan"]
    assert tuple(t.sharding_type for t in made.tables) == GOLDEN["TYPES"]
    assert [unit.reshard_after_forward for unit in made.units] == [True, False]
