"""Jobs that save into one folder at once: what returned normally can be loaded bit by bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm import run

STORM = Path(__file__).with_name("savers.py")
END_SECONDS = 200.0
TAKEN = (
    " expected a step that is not saved yet, got one. "
    "A checkpoint is never overwritten; save another step or elsewhere."
)


def storm(folder: Path, *words: object) -> dict[str, Any]:
    """What two jobs came to; see savers.py."""
    command = [sys.executable, str(STORM), str(folder), *map(str, words)]
    done = run(command, END_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.product), 2])
def test_two_jobs_that_save_the_same_steps_lose_nothing(tmp_path: Path, ranks: int) -> None:
    found = storm(tmp_path, "--ranks", ranks, "--steps", "same", "--rounds", 12)
    assert found["lost"] == 0
    assert found["claims"] == found["complete"]
    assert found["claims"] + found["refused"] == 24
    assert {text.removesuffix(" Found on rank 0.") for text in found["words"]} <= {TAKEN}
    assert found["left"] == []


@pytest.mark.slow
def test_two_jobs_that_save_steps_of_their_own_save_them_all(tmp_path: Path) -> None:
    found = storm(tmp_path, "--ranks", 2, "--steps", "own", "--rounds", 12)
    assert found["words"] == {}
    assert (found["claims"], found["complete"], found["lost"]) == (24, 24, 0)
    assert found["left"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "steps"), [pytest.param(1, "own", marks=pytest.mark.product), (2, "same")]
)
def test_two_jobs_that_are_killed_again_and_again_lose_nothing(
    tmp_path: Path, ranks: int, steps: str
) -> None:
    words = ("--ranks", ranks, "--steps", steps, "--rounds", 5, "--kills", 3)
    found = storm(tmp_path, *words)
    assert found["killed"] == 6
    assert found["claims"] > 0
    assert found["lost"] == 0
    assert found["codes"] == [[0] * ranks] * 2


@pytest.mark.slow
@pytest.mark.parametrize("locks", ["none", "blind"])
def test_where_locks_do_not_work_a_save_may_be_refused_and_none_is_lost(
    tmp_path: Path, locks: str
) -> None:
    found = storm(tmp_path, "--locks", locks, "--steps", "own", "--rounds", 20)
    assert found["claims"] > 0
    assert found["lost"] == 0
    assert found["claims"] + found["refused"] == 40


SAVES_AND_LIVES = """
import sys, torch, shardwright as sw
model = torch.nn.Linear(2, 2)
sw.save_checkpoint(sys.argv[1], model, step=1)
print("saved", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_keep_spares_a_living_jobs_newest_checkpoint_and_takes_a_dead_ones(tmp_path: Path) -> None:
    import torch

    import shardwright as sw
    from shardwright.runtime.checkpoint.folders import complete_steps

    command = [sys.executable, "-c", SAVES_AND_LIVES, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        model = torch.nn.Linear(2, 2)
        for step in (5, 6):
            sw.save_checkpoint(tmp_path, model, step=step, keep=1)
        assert complete_steps(tmp_path) == [1, 6]
    finally:
        other.kill()
        other.communicate(timeout=30)
    sw.save_checkpoint(tmp_path, model, step=7, keep=1)
    assert complete_steps(tmp_path) == [7]
