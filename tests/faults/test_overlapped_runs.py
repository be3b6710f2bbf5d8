"""``train`` whose ids of the next batch travel ahead: what is read ahead is lost by nobody."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from test_resumed_runs import ended, losses, start, train, wait_for_step

from shardwright.job.plan import read_plan

DLRM = """
[model]
kind = "dlrm"
dense_features = 3
bottom = [16, 8]
top = [8, 1]
[data]
kind = "synthetic"
rows = 4000
test_rows = 64
"""
OWN = """
[model]
kind = "python"
python = "resuming_tasks:looked"
[data]
python = "resuming_tasks:clicked"
"""
REST = """
[cluster]
preset = "local"
world_size = 2
ddr_cap = "5 MiB"
[batch]
size = 16
[train]
steps = 60
out = "run"
overlap = "ids_and_rows"
table_optimizer = "sgd"
[checkpoint]
every = "10 steps"
"""
TABLES = "".join(
    f'[[tables]]\nname = "t{n}"\nrows = {300 * (n + 1)}\ndim = 8\nsharding_types = ["{kind}"]\n'
    for n, kind in enumerate(("row_wise", "table_wise"))
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).parents[1] / "distributed" / "resuming_tasks.py", tmp_path)
    return tmp_path


@pytest.mark.product  # daily without processes of its own, in distributed/test_resuming.py
@pytest.mark.parametrize("kind", ["dlrm", "own"])
def test_a_run_with_ids_under_way_is_resumed_as_if_it_had_never_ended(
    folder: Path, kind: str
) -> None:
    job = DLRM + REST + TABLES if kind == "dlrm" else OWN + REST
    (folder / "job.toml").write_text(job)
    process = start(folder, "--set", "train.steps=2000")
    wait_for_step(folder, 20, process)
    process.send_signal(signal.SIGTERM)
    _, errors = ended(process)
    assert process.returncode == 75, errors
    (step,) = {int(path.name.split("-")[1]) for path in _newest(folder)}
    steps = f"train.steps={step + 20}"
    code, _, said = train(folder, "--resume", "--set", steps)
    assert code == 0, said
    assert read_plan(folder / "run" / "plan.json").modes.asked
    again = losses(folder)
    assert len(again) == step + 20
    code, _, said = train(folder, "--set", steps, "--set", "train.overlap=none", "--out", "whole")
    assert code == 0, said
    (folder / "run").rename(folder / "resumed")
    (folder / "whole").rename(folder / "run")
    assert again == losses(folder)


def _newest(folder: Path) -> list[Path]:
    found = sorted(
        folder.glob("run/checkpoints/step-*"), key=lambda path: int(path.name.split("-")[1])
    )
    return found[-1:]
