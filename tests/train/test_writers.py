"""Who is told of a run's progress, with stand-ins for packages that are no dependency."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.errors import InputError
from shardwright.job.job import parse_job
from shardwright.train import writers as module
from shardwright.train.writers import check_log, writers

STEPS = (
    {"step": 1, "steps": 3, "loss": 0.75, "text": "loss on rank 0 0.7500"},
    {"said": "saved step-2"},
    {"step": 3, "steps": 3, "loss": 0.25, "seconds_per_step": 0.125, "text": "loss on rank 0"},
)


class Board:
    """As torch.utils.tensorboard.SummaryWriter is called."""

    made: list[Board]

    def __init__(self, log_dir: str, purge_step: int | None) -> None:
        self.where, self.calls = (log_dir, purge_step), list[Any]()
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.calls.append((name, text, step))

    def close(self) -> None:
        self.calls.append("closed")


class Wandb(types.ModuleType):
    """As the module wandb is called."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []

    def init(self, **options: Any) -> Wandb:
        self.calls.append(options)
        return self

    def log(self, series: dict[str, float], step: int) -> None:
        self.calls.append((series, step))

    def finish(self) -> None:
        self.calls.append("finished")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Board], Wandb]:
    board, wandb = types.ModuleType("torch.utils.tensorboard"), Wandb()
    made: list[Board] = []
    board.SummaryWriter = type("SummaryWriter", (Board,), {"made": made})  # type: ignore[attr-defined]
    for name, stands_in in (("torch.utils.tensorboard", board), ("wandb", wandb)):
        monkeypatch.setitem(sys.modules, name, stands_in)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    return made, wandb


def test_all_writers_are_told_the_same(
    packages: tuple[list[Board], Wandb], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_log(("tensorboard", "wandb"))
    stderr = io.StringIO()
    monkeypatch.setattr(module.sys, "stderr", stderr)
    made = writers(tmp_path, ("tensorboard", "wandb"), step=0, shown=True)
    for entry in STEPS:
        for writer in made:
            writer.update(entry)
    for writer in made:
        writer.close()
    lines = (tmp_path / "progress.jsonl").read_text().splitlines()
    assert tuple(json.loads(line) for line in lines) == STEPS
    assert "saved step-2\n" in stderr.getvalue()
    assert stderr.getvalue().endswith("step 3/3  loss on rank 0\n")
    boards, wandb = packages
    assert boards[0].where == (str(tmp_path / "tensorboard"), None)
    assert boards[0].calls == [
        ("loss", 0.75, 1),
        ("said", "saved step-2", 1),
        ("loss", 0.25, 3),
        ("seconds_per_step", 0.125, 3),
        "closed",
    ]
    assert wandb.calls == [
        {"project": "shardwright", "name": tmp_path.name, "dir": str(tmp_path)},
        ({"loss": 0.75}, 1),
        ({"loss": 0.25, "seconds_per_step": 0.125}, 3),
        "finished",
    ]


def test_what_a_run_wrote_after_its_checkpoint_is_purged(
    packages: tuple[list[Board], Wandb], tmp_path: Path
) -> None:
    writers(tmp_path, ("tensorboard",), step=40)
    assert packages[0][0].where[1] == 41


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_not_installed_is_refused_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError) as error:
        check_log((name,))
    assert str(error.value) == (
        f"train.log: expected {name} to be installed, got no such package. "
        f"pip install {name}, or leave it out: progress.jsonl has the same."
    )


def test_an_unknown_writer_is_refused_where_the_job_is_read() -> None:
    with pytest.raises(InputError, match="one of tensorboard, wandb"):
        parse_job({"model": {"kind": "transformer"}, "train": {"log": ["mlflow"]}})
    with pytest.raises(InputError, match="expected some of tensorboard, wandb, got 'mlflow'"):
        check_log(["mlflow"], "log")
