"""``torchrun -m shardwright run``: a run that no launcher sees to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from commands import LITTLE_TEXT, Call

from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import write_plan

JOB = {
    "model": {"kind": "transformer", "layers": 1, "dim": 16, "heads": 2},
    "cluster": {"preset": "local", "world_size": 2},
    "batch": {"size": 4, "sequence": 16},
}


def shardwright(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, words)]
    env = {k: v for k, v in os.environ.items() if k != "SHARDWRIGHT_RUN"} | environment
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, env=env, check=False
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    (folder / "text").write_bytes(LITTLE_TEXT)
    data, train = {"path": str(folder / "text")}, {"steps": 6, "out": str(folder / "unused")}
    job = JOB | {"data": data, "train": train}
    write_plan(plan(parse_job(job)), folder / "small.json")
    return folder / "small.json"


Done = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def elsewhere(small: Path) -> Done:
    """The folder of a run that is not the plan's own, and what it said."""
    run = small.parent / "elsewhere"
    command = [sys.executable, "-m", "shardwright", "train", str(small), "--out", str(run)]
    ended = warm.run(command, 180, env={**os.environ, "COLUMNS": "80"})
    assert ended.returncode == 0, ended.stderr
    return run, ended


@pytest.mark.slow
def test_a_wrong_number_of_ranks_is_one_line_and_what_torchrun_shows_last(
    small: Path, tmp_path: Path
) -> None:
    error = tmp_path / "error.json"
    ended = shardwright(
        *("shardwright", "run", small, "--out", tmp_path / "run"),
        RANK="0",
        WORLD_SIZE="3",
        TORCHELASTIC_ERROR_FILE=str(error),
    )
    line = (
        f"shardwright: {small}: expected a plan for 3 ranks, as torchrun started, got one for 2. "
        "Start 2 ranks or plan again."
    )
    assert ended.returncode == 4
    assert ended.stderr.splitlines()[-1] == line
    assert json.loads(error.read_text())["message"]["extraInfo"]["py_callstack"] == line


def test_a_rank_that_is_no_number_is_one_line(small: Path, tmp_path: Path) -> None:
    ended = shardwright("shardwright", "run", small, RANK="x", WORLD_SIZE="2")
    assert ended.returncode == 2
    assert "RANK: expected a number, as torchrun sets it, got 'x'" in ended.stderr


@pytest.mark.slow
def test_what_it_leaves_can_be_compared_and_reported(
    call: Call, small: Path, elsewhere: Done, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(elsewhere[0], run)
    ended = shardwright(
        *("torch.distributed.run", "--nproc-per-node", 2, "-m"),
        *("shardwright", "run", small, "--out", run),
    )
    assert ended.returncode == 0, ended.stderr
    assert f"results in {run}" in ended.stderr
    assert "replacing the results of an earlier run" in ended.stderr
    assert "replacing the results" not in elsewhere[1].stderr
    assert (run / "plan.json").read_bytes() == small.read_bytes()
    found = call("compare", run)
    assert found.code == 0, found.err
    assert "Memory as predicted: exact bytes equal on 2 of 2 ranks" in found.out
    page = tmp_path / "page.html"
    assert call("report", run, "-o", page).code == 0
    assert "Memory as predicted" in page.read_text()


@pytest.mark.slow
def test_a_plan_is_trained_into_another_folder_and_says_what_on(elsewhere: Done) -> None:
    run, ended = elsewhere
    assert "--nproc-per-node=2" in (run / "torchrun.sh").read_text()
    assert "--nproc-per-node" not in ended.stderr
    assert f"2 ranks under torchrun, whose command is in {run / 'torchrun.sh'}" in ended.stderr
    assert "6 steps of 8 samples, 4 on each of 2 ranks, out of 144" in ended.stdout
    assert "held out, 240 tokens" in ended.stdout
    assert len(ended.stdout.splitlines()) <= 40
    assert not (run.parent / "unused").exists()
