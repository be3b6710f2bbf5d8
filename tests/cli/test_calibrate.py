from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm import Popen

from shardwright.core.cluster import SCHEMA, read_calibration
from shardwright.cost.presets import LOCAL
from shardwright.launcher.folder import MARK

JOB = """
[cluster]
file = "cluster.toml"
ddr_cap = "5 MiB"

[[tables]]
name = "a"
rows = 1000
dim = 16
"""


SMALL = """
tables = [{name = "a", rows = 100, dim = 8}]
model = {bottom = [16, 8], top = [16, 1]}
batch = {size = 64}
data = {kind = "synthetic"}
cluster = {preset = "local", world_size = 2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, so that a test sees what is left of them."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return path


def _living(folder: Path) -> list[str]:
    """The marked processes that work for a run below ``folder``."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            line = (process / "cmdline").read_bytes()
            marked = f"{MARK}=".encode() in (process / "environ").read_bytes()
        except OSError:
            continue
        if process.name.isdigit() and marked and bytes(folder) in line:
            found.append(line.decode())
    return found


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_runs")
def test_a_machine_is_measured_and_planned_with(call: Any, folder: Path, tmp_path: Path) -> None:
    answer = call("calibrate", "-o", "cluster.toml", "--quick", "--json")
    assert answer.code == 0, answer.err
    found = read_calibration(tmp_path / "cluster.toml")
    assert found.world_size == 2
    assert set(found.constants) == set(LOCAL)
    assert answer.json["schema"] == SCHEMA
    told = {name: figure["value"] for name, figure in answer.json["constants"].items()}
    assert told == {name: figure.value for name, figure in found.constants.items()}
    assert 1e8 < told["memory_rate"] < 1e13
    assert 1e-6 < told["all_gather_latency"] < 1.0
    assert "step 7/7  overlap" in answer.err
    assert list(folder.iterdir()) == []
    (tmp_path / "job.toml").write_text(JOB)
    planned = call("plan", "job.toml", "-o", "plan.json", "--json")
    assert planned.code == 0, planned.err
    first = planned.json["assumptions"][0]
    assert first.startswith("hardware constants were measured on 20")
    assert "cluster.toml" in first
    (tmp_path / "cluster.toml").unlink()
    explained = call("explain", "plan.json", "--tensor", "a")
    assert explained.code == 0, explained.err


@pytest.mark.product  # daily without a process: tests/train/test_calibrate.py
def test_one_rank_gets_a_table_that_says_what_was_not_measured(call: Any, folder: Path) -> None:
    answer = call("calibrate", "-o", "one.toml", "-n", 1, "--quick", "--full")
    assert answer.code == 0, answer.err
    measured, others = answer.out.split("Not measured")
    assert "compute_rate" in measured
    assert "FLOP/s" in measured
    assert "all_gather_rate" not in measured
    assert "all_gather_rate" in others
    assert "cluster written to one.toml" in answer.err


def test_whoever_rests_on_a_file_of_a_busy_machine_says_so_in_one_line(
    call: Any, tmp_path: Path
) -> None:
    text = (Path(__file__).parent.parent / "golden/earlier/cluster.toml").read_text()
    (tmp_path / "cluster.toml").write_text(text)  # of a load of 5.4
    (tmp_path / "job.toml").write_text(JOB)
    said = "cluster.toml was made on a busy machine (load 5.4 of others on "
    for words in (("plan", "job.toml", "-o", "plan.json"), ("plan", "job.toml", "--json")):
        answer = call(*words)
        assert answer.code == 0, answer.err
        assert answer.err.count(said) == 1
    (tmp_path / "cluster.toml").write_text(text.replace('"5.4"', '"0.4"'))
    assert said not in call("plan", "job.toml").err


def test_a_calibration_needs_a_file_to_write(call: Any, tmp_path: Path) -> None:
    call("calibrate").refuses(2, "-o/--output")
    call("calibrate", "-o", tmp_path).refuses(2, "expected a file that can be written")
    (tmp_path / "x").write_text("")
    call("calibrate", "-o", tmp_path / "x" / "c.toml").refuses(2, "a file that can be written")


def test_keys_are_of_a_job_and_tables_alone_are_none_that_runs(call: Any, tmp_path: Path) -> None:
    call("calibrate", "-o", "c.toml", "--set", "batch.size=4").refuses(2, "--set: expected a job")
    (tmp_path / "tables.toml").write_text(JOB.replace('file = "cluster.toml"', ""))
    call("calibrate", "tables.toml", "-o", "c.toml").refuses(2, "tables")


@pytest.mark.product  # daily without a run: tests/train/test_probes.py
def test_a_machine_is_measured_for_a_job(call: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    answer = call("calibrate", "small.toml", "-o", "cluster.toml", "--quick", "--json")
    assert answer.code == 0, answer.err
    found = read_calibration(tmp_path / "cluster.toml")
    more = {"elementwise_rate", "slowest_share", "load_latency", "reduce_latency"}
    assert more <= set(found.constants)
    assert found.constants["reduce_latency"].source.startswith(
        "measured: dlrm in batches of 32 and"
    )
    assert list(folder.glob("shardwright*")) == []  # torch leaves a folder of its own
    planned = call("plan", "small.toml", "--on", "cluster.toml", "-o", "plan.json")
    assert planned.code == 0, planned.err
    assert call("explain", "plan.json").code == 0


def test_ranks_that_cannot_be_are_refused(call: Any) -> None:
    call("calibrate", "-o", "c.toml", "-n", 0).refuses(2, "-n: expected from 1 to 256 ranks, got 0")


def test_ranks_that_cannot_start_leave_no_file_and_their_logs(
    call: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise ImportError('no torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    answer = call("calibrate", "-o", "c.toml", "--quick")
    assert answer.code == 5
    assert "no torch" in answer.err
    assert not (tmp_path / "c.toml").exists()
    (kept,) = folder.iterdir()
    assert f"details in {kept}" in answer.err
    assert (kept / "torchrun.log").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_ctrl_c_ends_every_rank_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "shardwright", "calibrate", "-o", str(tmp_path / "c.toml")]
    process = Popen(words, env=os.environ | {"TMPDIR": str(folder)}, stderr=subprocess.PIPE)
    _wait_for(lambda: any(folder.glob("*/progress.jsonl")), 60.0)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped by Ctrl-C" in said
    assert _living(folder) == []
    assert list(folder.iterdir()) == []
    assert not (tmp_path / "c.toml").exists()
