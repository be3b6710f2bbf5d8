"""What the pool's workers do; each takes its mesh first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import metering
import torch
from metering import steps_measured
from reference import batches, loss_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map

from shardwright.core.measurement import Comparison
from shardwright.core.timeline import Phase
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job
from shardwright.job.plan import Plan
from shardwright.models.dlrm import DLRM
from shardwright.runtime.apply import HOSTS, apply
from shardwright.runtime.embeddings.shard import start_sparse_data_dist
from shardwright.runtime.guard import Guard
from shardwright.runtime.meter import Meter
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters
from shardwright.runtime.probe import Probe
from shardwright.runtime.saving import load_checkpoint, save_checkpoint
from shardwright.runtime.state import full_state_dict
from shardwright.train.compare import compare
from shardwright.train.loop import measure

STEADY = 3  # steps, after which ranks know how many ids they send each other


def share(batch: Any, rank: int, world_size: int) -> Any:
    """One rank's equal part of a global batch."""
    size = len(batch[0]) // world_size
    own = slice(rank * size, (rank + 1) * size)
    return tuple(_bags(part, own) if isinstance(part, dict) else part[own] for part in batch)


def _bags(bags: dict[str, tuple[torch.Tensor, ...]], own: slice) -> Any:
    """Those of some samples."""
    found = {}
    for name, (ids, offsets, *weights) in bags.items():
        ends = offsets[own.start : own.stop + 1]
        of = slice(int(ends[0]), int(ends[-1]))
        found[name] = (ids[of], ends - ends[0], *(weight[of] for weight in weights))
    return found


def train_sharded(
    mesh: DeviceMesh, job: Job, meta: bool, hosts: int = 0, made: Plan | None = None
) -> Any:
    """Losses (mean over ranks' parts) and whole final weights; on a mesh of so many ``hosts``. A
    plan that is given is none that every rank has to make."""
    made = made or plan(job)
    rank, size = mesh.get_local_rank(), mesh.size()
    applied = mesh
    if hosts:
        applied = init_device_mesh("cpu", (hosts, size // hosts), mesh_dim_names=HOSTS)
    model = apply(DLRM(job, device="meta" if meta else None), made, applied)
    rate = job.train.learning_rate
    optimizer = make_optimizer(
        job.train.optimizer, optimizer_parameters(model, per_unit=True), rate
    )
    losses = []
    for batch in batches(job):
        loss = loss_of(model, share(batch, rank, size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / size
        torch.distributed.all_reduce(total, group=mesh.get_group())
        losses.append(total.item())
    return losses, full_state_dict(model)


def go_on(
    mesh: DeviceMesh,
    job: Job,
    steps: range,
    load: str = "",
    save: str = "",
    made: Plan | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Some of the job's steps after a checkpoint, saved after the last: losses, whole weights."""
    rank, size = mesh.get_local_rank(), mesh.size()
    model = apply(DLRM(job, device="meta"), made or plan(job), mesh)
    parameters = optimizer_parameters(model, per_unit=True)
    optimizer = make_optimizer(job.train.optimizer, parameters, job.train.learning_rate)
    if load:
        load_checkpoint(load, model, optimizer)
    losses = []
    for batch in batches(job, len(steps) + steps.start)[steps.start :]:
        loss = loss_of(model, share(batch, rank, size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if save:
        save_checkpoint(save, model, optimizer, step=steps.stop, facts={"plan": "old"})
    return losses, full_state_dict(model)


class Counting(Probe):
    """Notes every collective with its phase."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.found: list[tuple[str, str, int]] = []

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """What is inside counts for ``phase``."""
        self.phases.append(phase)
        yield
        self.phases.pop()

    def collective(self, label: str, nbytes: int) -> None:
        """Note it."""
        self.found.append((self.phases[-1] if self.phases else "", label, nbytes))


def collectives_of_a_step(mesh: DeviceMesh, job: Job, made: Plan) -> list[tuple[str, str, int]]:
    """Phase, label and bytes of each collective of a steady step."""
    rank, size = mesh.get_local_rank(), mesh.size()
    probe, guard = Counting(), Guard(mesh)
    model = apply(DLRM(job, device="meta"), made, mesh, probe=probe, guard=guard)
    (batch,) = batches(job, 1, job.batch.size * size)
    own = share(batch, rank, size)
    with torch.no_grad():
        for _ in range(STEADY - 1):
            model.tables(own[1])
    probe.found.clear()
    loss_of(model, own).backward()
    guard.settle()
    return probe.found


def compared(mesh: DeviceMesh, job: Job, made: Plan, steps: int) -> Comparison:
    """Predicted beside what a loop of so many steps measured."""
    rank, size = mesh.get_local_rank(), mesh.size()
    guard = Guard(mesh)
    model = apply(DLRM(job, device="meta"), made, mesh, guard=guard)
    optimizer = torch.optim.SGD(optimizer_parameters(model), job.train.learning_rate)
    with measure(made, model, optimizer) as measured:
        for batch in batches(job, steps, job.batch.size * size):
            loss = loss_of(model, tree_map(torch.clone, share(batch, rank, size)))
            loss.backward()
            guard.settle()
            optimizer.step()
            optimizer.zero_grad()
            measured.step(loss)
    return compare(made, measured.gather())


def _ask(model: nn.Module, batch: Any) -> None:
    dense, ids, _ = batch
    start_sparse_data_dist(model, dense, ids)


def meter_steps(mesh: DeviceMesh, job: Job, made: Plan) -> Any:
    """Exact events, the events of each metered step, and the actions of a steady step."""
    rank, size = mesh.get_local_rank(), mesh.size()
    meter, guard = Meter(rank), Guard(mesh)
    model = apply(DLRM(job, device="meta"), made, mesh, probe=meter, guard=guard)
    rate = job.train.learning_rate
    optimizer = make_optimizer(job.train.optimizer, optimizer_parameters(model), rate)
    total = batches(job, metering.STEPS + 1, job.batch.size * size)
    shares = [share(batch, rank, size) for batch in total]
    own = (tree_map(torch.clone, each) for each in shares)
    ask = _ask if made.modes.asked else None
    exact, by_step = steps_measured(meter, guard, model, optimizer, own, loss_of, ask)
    return exact, by_step, list(meter.actions)
