"""Runs whose ranks are threads of one process: what goes wrong in one ends all, in one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from combinations import rare
from test_training_faults import HANGS, TIMEOUT, alive, outcome, wait_for_step
from warm import Popen

TABLES = "".join(f'[[tables]]\nname = "t{i}"\nrows = {20 + i}\ndim = 4\n' for i in range(5))
JOB = """
[model]
bottom = [4]
top = [8, 1]
[batch]
size = 8
[cluster]
preset = "local"
world_size = 2
[data]
kind = "synthetic"
rows = 4000
test_rows = 64
[train]
forward = "parallel"
steps = {steps}
timeout = {timeout}
out = "run"
optimizer = "adagrad"
overlap = "ids_and_rows"
{saves}
{tables}
"""
SAVES = '[checkpoint]\nevery = "10 steps"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not alive(tmp_path), "a worker outlived its run"


def started(folder: Path, *words: str, steps: int = 1_000_000, saves: str = "") -> Popen:
    text = JOB.format(steps=steps, timeout=TIMEOUT, saves=saves, tables=TABLES)
    (folder / "job.toml").write_text(text)
    line = [sys.executable, "-m", "shardwright", "train", str(folder / "job.toml"), *words]
    return Popen(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: Popen) -> tuple[int, str]:
    """The code and what was said to people."""
    try:
        _, errors = process.communicate(timeout=HANGS)
    finally:
        process.kill()
        process.wait(10)
    assert "Traceback" not in errors
    return process.returncode, errors


@pytest.mark.slow
def test_a_killed_process_is_all_of_its_ranks(folder: Path) -> None:
    process = started(folder)
    os.kill(wait_for_step(folder, 1, process).pid, signal.SIGKILL)
    code, errors = ended(process)
    assert code == 5
    assert "shardwright: ranks 0, 1 died without a word at step " in errors
    assert "(killed by signal 9, SIGKILL" in errors


WRONG = {
    "hang": (5, "rank 1 made no progress for "),
    "error": (1, "rank 1: ValueError: spoilt (step 3, load)"),
    "id": (2, "ids of table 't2', sample 3: expected ids from 0 to 21, got -7"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["hang", rare("error"), rare("id")])
def test_what_goes_wrong_in_one_thread_ends_all_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    shutil.copy(Path(__file__).parent / "spoilt_thread.py", folder / "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("SPOILT_THREAD", what)
    code, errors = ended(started(folder))
    wanted, said = WRONG[what]
    assert code == wanted, errors
    (line,) = [text for text in errors.splitlines() if said in text]
    assert line.startswith("shardwright: rank")
    assert "rank 1" in line
    assert outcome(folder).code == wanted


@pytest.mark.product
@pytest.mark.parametrize("first", ["parallel", "distributed"])
def test_a_run_that_a_signal_ended_goes_on_in_the_other_forward_with_the_same_curve(
    folder: Path, first: str
) -> None:
    steps = 150
    assert ended(started(folder, steps=steps, saves=SAVES))[0] == 0
    whole = _losses(folder)
    shutil.rmtree(folder / "run")
    second = "distributed" if first == "parallel" else "parallel"
    process = started(folder, "--set", f"train.forward={first}", steps=steps, saves=SAVES)
    wait_for_step(folder, 1, process)
    process.send_signal(signal.SIGTERM)
    code, errors = ended(process)
    assert code == 75, errors
    assert "shardwright: stopped by SIGTERM after step " in errors
    words = ("--resume", "--forward", second)
    code, errors = ended(started(folder, *words, steps=steps, saves=SAVES))
    assert code == 0, errors
    assert "going on after " in errors
    found = _losses(folder)
    assert len(found) == steps
    assert found == pytest.approx(whole, abs=1e-6)


def _losses(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "run" / "measured.json").read_bytes())["curve"][
        "loss"
    ]
    return found
