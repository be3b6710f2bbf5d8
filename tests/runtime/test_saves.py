"""When a run is saved, and what a signal does to it; one process, a clock that the test moves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardwright.core.errors import InputError, RunError, StoppedError
from shardwright.job.train import CheckpointSection, every
from shardwright.runtime.checkpoint import read_full
from shardwright.runtime.checkpoint.folders import complete_steps
from shardwright.runtime.data_workers import naming_lost
from shardwright.runtime.saves import Saves


class Run:
    """A model whose weight is the number of its step."""

    def __init__(self, folder: Path, **section: Any) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.folder, self.model = folder, nn.Linear(2, 2)
        self.saves = Saves(
            folder,
            self.model,
            None,
            CheckpointSection(**section),
            extra=lambda: None,
            facts={},
            say=self.said.append,
            clock=lambda: self.now,
        )

    def step(self, number: int) -> None:
        with torch.no_grad():
            self.model.weight.fill_(number)
        self.saves.after(number, self.saves.agreed(number))

    def until_saved(self, number: int) -> None:
        """Steps in which nothing is due, until the save under way is over."""
        while self.saves.saved != number:
            self.saves.after(number, (0, self.saves.words(number)[1]))


@pytest.mark.parametrize("overlap", [True, False])
def test_every_so_many_steps_what_there_was_after_the_step_is_saved(
    tmp_path: Path, overlap: bool
) -> None:
    run = Run(tmp_path, every="2 steps", overlap=overlap, keep=9)
    for number in range(1, 6):
        run.step(number)
        with torch.no_grad():
            run.model.weight.fill_(-1.0)  # the next step changes it while files are written
        if number % 2 == 0:
            run.until_saved(number)
    assert complete_steps(tmp_path) == [2, 4]
    assert read_full(tmp_path, 4)["weight"].unique().tolist() == [4.0]


def test_every_so_many_seconds_even_if_the_clock_goes_back(tmp_path: Path) -> None:
    run = Run(tmp_path, every="1 min", overlap=False)
    run.now = 1000.0
    run.step(1)
    run.now = 1030.0
    run.step(2)
    run.now = 500.0  # an hour that was set back
    run.step(3)
    run.now = 559.0
    run.step(4)
    run.now = 561.0
    run.step(5)
    assert complete_steps(tmp_path) == [1, 5]


def test_the_last_step_is_saved_once(tmp_path: Path) -> None:
    run = Run(tmp_path, every="3 steps")
    for number in (1, 2, 3):
        run.step(number)
    run.saves.finish(3)
    run.saves.finish(3)
    assert (run.saves.count, complete_steps(tmp_path)) == (1, [3])
    assert run.saves.figures().nbytes == (tmp_path / "step-3/rank-0.safetensors").stat().st_size


def test_a_signal_is_a_wish_that_a_step_fulfils(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.saves.listening():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedError, match=r"SIGTERM after step 7, saved in .*step-7"):
            run.step(7)
    assert complete_steps(tmp_path) == [7]


def test_a_second_signal_acts_as_ever_and_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    run = Run(tmp_path, every="1 steps")
    run.step(1)
    run.until_saved(1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with run.saves.listening():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # the same one, passed on by torchrun
            run.now = 5.0
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert complete_steps(tmp_path) == [1]
    assert read_full(tmp_path)["weight"].unique().tolist() == [1.0]


def test_a_signal_while_files_are_written_lets_both_saves_end(tmp_path: Path) -> None:
    run = Run(tmp_path, every="1 steps", keep=9)
    run.step(1)
    with run.saves.listening():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedError):
            run.step(2)
    assert complete_steps(tmp_path) == [1, 2]


def test_a_save_that_fails_is_said_and_the_next_one_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "in the way"
    folder.write_text("no folder")
    run = Run(folder, every="1 steps", overlap=False)
    run.step(1)
    assert "Nothing was saved; training can go on." in run.said[0]
    folder.unlink()
    run.step(2)
    assert (run.saves.failed, run.saves.count, complete_steps(folder)) == (1, 1, [2])


def test_a_grace_that_is_too_short_for_a_step_and_a_save_is_said_once(tmp_path: Path) -> None:
    run = Run(tmp_path, every="1 steps", overlap=False, grace=20.0)
    for number in (1, 2, 3):
        run.now += 25.0
        run.step(number)
    (said,) = run.said
    assert said.startswith("a step and a save take 25 s, more than the 20 s that are left")


def test_a_number_alone_is_steps() -> None:
    assert every(20) == every("20 steps")


@pytest.mark.parametrize("text", ["", "10", "0 steps", "-1 s", "1.5 h", "10 days", "ten min"])
def test_a_time_between_checkpoints_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="such as '20 steps', '30 s', '10 min' or '2 h'"):
        every(text)


def test_workers_of_a_loader_load_on_after_a_signal_to_all_until_the_step_is_saved(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    with run.saves.listening():
        batches = iter(DataLoader(range(100), num_workers=2))
        next(batches)
        for worker in batches._workers:  # type: ignore[attr-defined]
            next(batches)
            for name in ("TERM", "INT"):  # by another process than the rank
                subprocess.run(["/bin/kill", f"-{name}", str(worker.pid)], check=True)
        signal.raise_signal(signal.SIGTERM)
        assert [int(number) for number in batches] == [*range(3, 100)]
        with pytest.raises(StoppedError, match="SIGTERM after step 3, saved in"):
            run.step(3)


def test_a_worker_of_a_loader_that_is_killed_ends_no_step_in_its_middle(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.saves.listening():
        batches = iter(DataLoader(range(4), num_workers=2))
        workers = batches._workers  # type: ignore[attr-defined]
        next(batches)
        assert not run.saves.has_lost_worker
        os.kill(workers[1].pid, signal.SIGKILL)
        os.waitid(os.P_PID, workers[1].pid, os.WEXITED | os.WNOWAIT)  # and leave it to be asked for
        assert run.saves.has_lost_worker
        with pytest.raises(StoppedError, match="a DataLoader's worker, which was killed, after"):
            run.step(4)
    assert complete_steps(tmp_path) == [4]


def test_a_folder_of_checkpoints_that_is_gone_is_not_said_to_hold_any(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run = Run(folder, every="1 steps")
    run.step(1)
    run.until_saved(1)
    shutil.rmtree(folder)
    folder.write_text("another file")
    with run.saves.listening():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedError, match="not be saved; there is no checkpoint"):
            run.step(2)
    assert "Nothing was saved; training can go on" in run.said[0]


def test_a_loader_that_finds_its_worker_gone_before_the_signal_is_heard_ends_no_run(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    gone = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    other = InputError("data.python: expected batch 2, got OSError")
    other.__cause__ = OSError("no disk")
    assert not run.saves.is_of_lost_worker(other)
    other.__cause__ = gone
    assert run.saves.is_of_lost_worker(other)
    with pytest.raises(StoppedError, match="a DataLoader's worker, which was killed, after"):
        run.step(2)


class Breaks(Dataset[torch.Tensor]):
    """Rows of which the second loses a connection of its own."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index:
            raise ConnectionResetError("of a database")
        return torch.zeros(4)

    def __len__(self) -> int:
        return 2


def test_a_connection_that_breaks_as_a_tensor_travels_is_the_end_of_its_worker() -> None:
    batches = iter(DataLoader(Breaks(), num_workers=1))
    next(batches)
    with pytest.raises(ConnectionResetError) as of_the_user:
        next(batches)
    with pytest.raises(ConnectionResetError), naming_lost():
        raise of_the_user.value
    batches = iter(DataLoader(Breaks(), num_workers=1))
    (worker,) = batches._workers  # type: ignore[attr-defined]
    assert batches._worker_result_queue._reader.poll(60)  # type: ignore[attr-defined]
    worker.kill()
    worker.join()
    worker.is_alive = lambda: True  # as until its end is known
    with pytest.raises(OSError, match=r".") as of_the_worker:
        next(batches)
    with pytest.raises(RunError, match="got the end of one, which was killed"), naming_lost():
        raise InputError("data.python: expected batch 2") from of_the_worker.value
    worker.is_alive = lambda: False
