"""The JSON Schema of a job: it takes what is read, and marks what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from json_schema import wrong

from shardwright.cli.main import main
from shardwright.core.document import parse_toml
from shardwright.job.schema import job_schema

ROOT = Path(__file__).parents[2]
JOBS = sorted([*ROOT.glob("examples/*.toml"), *ROOT.glob("src/shardwright/cli/templates/*.toml")])
SCHEMA = job_schema()


def marked(document: dict[str, Any]) -> list[str]:
    return list(wrong(document, SCHEMA, SCHEMA))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_a_job_of_ours_is_as_the_schema_says(path: Path) -> None:
    assert marked(parse_toml(path.read_bytes(), str(path), "a job")) == []


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"train": {"stepz": 3}}, "train"),
        ({"trian": {}}, "job"),
        ({"train": {"steps": 0}}, "train.steps"),
        ({"train": {"steps": "3"}}, "train.steps"),
        ({"train": {"steps": True}}, "train.steps"),
        ({"train": {"optimizer": "sgdd"}}, "train.optimizer"),
        ({"train": {"learning_rate": 0}}, "train.learning_rate"),
        ({"train": {"log": ["printer"]}}, "train.log"),
        ({"tables": [{"name": "a", "rows": 3}]}, "tables"),
        ({"tables": [{"name": "a", "rows": 3, "dim": 4, "fqn": "a"}]}, "tables"),
        ({"planner": {"dense": {"prefetch": 2}}}, "planner.dense.prefetch"),
        ({"planner": {"units": {"top": "cut"}}}, "planner.units"),
        ({"model": {"kind": "llama", "bottom": [4]}}, "model.bottom"),
        ({"model": {"kind": "llama", "shape": {}}}, "model"),
        ({"model": {"kind": "tables"}, "parallel": {}}, "parallel"),
        ({"model": {"kind": "dlrm"}, "parallel": {"tensor": 2}}, "parallel.tensor"),
        ({"model": {"kind": "transformer"}, "train": {"overlap": "rows"}}, "train.overlap"),
    ],
    ids=str,
)
def test_what_is_wrong_is_marked_where_it_stands(document: dict[str, Any], place: str) -> None:
    assert [at.partition(":")[0] for at in marked(document)] == [place]


def test_a_kind_that_is_a_call_has_keys_of_its_own() -> None:
    assert marked({"model": {"kind": "t5", "decoder_layers": 2}}) == []
    assert marked({"model": {"kind": "t6", "decoder_layers": 2}}) != []


def test_a_size_may_have_its_unit() -> None:
    assert marked({"planner": {"reservation": {"nbytes": "48 MiB"}}}) == []
    assert marked({"planner": {"reservation": {"nbytes": -1}}}) != []


def test_every_key_says_what_it_means_and_no_more_are_described() -> None:
    places = {"job": SCHEMA, **SCHEMA["$defs"]}
    silent = [
        f"{place}.{name}"
        for place, section in places.items()
        for name, key in section["properties"].items()
        if "description" not in key
    ]
    assert silent == []


def test_a_key_is_described_without_links_and_with_a_default_that_is_worked_out() -> None:
    key = SCHEMA["$defs"]["TrainSection"]["properties"]["metrics_every"]
    assert key["description"] == (
        "of a dlrm: every so many steps, what all ranks trained on since is scored. Default: none."
    )
    assert (key["minimum"], key["type"]) == (1, "integer")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(SCHEMA))
