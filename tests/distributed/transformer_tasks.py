"""A small transformer trained on ranks and in one process; tasks take their mesh first."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from metering import steps_measured
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.llama import LlamaShape
from shardwright.core.schedule import Action
from shardwright.estimate.own_model import as_tensors
from shardwright.job.job import Job
from shardwright.job.plan import Plan
from shardwright.models.llama import Llama
from shardwright.models.transformer import Transformer
from shardwright.runtime.apply import apply
from shardwright.runtime.guard import Guard
from shardwright.runtime.meter import Meter
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters
from shardwright.runtime.probe import Probe
from shardwright.runtime.state import full_state_dict
from shardwright.runtime.units.dstorage import traffic, units_in
from shardwright.train.sources import task_of


def train_whole(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of one process, on batches of ``job.batch.size``."""
    task, shape = task_of(job), job.model.shape
    model: nn.Module = Transformer(job)
    if isinstance(shape, LlamaShape):
        model = Llama(shape, sequence=job.batch.sequence, seed=job.train.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.train.learning_rate)
    losses, batches = [], task.batches(0, 1)
    for _ in range(job.train.steps):
        loss = task.loss(model, tuple(map(torch.from_numpy, next(batches))))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


KEPT: dict[bytes, tuple[list[float], dict[str, torch.Tensor]]] = {}


def whole_of(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same, kept for other plans of the training."""
    key = msgspec.json.encode((job.model, job.batch, job.data, job.train), order="deterministic")
    if key not in KEPT:
        KEPT[key] = train_whole(job)
    return KEPT[key]


def train_planned(mesh: DeviceMesh, job: Job, made: Plan) -> Any:
    """Losses (mean over ranks), whole final weights, and this rank's held-out scores."""
    rank, size = mesh.get_local_rank(), mesh.size()
    task = task_of(job)
    model = apply(task.model(torch.device("cpu")), made, mesh)
    rate = job.train.learning_rate
    optimizer = make_optimizer(
        job.train.optimizer, optimizer_parameters(model, per_unit=True), rate
    )
    losses, batches = [], task.batches(rank, size)
    for _ in range(job.train.steps):
        loss = task.loss(model, tuple(map(torch.from_numpy, next(batches))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / size
        torch.distributed.all_reduce(total, group=mesh.get_group())
        losses.append(total.item())
    with torch.no_grad():
        scores = [
            task.scores(model, tuple(map(torch.from_numpy, arrays)), numbers)
            for arrays, numbers in task.held_out(rank, size)
        ]
    return losses, full_state_dict(model), scores


def meter_planned(mesh: DeviceMesh, job: Job, made: Plan) -> Any:
    """Exact events, and the events of each metered step."""
    rank, size = mesh.get_local_rank(), mesh.size()
    meter, guard, task = Meter(rank), Guard(mesh), task_of(job)
    model = apply(task.model(torch.device("cpu")), made, mesh, probe=meter)
    rate = job.train.learning_rate
    optimizer = make_optimizer(job.train.optimizer, optimizer_parameters(model), rate)
    batches = map(as_tensors, task.batches(rank, size))
    return steps_measured(meter, guard, model, optimizer, batches, task.loss)


def moved_by_units(mesh: DeviceMesh, made: Plan) -> dict[str, tuple[int, int]]:
    """Collectives and bytes that the runtime's table tells of every unit."""
    task = task_of(made.job)
    model = apply(task.model(torch.device("cpu")), made, mesh)
    return {
        unit.name: tuple(traffic(unit, unit.flow.reshards(unit.key)))  # type: ignore[misc]
        for unit in units_in(model)
    }


def moved_by_plans(mesh: DeviceMesh, plans: dict[str, Plan]) -> dict[str, dict[str, Any]]:
    """The same of several plans."""
    return {name: moved_by_units(mesh, made) for name, made in plans.items()}


class Acting(Probe):
    """Keeps what units did."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Action] = []

    def did(self, action: Action) -> None:
        self.found.append(action)


def actions_of_a_step(mesh: DeviceMesh, made: Plan) -> list[Action]:
    """What the runtime gathered, reduced and collected in the third step of training."""
    probe, task = Acting(), task_of(made.job)
    model = apply(task.model(torch.device("cpu")), made, mesh, probe=probe)
    optimizer = torch.optim.SGD(optimizer_parameters(model), made.job.train.learning_rate)
    batches = task.batches(mesh.get_local_rank(), mesh.size())
    for _ in range(3):
        probe.found.clear()
        task.loss(model, tuple(map(torch.from_numpy, next(batches)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [a for a in probe.found if a.verb in ("gather", "reduce", "collect")]
