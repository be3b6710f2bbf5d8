"""A clock fitted to published rows: its features are the product's seconds, its ranges hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published.clock import Rows, features
from published.fit import (
    CLASSES,
    PRIORS,
    Row,
    fitted,
    held,
    judged,
    main,
    range_of,
    scaled,
    seconds_of,
)
from published.times import job_of, read_rows, same_job

from shardwright.cost.presets import HARDWARE
from shardwright.estimate.unplanned import estimated
from shardwright.job.job import parse_job
from tests.published.test_times import ROW

FIT = json.loads((Path(__file__).parents[2] / "validation/published/clock_fit.json").read_text())
USUAL = {name: prior for name, (prior, *_) in PRIORS.items()}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"zero": 1, "pp": 4, "tp": 2, "gpus": 8, "global_batch": 8},
    {"zero": 3, "pp": 1, "tp": 1, "gpus": 16, "checkpointing": "none"},
    {"zero": 1, "pp": 2, "vpp": 2, "tp": 1, "gpus": 32, "sp": None},
)


def row(**change: Any) -> Row:
    told = {**ROW, **change}
    return Row(told, features(parse_job(job_of(told)), {}))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row(**layout) for layout in LAYOUTS]


def test_features_give_the_seconds_of_the_product(rows: list[Row]) -> None:
    c = {name: each.value for name, each in HARDWARE["h100-8"].clock.items()}
    for each in rows:
        table = Rows([each.told])
        table.walk(c)
        time = estimated(parse_job(job_of(each.row))).time
        assert time
        assert table.predicted(c)[0] == pytest.approx(time.seconds, rel=1e-6)


def test_constants_that_made_the_seconds_are_found_again(rows: list[Row]) -> None:
    """As far as rows tell them: what is predicted comes near, whatever the constants are."""
    true = USUAL | {"product_efficiency": 0.5, "launch_latency": 3e-6, "step_latency": 0.004}
    made = seconds_of(rows, true)
    measured = [
        Row({**r.row, "step_time_s": float(s), "source": f"of {k}"}, r.told)
        for k, (r, s) in enumerate(zip(rows, made, strict=True))
    ]
    before = judged(zip(measured, seconds_of(measured, USUAL), strict=True))
    found = fitted(measured, USUAL, walks=True)
    after = judged(zip(measured, seconds_of(measured, found), strict=True))
    assert before["median_of_sources"]["median"] > 0.3
    assert after["median_of_sources"]["median"] < 0.02


def test_one_row_sets_the_scale_of_the_others(rows: list[Row]) -> None:
    told = [(r, 2.0 * r.row["step_time_s"]) for r in rows]
    assert all(s == r.row["step_time_s"] for r, s in scaled(told))
    assert len(scaled(told)) == len(rows) * (len(rows) - 1)


def test_a_range_holds_the_share_that_it_is_for(rows: list[Row]) -> None:
    told = [(rows[0], rows[0].row["step_time_s"] * (1 + k / 10)) for k in range(10)]
    most = range_of(told, 0.8)
    assert most == pytest.approx(0.7)
    assert held(told, most) == {"rows": 0.8, "sources": 0.8}


@pytest.mark.parametrize(("preset", "name"), [("a100-8", "A100"), ("h100-8", "H100")])
def test_presets_have_what_was_fitted(preset: str, name: str) -> None:
    clock = HARDWARE[preset].clock
    found = FIT["classes"][name]
    assert {key: each.value for key, each in clock.items()} == {
        **found["constants"],
        "range": found["range"],
    }
    sources = {source.rpartition(",")[0] for source in found["rows"]}
    assert f"of {len(sources)} sources" in clock["range"].source


@pytest.mark.parametrize("name", CLASSES)
def test_ranges_hold_four_of_five_rows_that_were_left_out(name: str) -> None:
    """Between those whose source was left out and those of which a job was, which are nearer."""
    found = FIT["classes"][name]["held"]
    source, job = found["source"]["sources"], found["job"]["sources"]
    assert source < job
    assert 0.7 <= (source + job) / 2 <= 0.9


def test_the_carried_rows_are_whole_and_some_are_layouts_of_one_job() -> None:
    path = Path(__file__).parents[2] / "validation/published/time_rows.json"
    found = read_rows(json.loads(path.read_text()), path.name)
    assert all(each["step_time_s"] > 0 and each["source"] for each in found)
    assert len({same_job(each) for each in found}) < len(found)


def test_the_command_says_what_it_must_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sources on each class of devices, three jobs each."""
    small = {"tp": 1, "pp": 1, "sp": None, "gpus": 8, "global_batch": 8, "checkpointing": "none"}
    its = [
        {**ROW, **small, "source": s, "gpu": gpu, "seq": seq, "step_time_s": 0.02 + 1e-5 * seq}
        for s in ("one", "two")
        for gpu in ("A100-80", "H100-80")
        for seq in (64, 128, 256)
    ]
    path, kept = tmp_path / "rows.json", tmp_path / "features"
    path.write_text(json.dumps({"fields": list(ROW), "rows": [list(r.values()) for r in its]}))
    assert main([str(path), "--features", str(kept), "-o", str(tmp_path / "fit.json")]) == 0
    said = capsys.readouterr().out
    assert "the source left out whole (4 sources)" in said
    found = json.loads((tmp_path / "fit.json").read_text())
    assert found["classes"]["A100"]["rows"] == {"one, A100-80": 3, "two, A100-80": 3}
    lines = kept.read_text().splitlines()
    assert main([str(path), "--features", str(kept)]) == 0
    assert kept.read_text().splitlines() == lines
    path.write_text("{}")
    assert main([str(path)]) == 2
    assert "expected an object with 'fields' and 'rows'" in capsys.readouterr().err
