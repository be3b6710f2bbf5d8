"""A training loop of one's own that lasts: measured, saved, stopped by signals, resumed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.core.measurement import Measurement
from shardwright.job.plan import Plan
from shardwright.job.train import CheckpointSection
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.launcher.progress import Writer
from shardwright.runtime.checkpoint.agreement import rank_and_size
from shardwright.runtime.checkpoint.folders import complete_steps
from shardwright.runtime.meter import comm_of
from shardwright.runtime.saves import Saves
from shardwright.runtime.saving import Resumed, load_checkpoint
from shardwright.train.loop import measure, metered
from shardwright.train.writers import PROGRESS_SECONDS, check_log, writers


class Run:
    """A loop over ``model``, which runs ``plan``, as ``shardwright train`` has one::

        with sw.Run(plan, model, optimizer, "runs/mine", every="10 min") as run:
            for step in run.steps(1000):
                loss = loss_of(model, batch(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.end(loss)

    It goes on after the newest checkpoint in ``folder``, if there is one: then ``resumed`` says
    what it found, and ``steps`` begins behind it. ``extra`` gives plain values of this rank to be
    saved beside the model, such as a place in the data: ``resumed.extra["own"]``. SIGTERM and
    Ctrl-C end it after a step that is saved, by StoppedError; its ``exit_code`` is 75. Progress is
    in ``progress.jsonl`` there; ``log`` may name ``"tensorboard"`` and ``"wandb"``, too.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: Path | str,
        *,
        every: str = "10 min",
        keep: int = 2,
        extra: Callable[[], Any] = lambda: None,
        log: Sequence[str] = (),
    ) -> None:
        check_log(log, "log")
        self.plan, self.folder = plan, Path(folder)
        self.resumed: Resumed | None = None
        self._what = (model, optimizer)
        self._section = CheckpointSection(every=every, keep=keep)
        self._extra = extra
        self._log = log
        self._writers: list[Writer] = []
        self._count = 0
        self._written = 0.0
        self._around = ExitStack()

    def __enter__(self) -> Run:
        model, optimizer = self._what
        comm = comm_of(model)
        rank, _ = rank_and_size(comm)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._heartbeat = Heartbeat.create(self.folder, rank)
        self.meter = metered(rank, self._heartbeat, comm.mesh.device_type)
        saved = self.folder / "checkpoints"
        if complete_steps(saved):
            self.resumed = load_checkpoint(saved, model, optimizer, random_state=True)
            self.meter.number = self.meter.first = self.resumed.step
        with ExitStack() as around:
            if rank == 0:
                self._writers = writers(self.folder, self._log, step=self.meter.first)
                for writer in self._writers:
                    around.callback(writer.close)
            measuring = measure(self.plan, model, optimizer, meter=self.meter)
            self.measured = around.enter_context(measuring)
            if self.resumed:
                self.measured.losses += self.resumed.extra["losses"]
            self._saves = Saves(
                saved,
                model,
                optimizer,
                self._section,
                extra=lambda: {"losses": self.measured.losses, "own": self._extra()},
                facts={"plan": self.plan.fingerprint},
                say=self._say,
                step=self.meter.first,
            )
            around.enter_context(self._saves.listening())
            self._around = around.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._around.__exit__(*error)

    def steps(self, count: int) -> Iterator[int]:
        """The numbers of the steps up to ``count`` that are left; the last one is saved."""
        self._count = count
        yield from range(self.meter.number, count + 1)
        self._saves.finish(count)

    def end(self, loss: torch.Tensor | float | None = None) -> None:
        """A step is over (collective); ``loss`` is this rank's, for the curve."""
        number = self.meter.number
        if loss is not None:
            self._write(number, loss)
        with self.measured.between(loss):
            self._saves.after(number, self._saves.agreed(number))

    def gather(self) -> Measurement:
        """What all ranks measured (collective), for ``sw.compare``."""
        return self.measured.gather()

    def _write(self, step: int, loss: torch.Tensor | float) -> None:
        now = time.monotonic()
        if not self._writers or (now - self._written < PROGRESS_SECONDS and step < self._count):
            return
        self._written = now
        for writer in self._writers:
            writer.update({"step": step, "steps": self._count, "loss": _plain(loss)})

    def _say(self, text: str) -> None:
        for writer in self._writers:
            writer.update({"said": text})
        if self._writers:
            print(text, file=sys.stderr, flush=True)


def _plain(loss: torch.Tensor | float) -> float:
    return loss.item() if isinstance(loss, torch.Tensor) else loss
