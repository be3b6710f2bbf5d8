from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shardwright.core.errors import InputError, MismatchError
from shardwright.core.job import parse_job
from shardwright.core.plan import Plan, Search, fingerprint, read_plan, sealed, write_plan
from shardwright.core.specs import model_spec
from shardwright.planner import plan


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(parse_job({"tables": [{"name": "a", "rows": 30, "dim": 16}]}))


def test_how_long_planning_took_is_no_part_of_the_fingerprint(made: Plan) -> None:
    slower = msgspec.structs.replace(made.search, wall_seconds=100.0)
    assert fingerprint(msgspec.structs.replace(made, search=slower)) == made.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda p: {"version": "0.0.0"},
        lambda p: {"blocks": p.blocks[:-1]},
        lambda p: {"gap": p.gap + 1},
        lambda p: {"search": Search("greedy", 0, 0, 0.0)},
    ],
)
def test_everything_else_is_part_of_the_fingerprint(
    made: Plan, change: Callable[[Plan], dict[str, object]]
) -> None:
    changed = msgspec.structs.replace(made, **change(made))
    assert fingerprint(changed) != made.fingerprint
    assert sealed(changed).fingerprint == fingerprint(changed)


def test_a_plan_comes_back_from_its_file(made: Plan, tmp_path: Path) -> None:
    write_plan(made, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json", model_spec) == made


def test_an_edited_plan_is_told_both_fingerprints(made: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    edited = msgspec.structs.replace(made, gap=made.gap + 1)
    write_plan(edited, path)
    with pytest.raises(MismatchError) as caught:
        read_plan(path)
    assert str(caught.value) == (
        f"{path}: expected content of fingerprint {made.fingerprint[:12]}, got "
        f"{fingerprint(edited)[:12]}. The file was edited after planning; make the plan again "
        "from the job."
    )


def test_blocks_that_do_not_tile_the_model_are_refused(made: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(sealed(msgspec.structs.replace(made, blocks=made.blocks[1:])), path)
    assert read_plan(path).blocks == made.blocks[1:]
    with pytest.raises(InputError, match=r"^blocks of tables.a.weight: expected every one of 480"):
        read_plan(path, model_spec)


def test_blocks_are_kept_run_length_encoded(made: Plan) -> None:
    assert len(made.blocks) < len(made.expanded())
    assert made.world_size == 2
