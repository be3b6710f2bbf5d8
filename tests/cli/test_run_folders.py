"""``diff``, ``report``, ``compare``: what reads plans and folders of runs; what a run has there."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwright.core.measurement import Curve, Measurement, write_measurement
from shardwright.core.timeline import PEAK, Event, decode, encode
from shardwright.job.plan import read_plan, sealed
from shardwright.train.session import prepare


@pytest.fixture
def run_folder(plan: Path, tmp_path: Path) -> Path:
    """A run that measured exactly what was predicted."""
    return _folder(plan, tmp_path / "run")


def _folder(plan: Path, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "plan.json").write_bytes(plan.read_bytes())
    made = read_plan(plan)
    measured = Measurement(
        schema="shardwright.measurement/1",
        plan_fingerprint=made.fingerprint,
        world_size=2,
        steps=10,
        memory_steps=(3, 4, 5),
        time_steps=(6, 7),
        timeline=made.timeline,
        curve=Curve((1, 2), (0.7, 0.6)),
        quality=None,
        samples_per_second=1.0,
        bad_rows=0,
        versions={},
        machine={},
    )
    write_measurement(msgspec.structs.replace(measured, **changes), folder / "measured.json")
    return folder


def _with_sizes(plan: Path, factor: float, *, peaks: bool) -> Any:
    def scaled(event: Event) -> Event:
        if event.bytes and (event.name == PEAK) == peaks:
            return msgspec.structs.replace(event, bytes=int(event.bytes * factor))
        return event

    return encode(map(scaled, decode(read_plan(plan).timeline)))


def test_equal_plans_do_not_differ(call: Any, plan: Path) -> None:
    answer = call("diff", plan, plan)
    assert answer.code == 0
    assert "equal" in answer.out
    assert call("diff", plan, plan, "--json").json == []


def test_a_difference_names_what_changed_and_is_no_fault(
    call: Any, plan: Path, job: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    call("plan", job, "--set", "batch.size=128", "-o", other)
    found = call("diff", plan, other, "--json")
    assert found.code == 0
    sizes = [d for d in found.json if d["group"] == "job" and d["key"] == "batch.size"]
    assert [(d["before"], d["after"]) for d in sizes] == [(64, 128)]
    shown = call("diff", plan, other)
    assert shown.code == 0
    assert "batch.size" in shown.out


def test_diff_of_a_missing_plan_names_it(call: Any, plan: Path) -> None:
    call("diff", plan, "none.json").refuses(2, "none.json")


def test_a_report_on_a_plan_is_one_page_without_a_network(
    call: Any, plan: Path, tmp_path: Path
) -> None:
    target = tmp_path / "page.html"
    answer = call("report", plan, "-o", target)
    assert answer.code == 0
    assert answer.out == ""
    assert answer.err == f"report written to {target}\n"
    page = target.read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "big" in page
    for word in ("<script", " src=", "@import"):
        assert word not in page


def test_a_report_on_a_run_shows_what_was_measured(
    call: Any, run_folder: Path, tmp_path: Path
) -> None:
    assert call("report", run_folder, "-o", tmp_path / "page.html").code == 0
    assert "easured" in (tmp_path / "page.html").read_text()


def test_a_report_without_a_name_is_report_html(call: Any, plan: Path, tmp_path: Path) -> None:
    assert call("report", plan).code == 0
    assert (tmp_path / "report.html").exists()


def test_a_report_on_nothing_says_what_is_missing(call: Any, tmp_path: Path) -> None:
    call("report", "nowhere").refuses(2, "nowhere")
    call("report", tmp_path).refuses(2, "plan.json")
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_written_says_where(call: Any, plan: Path) -> None:
    call("report", plan, "-o", plan / "page.html").refuses(2, "page.html")


def test_an_outcome_that_cannot_be_read_is_named(call: Any, run_folder: Path) -> None:
    (run_folder / "outcome.json").write_text("{")
    call("report", run_folder).refuses(2, "outcome.json")


def test_a_run_as_predicted_compares_with_0(call: Any, run_folder: Path) -> None:
    answer = call("compare", run_folder)
    assert answer.code == 0
    assert answer.err == ""
    assert call("compare", run_folder, "--json").json["failures"] == []


def test_other_exact_bytes_are_4(call: Any, plan: Path, tmp_path: Path) -> None:
    folder = _folder(plan, tmp_path / "off", timeline=_with_sizes(plan, 1.01, peaks=False))
    answer = call("compare", folder, "--json")
    assert answer.code == 4
    assert any("tables.big.weight" in line for line in answer.json["failures"])


def test_the_tolerance_decides_about_peaks(call: Any, plan: Path, tmp_path: Path) -> None:
    folder = _folder(plan, tmp_path / "off", timeline=_with_sizes(plan, 1.2, peaks=True))
    assert call("compare", folder).code == 4
    assert call("compare", folder, "--tolerance", 0.3).code == 0


@pytest.mark.parametrize("tolerance", ["-0.1", "nan", "10", "inf"])
def test_an_impossible_tolerance_is_refused(call: Any, run_folder: Path, tolerance: str) -> None:
    call("compare", run_folder, "--tolerance", tolerance).refuses(2, "--tolerance", tolerance)


def test_compare_of_a_missing_folder_says_how_to_make_one(call: Any) -> None:
    call("compare", "nowhere").refuses(2, "nowhere", "Train first")


def test_compare_of_a_file_is_refused(call: Any, plan: Path) -> None:
    call("compare", plan).refuses(2, str(plan), "the folder of a run")


def test_compare_of_an_empty_folder_misses_the_plan(call: Any, tmp_path: Path) -> None:
    call("compare", tmp_path).refuses(2, "plan.json", "no such file")


def test_compare_of_a_run_that_did_not_finish_misses_the_measurement(
    call: Any, run_folder: Path
) -> None:
    (run_folder / "measured.json").unlink()
    call("compare", run_folder).refuses(2, "measured.json", "no such file")


def test_a_measurement_of_another_plan_is_4(call: Any, plan: Path, tmp_path: Path) -> None:
    folder = _folder(plan, tmp_path / "other", plan_fingerprint="0" * 64)
    call("compare", folder).refuses(4, "000000000000")


def test_a_measurement_of_another_version_is_refused(call: Any, run_folder: Path) -> None:
    path = run_folder / "measured.json"
    path.write_text(path.read_text().replace("measurement/1", "measurement/7"))
    call("compare", run_folder).refuses(2, "measured.json", "'shardwright.measurement/7'")


def test_a_folders_own_plan_is_left_alone_unless_an_option_changes_it(
    plan: Path, tmp_path: Path
) -> None:
    before, given = plan.read_bytes(), read_plan(plan)
    prepare(given, tmp_path, io.StringIO(), plan)
    assert plan.read_bytes() == before
    train = msgspec.structs.replace(given.job.train, forward="parallel")
    job = msgspec.structs.replace(given.job, train=train)
    changed = sealed(msgspec.structs.replace(given, job=job))
    prepare(changed, tmp_path, io.StringIO(), plan)
    assert read_plan(plan) == changed
