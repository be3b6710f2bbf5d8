"""``train`` with checkpoints: signals, failures, second starts; nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from combinations import rare, slow
from commands import LITTLE_TEXT, Call
from warm import Popen, run

from shardwright.estimate.recordings import plan
from shardwright.job.job import read_job
from shardwright.job.plan import write_plan
from shardwright.launcher.heartbeat import read_heartbeat

HANGS = 300.0
JOB = """
[model]
kind = "transformer"
layers = 1
dim = 16
heads = 2
[cluster]
preset = "local"
world_size = 2
[batch]
size = 4
sequence = 8
[planner]
units = { layers = "shard" }
[data]
path = "text"
[train]
steps = 200
out = "run"
[checkpoint]
every = "20 steps"
restarts = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path)
    return tmp_path


def written(folder: Path) -> None:
    """The job and its text."""
    (folder / "job.toml").write_text(JOB)
    (folder / "text").write_bytes(LITTLE_TEXT)


def start(folder: Path, *words: str) -> Popen:
    line = [sys.executable, "-m", "shardwright", "train", "job.toml", *words]
    return Popen(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: Popen) -> tuple[str, str]:
    """What it printed, as one line however wide the terminal is, and its errors."""
    out, errors = process.communicate(timeout=HANGS)
    return " ".join(out.split()), errors


def train(folder: Path, *words: str) -> tuple[int, str, str]:
    process = start(folder, *words)
    out, errors = ended(process)
    return process.returncode, out, errors


def wait_for_step(folder: Path, step: int, process: Popen) -> int:
    """The pid of rank 1 once it is there."""
    limit = time.monotonic() + HANGS
    while time.monotonic() < limit and process.poll() is None:
        beat = read_heartbeat(folder / "run" / "rank-1.pulse")
        if beat is not None and (beat.step or 0) >= step:
            return beat.pid
        time.sleep(0.02)
    raise AssertionError(f"rank 1 never came to step {step}")


def losses(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "run" / "measured.json").read_bytes())["curve"][
        "loss"
    ]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that never ended early."""
    folder = tmp_path_factory.mktemp("whole")
    written(folder)
    code, _, errors = train(folder)
    assert code == 0, errors
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.product)]
)
def test_a_signal_ends_a_run_saved_and_resume_gives_the_curve_of_one_that_never_ended(
    call: Call, folder: Path, whole: list[float], number: signal.Signals
) -> None:
    process = start(folder)
    wait_for_step(folder, 30, process)
    process.send_signal(number)
    _, errors = ended(process)
    assert process.returncode == 75, errors
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert f"shardwright: stopped by {name} after step " in errors
    assert "the same command with --resume goes on" in errors
    assert re.search(r"to go on after step \d+: shardwright train job.toml .*--resume\n", errors)
    call("train", "job.toml").refuses(2, "expected a folder without checkpoints")
    plan = folder / "run" / "plan.json"
    before = plan.read_bytes()
    code, shown, said = train(folder, "--resume")
    assert code == 0, said
    assert plan.read_bytes() == before  # a new search need not find the same
    assert "resumed 1 time, after step" in shown
    assert losses(folder) == whole


LOADED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=drawn), torch.randn(1, generator=drawn)


def build(batch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, (torch.randn(batch, 4),), nn.functional.mse_loss, torch.randn(batch, 1)


def batches(batch, rank, world_size, seed):
    # Tensors, which torch fetches from the worker that made them: one that is killed meanwhile is
    # now and then a connection that was reset.
    for inputs, targets in DataLoader(Numbers(), batch_size=batch, num_workers=2):
        yield (inputs,), targets
"""


@pytest.mark.parametrize("how", [slow("killed"), rare("SIGTERM"), rare("SIGINT")])
def test_workers_of_a_loader_lose_no_run(folder: Path, how: str) -> None:
    """Killed by the system, or with their rank and torchrun, as a scheduler does it."""
    (folder / "loaded.py").write_text(LOADED)
    start_of_job = '[model]\npython = "loaded:build"\n[cluster]'
    job = JOB.partition("[cluster]")[2].replace("sequence = 8\n", "")
    job = job.replace('path = "text"', 'python = "loaded:batches"').replace(
        "steps = 200", "steps = 150"
    )
    job = job.replace('[planner]\nunits = { layers = "shard" }\n', "")
    (folder / "job.toml").write_text(start_of_job + job.replace("20 steps", "1 h"))
    process = start(folder)
    rank = wait_for_step(folder, 5, process)
    if how == "killed":
        (worker, *_) = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
    else:
        process.send_signal(signal.Signals[how])
    _, errors = ended(process)
    assert process.returncode == 75, errors
    assert "saved in" in errors
    if how == "killed":  # that data go on after a resume has a test of its own
        return
    code, shown, said = train(folder, "--resume")
    assert code == 0, said
    assert "resumed 1 time" in shown
    assert len(losses(folder)) == 150


@pytest.mark.parametrize("dies", [slow(True), rare(False)])
def test_a_killed_rank_is_started_again_after_a_disk_was_full_for_a_while(
    folder: Path, whole: list[float], dies: bool
) -> None:
    (folder / "run").mkdir()
    blocked = folder / "run" / "checkpoints"
    blocked.write_text("no folder")
    process = start(folder)
    wait_for_step(folder, 45, process)
    blocked.unlink()
    if dies:
        os.kill(wait_for_step(folder, 85, process), signal.SIGKILL)
    shown, errors = ended(process)
    assert process.returncode == 0, errors
    assert "training can go on" in errors
    assert (blocked / "step-200" / "manifest.json").exists()
    assert losses(folder) == whole
    if not dies:  # a life counts its own saves
        assert "failed" in shown
        return
    assert "rank 1 died without a word" in errors
    assert "restart 1 of 1" in errors
    assert "resumed 1 time, after step" in shown


@pytest.mark.product
def test_torchrun_starts_a_killed_rank_again_from_the_newest_checkpoint(folder: Path) -> None:
    write_plan(plan(read_job(folder / "job.toml")), folder / "plan.json")
    own = ["-m", "shardwright", "run", "plan.json", "--out", "run"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    process = Popen([sys.executable, *torchrun, *own], cwd=folder, stderr=subprocess.PIPE)
    os.kill(wait_for_step(folder, 50, process), signal.SIGKILL)
    _, errors = process.communicate(timeout=HANGS)
    assert process.returncode == 0, errors
    (step,) = json.loads((folder / "run" / "measured.json").read_bytes())["saved"]["resumed"]
    assert step >= 20


@pytest.mark.slow
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.product)])
def test_a_training_that_is_killed_again_and_again_loses_no_checkpoint(
    tmp_path: Path, kills: int
) -> None:
    script = Path(__file__).parent / "killed_runs.py"
    line = [sys.executable, str(script), str(tmp_path), "--kills", str(kills)]
    done = run(line, HANGS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kills"], found["differ"], found["codes"]) == (kills, 0, [0, 0])
    assert found["steps"] == sorted(set(found["steps"]))  # every life went on from the last one
