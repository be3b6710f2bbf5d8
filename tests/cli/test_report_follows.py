"""``report`` of a run that goes on, or that ended before it was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from samples import measurement, plan

from shardwright.cli.main import main
from shardwright.core.measurement import write_measurement
from shardwright.core.timeline import decode
from shardwright.job.plan import write_plan
from shardwright.launcher.launch import hold
from shardwright.launcher.progress import ProgressLog, so_far


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_plan(plan(), tmp_path / "run" / "plan.json")
    return tmp_path / "run"


def page_of(run: Path) -> str:
    page = run.parent / "page.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    return page.read_text()


def train(run: Path, steps: int) -> None:
    log = ProgressLog(run)
    for step in range(1, steps + 1):
        log.update({"step": step, "steps": 1000, "loss": 1 / step})


def test_a_run_that_goes_on_is_shown_up_to_its_last_step(run: Path) -> None:
    with hold(run, "0" * 12):
        assert "The run goes on" not in page_of(run)  # nothing is known yet
        train(run, 7)
        with (run / "progress.jsonl").open("a") as file:
            file.write('{"step": 8, "ste')  # the writer is in the middle of a line
        page = page_of(run)
    assert "The run goes on: it is up to step 7 of 1,000." in page
    assert "Loss on rank 0 so far." in page
    assert "The run has no measurement: it came up to step 7 of 1,000." in page_of(run)


def test_entries_that_are_no_steps_are_passed_over(run: Path) -> None:
    log = ProgressLog(run)
    for entry in (
        {"said": "<b>saved</b>"},
        {"step": "7", "steps": 9, "loss": 1.0},
        {"step": 10**30, "steps": 9, "loss": 1.0},
        {"step": 2, "steps": 9, "loss": "low"},
        {"step": 3, "steps": 9, "loss": 0.5, "text": "<i>low</i>"},
    ):
        log.update(entry)
    with (run / "progress.jsonl").open("ab") as file:
        file.write(b"\xff\xfe[[[[\n" + b"[" * 200_000 + b"\n" + b"x" * 200_000)
    assert so_far(run) == (3, 9, ((3, 0.5),))
    assert "<i>" not in page_of(run)


def test_a_long_run_is_thinned_as_it_is_read(run: Path) -> None:
    train(run, 5000)
    found = so_far(run, most=100)
    assert found is not None
    assert (found.step, found.steps) == (5000, 1000)
    assert 50 <= len(found.points) <= 100
    assert all(loss == 1 / step for step, loss in found.points)
    gaps = {b - a for (a, _), (b, _) in zip(found.points, found.points[1:], strict=False)}
    assert len(gaps) == 1


def test_a_trace_has_plan_and_run_side_by_side(run: Path) -> None:
    made, page, trace = plan(), run.parent / "page.html", run.parent / "trace.json"
    command = ["report", str(run), "-o", str(page), "--trace", str(trace)]
    assert main(command) == 0
    rows = {e["args"]["name"] for e in events(trace) if e["name"] == "thread_name"}
    assert rows == {"planned"}
    measured = measurement(made)
    write_measurement(measured, run / "measured.json")
    assert main(command) == 0
    for row, timeline in enumerate((made.timeline, measured.timeline)):
        shown = [e for e in events(trace) if e["ph"] == "X" and e["tid"] == row]
        times = [e for e in decode(timeline) if e.kind == "time" and e.duration > 0]
        assert {e["pid"] for e in shown} == {0, 1}
        assert sum(e["dur"] for e in shown) == pytest.approx(1e6 * sum(e.duration for e in times))
        assert len(shown) == len(times) > 0
    assert main([*command[:-1], str(run / "plan.json")]) == 2


def events(trace: Path) -> list[dict[str, Any]]:
    found = json.loads(trace.read_text())["traceEvents"]
    assert isinstance(found, list)
    return found


def test_an_outcome_is_said_beside_how_far_it_came(run: Path) -> None:
    train(run, 3)
    (run / "outcome.json").write_text(json.dumps({"schema": "x"}))
    assert main(["report", str(run), "-o", str(run.parent / "page.html")]) == 2
