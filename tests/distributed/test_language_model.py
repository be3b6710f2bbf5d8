"""The example of a loop of one's own learns, saves, and goes on where it was interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import example_tasks as tasks
import pytest
import torch
from combinations import slow
from pool import Pool

STEPS, EVERY, STOP = 4, 2, 2


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses and saved tensors of a run that nothing interrupts, on two ranks."""
    folder = str(tmp_path_factory.mktemp("whole"))
    return pool.run(2, tasks.train, folder=folder, steps=STEPS, every=EVERY, stop=STEPS)[0]


@pytest.fixture(scope="module")
def interrupted(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks that ended early."""
    folder = tmp_path_factory.mktemp("interrupted")
    pool.run(2, tasks.train, folder=str(folder), steps=STEPS, every=EVERY, stop=STOP)
    assert [path.name for path in folder.glob("step-*")] == [f"step-{STOP}"]
    return folder


def _resumed(pool: Pool, interrupted: Path, folder: Path, ranks: int) -> Any:
    shutil.copytree(interrupted, folder, dirs_exist_ok=True)
    options = {"folder": str(folder), "steps": STEPS, "every": EVERY}
    return pool.run(ranks, tasks.train, **options, stop=STEPS)[0]


@pytest.mark.slow
def test_an_interrupted_run_goes_on_bit_for_bit(
    pool: Pool, interrupted: Path, tmp_path: Path, whole: Any
) -> None:
    losses, saved = _resumed(pool, interrupted, tmp_path, 2)
    assert losses == {STEPS: whole[0][STEPS]}
    assert saved.keys() == whole[1].keys()
    assert [name for name in saved if not saved[name].equal(whole[1][name])] == []


@pytest.mark.parametrize("ranks", [slow(1), slow(3)])
def test_it_goes_on_with_another_number_of_ranks(
    pool: Pool, interrupted: Path, tmp_path: Path, whole: Any, ranks: int
) -> None:
    losses, saved = _resumed(pool, interrupted, tmp_path, ranks)
    assert losses[STEPS] == pytest.approx(whole[0][STEPS], rel=1e-5)
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, whole[1][name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_it_learns_under_torchrun(tmp_path: Path) -> None:
    given = ["--folder", str(tmp_path), "--steps", "40", "--every", "20"]
    said = tasks.under_torchrun(tasks.EXAMPLE, *given)
    losses = [float(line.split()[4][:-1]) for line in said.splitlines() if "loss" in line]
    assert len(losses) == 2
    assert losses[0] < 2.8  # letters alone: 2.75, nothing at all: 3.2
    assert losses[1] < 2.3
    assert "LanguageModel" in said
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-20", "step-40"]
