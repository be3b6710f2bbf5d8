"""Whole trainings of a job on the pool's ranks, and functions that a job names."""

from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.core.document import read_document
from shardwright.core.errors import NoPlanError, StoppedError
from shardwright.core.measurement import RECORD_SCHEMA, Record
from shardwright.job.plan import read_plan
from shardwright.launcher.folder import record_file
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.train.training import Training


def train(
    mesh: DeviceMesh, plan: str, folder: str, resume: bool = False, stop_after: int = 0
) -> tuple[list[float], dict[str, Any]]:
    """The losses and the saves of this rank's record; the last rank gets a SIGTERM in a step."""
    rank = mesh.get_local_rank()
    made, out = read_plan(plan), Path(folder)
    training = Training(made, out, rank, Heartbeat.create(out, rank), resume=resume, mesh=mesh)
    if stop_after and rank == mesh.size() - 1:
        _signal_in(training, stop_after)
    try:
        training.run()
    except StoppedError as stopped:
        return [], {"stopped": str(stopped)}
    record = read_document(record_file(out, rank), Record, RECORD_SCHEMA, "train")
    assert record.saved
    found: dict[str, Any] = {"resumed": record.saved.resumed, "skipped": record.skipped}
    found["timed"] = record.time_steps
    return list(record.losses), found | {"seed": torch.initial_seed()}


@contextmanager
def warned_of() -> Iterator[None]:
    """Errors in place of warnings, also of those that torch gives once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        torch.set_warn_always(before)


def own_loop(mesh: DeviceMesh, plan: str, folder: str, stop_after: int = 0) -> Any:
    """Losses of a loop of one's own, its weights at the end, and where it went on from."""
    made = read_plan(plan)
    torch.manual_seed(0)
    model = sw.apply(Dropped(), made, mesh)
    optimizer = torch.optim.Adam(sw.optimizer_parameters(model, per_unit=True), 0.01, fused=True)
    torch.manual_seed(mesh.get_local_rank())
    try:
        with sw.Run(made, model, optimizer, folder, every="3 steps", extra=lambda: "mine") as run:
            for step in run.steps(10):
                if step == stop_after and mesh.get_local_rank() == 0:
                    signal.raise_signal(signal.SIGTERM)
                batch = torch.full((4, 4), float(step + mesh.get_local_rank()))
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with warned_of():
                    run.end(loss)
    except sw.StoppedError as stopped:
        return str(stopped)
    found = run.resumed and (run.resumed.step, run.resumed.extra["own"])
    weights = {n: p.tolist() for n, p in sw.full_state_dict(model).items()}
    return run.measured.losses, weights, found


def refused(mesh: DeviceMesh, plan: str, folder: str) -> str:
    """The error of a training that does not begin, and what its model was built of."""
    rank = mesh.get_local_rank()
    training = Training(
        read_plan(plan), Path(folder), rank, Heartbeat.create(Path(folder), rank), mesh=mesh
    )
    try:
        training.run()
    except NoPlanError as error:
        return str(error)
    return "it ran"


def _signal_in(training: Training, step: int) -> None:
    begin = training.heartbeat.begin

    def listener(phase: Any) -> None:
        begin(step=training.meter.number)
        if phase == "forward" and training.meter.number == step:
            training.meter.listener = None
            signal.raise_signal(signal.SIGTERM)

    training.meter.listener = listener


class Dropped(nn.Module):
    """Draws random numbers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square()


def build(batch: int) -> Any:
    return Dropped(), torch.zeros(batch, 4)


def drawn(batch: int) -> Iterator[torch.Tensor]:
    """Of every generator there is."""
    while True:
        found = torch.randn(batch, 4) + random.random() + np.random.rand()
        yield found.float()


def spoilt(batch: int, rank: int) -> Iterator[torch.Tensor]:
    """Batches of which rank 1's third and fifth are not finite."""
    number = 0
    while True:
        number += 1
        yield torch.full((batch, 4), float("inf") if rank == 1 and number in (3, 5) else 0.5)


class Looked(nn.Module):
    """Looks rows up, and draws random numbers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3))
        self.user = nn.Embedding(200_000, 8)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (self.bottom(dense) * self.user(ids)).sum(1)


def clicked(batch: int) -> Iterator[Any]:
    while True:
        yield (torch.randn(batch, 3), torch.randint(200_000, (batch,))), torch.randn(batch)


def looked(batch: int) -> Any:
    inputs, targets = next(clicked(batch))
    return Looked(), inputs, nn.functional.mse_loss, targets


STARVING = False


class Hungry(Dropped):
    """Takes more than there is once its data say so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if STARVING:
            torch.empty(2**50, dtype=torch.uint8)
        return super().forward(x)


def hungry(batch: int) -> Any:
    return Hungry(), torch.zeros(batch, 4)


def starving(batch: int) -> Iterator[torch.Tensor]:
    global STARVING
    for number in range(100):
        STARVING = number == 2
        yield torch.ones(batch, 4)


def numbered(batch: int, rank: int, world_size: int, start: int) -> Iterator[torch.Tensor]:
    """Samples by their number, whoever has them."""
    while True:
        own = torch.arange(start + rank * batch, start + (rank + 1) * batch)
        yield torch.sin(own)[:, None].repeat(1, 4)
        start += batch * world_size
