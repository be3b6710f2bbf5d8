"""The cases of ``cases.py``: those with a fault are run, the others have tests of their own."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, PAGE, page_with_table
from commands import Call

from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import write_plan
from shardwright.job.train import TrainSection
from shardwright.launcher.ending import decode_outcome

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("warm_runs")
SECONDS = 300.0
TIMEOUT = 6.0
OWN = """
import os, signal, time
import torch

TIMEOUT = {timeout}
NUMBER = 0


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        if NUMBER >= 3 and "{where}" == "forward":
            {fault}
        x = self.first(x)
        if NUMBER >= 3 and "{where}" == "backward":
            x.register_hook(fault)
        return self.last(x)


def fault(x):
    {fault}


def build(batch):
    return Own(), torch.zeros(batch, 4)


def batches(batch, rank):
    global NUMBER
    while True:
        NUMBER += rank == 1
        yield torch.ones(batch, 4)
"""
JOB = """
[model]
python = "own:build"
[data]
python = "own:batches"
[batch]
size = 2
[train]
steps = 8
timeout = {timeout}
out = "run"
"""


def numbers() -> list[Any]:
    """Of cases that are run. What a rank that is killed in its backward and, in
    ``test_training_faults.py``, a loss that is not finite end with is seen daily."""
    often = pytest.mark.product
    return [
        pytest.param(number, marks=often) if number in ("1", "18") else number
        for number, case in CASES.items()
        if case.fault
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", numbers())
def test_a_run_in_which_rank_1_goes_wrong(call: Call, tmp_path: Path, number: str) -> None:
    case = CASES[number]
    timeout = TIMEOUT if number in ("4", "5") else 60.0
    own = OWN.format(where=case.where, fault=case.fault, timeout=timeout)
    (tmp_path / "own.py").write_text(own)
    (tmp_path / "job.toml").write_text(JOB.format(timeout=timeout))
    done = call("train", "job.toml", "-n", "2")
    assert done.code == case.code, done.err
    said = re.search(case.says, done.err + done.out)
    assert said, done.err
    if number == "4":  # the job's own timeout, not the usual one
        seconds = re.search(r"for (\d+) s", said[0])
        assert seconds is not None
        assert TIMEOUT <= int(seconds[1]) < TrainSection().timeout
    assert "Traceback" not in done.err
    outcome = decode_outcome((tmp_path / "run" / "outcome.json").read_bytes())
    assert outcome.code == case.code
    assert not at_work(tmp_path)


def at_work(folder: Path) -> list[str]:
    """Processes other than this one whose working directory is the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            own = process.name == str(os.getpid())
            if Path(os.readlink(process / "cwd")) == folder and not own:
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


def alone(tmp_path: Path, port: int) -> subprocess.CompletedProcess[str]:
    """Rank 0 of two, whom nobody joins."""
    job = {
        "model": {"kind": "transformer", "layers": 1, "dim": 16, "heads": 2},
        "cluster": {"preset": "local", "world_size": 2},
        "batch": {"size": 4, "sequence": 16},
        "train": {"timeout": 2.0, "out": str(tmp_path / "run")},
    }
    write_plan(plan(parse_job(job)), tmp_path / "plan.json")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.run(
        [sys.executable, "-m", "shardwright", "run", "plan.json", "--out", "run"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=tmp_path,
        env=os.environ | place | {"RANK": "0", "WORLD_SIZE": "2"},
    )


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        done = alone(tmp_path, taken.getsockname()[1])
    assert done.returncode == CASES["+1"].code
    assert re.search(CASES["+1"].says, done.stderr.splitlines()[-1])


@pytest.mark.slow
def test_a_rank_that_never_comes_is_waited_for_so_long(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    done = alone(tmp_path, port)
    assert done.returncode == CASES["+2"].code
    assert re.search(CASES["+2"].says, done.stderr.splitlines()[-1])


def test_every_case_has_a_test() -> None:
    for case in CASES.values():
        path, _, name = case.test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {f.name for f in tree.body if isinstance(f, ast.FunctionDef)}, case.test


def test_the_page_has_the_cases_as_they_are() -> None:
    found = PAGE.read_text()
    assert page_with_table(found) == found, "python tests/faults/cases.py writes it again"
