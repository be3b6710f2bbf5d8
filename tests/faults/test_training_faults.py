"""Real runs that go wrong: each ends in one line, with the right code and no orphan."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Answer, Call
from warm import Popen

from shardwright.job.train import TrainSection
from shardwright.launcher.ending import RunOutcome, decode_outcome
from shardwright.launcher.heartbeat import Beat, read_heartbeat

TIMEOUT = 4.0  # of runs that are to hang
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("warm_runs")
HANGS = 300.0  # seconds after which nothing will come
HEADER = ",".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])


def job_text(data: str, out: Path, steps: int, timeout: float) -> str:
    tables = "".join(f'[[tables]]\nname = "C{i}"\nrows = 50\ndim = 4\n' for i in range(1, 27))
    return (
        "[model]\nbottom = [4]\ntop = [8, 1]\n[batch]\nsize = 4\n"
        f'[data]\nkind = "criteo"\npath = "{data}"\n'
        f'[train]\nsteps = {steps}\ntimeout = {timeout}\nout = "{out}"\n{tables}'
    )


def rows(count: int, bad: dict[int, str] | None = None) -> str:
    good = "1,2,,3.0" + "," * 10 + "," + ",".join(f"{i:08x}" for i in range(26))
    lines = [(bad or {}).get(line, good) for line in range(2, count + 2)]
    return "\n".join([HEADER, *lines]) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "data.csv").write_text(rows(64))
    yield tmp_path
    assert not alive(tmp_path), "a worker outlived its run"


def alive(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def command(folder: Path, steps: int, data: str = "data.csv", timeout: float = HANGS) -> list[str]:
    job = folder / "job.toml"
    job.write_text(job_text(str(folder / data), folder / "run", steps, timeout))
    return [sys.executable, "-m", "shardwright", "train", str(job), "-n", "2"]


def finished(folder: Path, steps: int, **kwargs: str) -> subprocess.CompletedProcess[str]:
    line = command(folder, steps, **kwargs)
    return subprocess.run(line, capture_output=True, text=True, timeout=HANGS, check=False)


def outcome(folder: Path) -> RunOutcome:
    path = folder / "run" / "outcome.json"
    return decode_outcome(path.read_bytes(), str(path))


def hurt(
    folder: Path, rank: int, number: signal.Signals, timeout: float = HANGS
) -> tuple[int, str]:
    """Start an endless run, send ``rank`` a signal in the middle; code and stderr."""
    line = command(folder, 10_000_000, timeout=timeout)
    process = Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        reading = wait_for_step(folder, rank, process)
        os.kill(reading.pid, number)
        _, errors = process.communicate(timeout=HANGS)
    finally:
        process.kill()
        process.wait(10)
    return process.returncode, errors


def wait_for_step(folder: Path, rank: int, process: Popen) -> Beat:
    limit = time.monotonic() + HANGS
    while time.monotonic() < limit and process.poll() is None:
        path = folder / "run" / f"rank-{rank}.pulse"
        reading = read_heartbeat(path) if path.exists() else None
        if reading is not None and (reading.step or 0) > 20:
            return reading
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} never came to step 20")


@pytest.mark.product  # daily one that is killed in its backward, case 2 of cases.py
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_and_is_named(folder: Path, rank: int) -> None:
    code, errors = hurt(folder, rank, signal.SIGKILL)
    assert code == 5
    assert f"rank {rank} died" in errors
    assert "Traceback" not in errors
    assert outcome(folder).code == 5


@pytest.mark.product  # daily case 4 of cases.py is one
def test_a_hung_rank_ends_the_run_within_its_timeout_and_is_named(folder: Path) -> None:
    code, errors = hurt(folder, 1, signal.SIGSTOP, TIMEOUT)
    assert code == 5
    waited = re.search(r"rank 1 made no progress for (\d+) s", errors)
    assert waited is not None
    assert TIMEOUT <= int(waited[1]) < TrainSection().timeout  # the job's own, not the usual one
    assert "Traceback" not in errors


@pytest.mark.product  # daily an id that is wrong ends a run so
def test_a_truncated_row_ends_the_run_with_its_line_number(folder: Path) -> None:
    (folder / "bad.csv").write_text(rows(64, {40: "1,2,3"}))
    done = finished(folder, 20, data="bad.csv")
    assert done.returncode == 2
    assert "bad.csv:40" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_bad_rows_are_counted_and_the_plan_is_trained_again_and_stays_as_it_is(
    call: Call, folder: Path
) -> None:
    (folder / "bad.csv").write_text(rows(64, {9: "1,2,3", 40: "not a row"}))
    changes = {
        "data.path": folder / "bad.csv",
        "data.skip_bad_rows": "true",
        "batch.size": 4,
        "train.steps": 8,
        "train.out": folder / "run",
    }
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    done = call("train", ROOT / "examples" / "criteo_csv.toml", "-n", "2", *words)
    assert done.code == 0, done.err
    assert "2 bad rows were left out" in done.out
    assert "exact bytes equal on 2 of 2 ranks" in done.out
    plan = folder / "run" / "plan.json"
    before = plan.read_bytes()
    plan.write_bytes(before + b" ")  # not as it would be written
    again = call("train", plan)
    assert again.code == 0, again.err
    assert plan.read_bytes() == before + b" "


@pytest.mark.slow
def test_a_bad_row_that_was_held_out_loses_nothing_that_was_trained(
    call: Call, folder: Path
) -> None:
    (folder / "test.csv").write_text(rows(64, {40: "1,2,3"}))
    job, run = folder / "job.toml", folder / "run"
    text = job_text(str(folder / "data.csv"), run, 3, TIMEOUT)
    text = text.replace("[train]", f'test_path = "{folder / "test.csv"}"\n[train]')
    job.write_text(text.replace("[[tables]]", '[checkpoint]\nevery = "1 h"\n[[tables]]', 1))
    done = call("train", job, "-n", "2", "--set", "train.forward=parallel")
    assert done.code == 2
    assert "test.csv:40" in done.err
    assert f"What was trained is kept in {run}: measured.json and the checkpoint." in done.err
    assert (run / "checkpoints" / "step-3" / "manifest.json").exists()
    found = call("compare", run)
    assert found.code == 0, found
    assert "Memory as predicted" in found.out


OWN = """
import torch

def build(batch):
    return torch.nn.Linear(4, 4), torch.zeros(batch, 4)

def batches(batch, rank):
    for number in range(5):
        if rank == 1 and number == 3:
            {breaks}
        yield torch.ones(batch, 4)
"""
STEP = """
import torch

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)

def build(batch):
    return Own(), torch.zeros(batch, 4)

def batches(batch, rank):
    for number in range(5):
        yield torch.ones(batch, 4 + (rank == 1 and number == 2))
"""
BREAKS = {
    "raise OSError('no disk')": "expected batch 4, got OSError: no disk.",
    "return": "expected batches for 1000 steps, got 3. Let it go on",
    "yield torch.ones(batch)": "batch 4: expected inputs like (float32 [2, 4]), got (float32 [2])",
    "yield {'x': 1}": "batch 4: expected inputs like (float32 [2, 4]), got (x=int).",
}


@pytest.mark.product
@pytest.mark.parametrize(
    "breaks",  # tests/train/test_python_task.py has the others' words
    BREAKS,
)
def test_batches_of_a_user_s_own_that_fail_on_one_rank_end_the_run_on_all(
    call: Call, folder: Path, breaks: str
) -> None:
    done = finished_own(call, folder, OWN.format(breaks=breaks))
    (said,) = [text for text in done.err.splitlines() if BREAKS[breaks] in text]
    assert said.startswith("shardwright: rank 1")
    assert "Traceback" not in done.err
    assert outcome(folder).code == 2


def finished_own(call: Call, folder: Path, text: str) -> Answer:
    (folder / "own.py").write_text(text)
    (folder / "job.toml").write_text(
        '[model]\npython = "own:build"\n[data]\npython = "own:batches"\n[batch]\nsize = 2\n'
        f'[train]\nsteps = 1000\nout = "{folder / "run"}"\n'
    )
    done = call("train", "job.toml", "-n", "2")
    assert done.code == 2, done.err
    return done


@pytest.mark.slow
def test_an_error_in_a_user_s_own_forward_names_its_line_and_its_rank(
    call: Call, folder: Path
) -> None:
    done = finished_own(call, folder, STEP)
    (said,) = [text for text in done.err.splitlines() if "own.py" in text]
    assert said.startswith("shardwright: rank 1: model.python 'own:build', own.py:10 (forward)")
    assert "got RuntimeError: mat1 and mat2 shapes cannot be multiplied" in said
    assert said.endswith("(step 3, forward)")
    assert "Traceback" not in done.err
    log = (folder / "run" / "rank-1.log").read_text()
    assert "return self.inner(x)" in log


NOT_FINITE = {
    "tables": "gradient of tables.C4.weight on rank 1 in step 3: expected finite numbers",
    "bottom.0": "gradient of bottom.0.bias on rank 1 in step 3: expected finite numbers",
    "loss": "loss on rank 1 in step 3: expected finite numbers",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",  # tests/distributed/test_guard.py has gradients daily
    [*(pytest.param(what, marks=pytest.mark.product) for what in ("tables", "bottom.0")), "loss"],
)
def test_a_gradient_or_loss_that_is_not_finite_ends_the_run_and_updates_nothing(
    call: Call, monkeypatch: pytest.MonkeyPatch, folder: Path, what: str
) -> None:
    """A module of Python's own start lets rank 1 go wrong, and every rank compare its weights."""
    shutil.copy(Path(__file__).parent / "spoilt_step.py", folder / "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("SPOILT", what)
    monkeypatch.setenv("SPOILT_FOLDER", str(folder))
    done = call(*command(folder, 6)[3:])
    assert done.code == 5
    (line,) = [text for text in done.err.splitlines() if NOT_FINITE[what] in text]
    assert "rank 1" in line
    assert "Traceback" not in done.err
    assert outcome(folder).code == 5
    for rank in (0, 1):
        assert (folder / f"rank-{rank}.kept").read_text() == "as before step 3"
    assert not list((folder / "run").glob("*.record.json")) + [
        name for name in ("measured.json", "comparison.json") if (folder / "run" / name).exists()
    ]


@pytest.mark.slow
def test_running_a_plan_imports_no_planner(folder: Path) -> None:
    probe = (
        "import sys, shardwright.train.training; "
        "print([m for m in sys.modules if m.startswith(('shardwright.planner', "
        "'shardwright.cost', 'shardwright.heap'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=HANGS, check=True
    )
    assert done.stdout.strip() == "[]"
