"""What the pool's workers do; each takes its mesh first."""

from __future__ import annotations

from typing import Any

import torch
from reference import batches, loss_of
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.job import Job
from shardwright.core.plan import Plan
from shardwright.lab.recordings import plan
from shardwright.models.dlrm import DLRM
from shardwright.runtime.apply import apply
from shardwright.runtime.comm import Comm
from shardwright.runtime.guard import Guard
from shardwright.runtime.meter import Meter, exact_events
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters
from shardwright.runtime.state import full_state_dict


def share(batch: Any, rank: int, world_size: int) -> Any:
    """One rank's equal part of a global batch."""
    size = len(batch[0]) // world_size
    return tuple(tensor[rank * size : (rank + 1) * size] for tensor in batch)


def train_sharded(mesh: DeviceMesh, job: Job, meta: bool) -> Any:
    """Losses (mean over ranks' parts) and whole final weights."""
    made = plan(job)
    rank, size = mesh.get_local_rank(), mesh.size()
    model = apply(DLRM(job, device="meta" if meta else None), made, mesh)
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


def meter_steps(mesh: DeviceMesh, job: Job, made: Plan) -> Any:
    """Exact events, the events of each metered step, and the actions of a steady step.

    Peaks are kept apart by step: gloo's threads may hold a buffer for a moment after the wait, so
    on a busy machine a step can show more than it needs.
    """
    rank, size = mesh.get_local_rank(), mesh.size()
    meter, guard = Meter(rank), Guard(Comm(mesh))
    model = apply(DLRM(job, device="meta"), made, mesh, probe=meter, guard=guard)
    rate = job.train.learning_rate
    optimizer = make_optimizer(
        job.train.optimizer, optimizer_parameters(model, per_unit=True), rate
    )
    total = job.batch.size * size
    exact: Any = []
    by_step = []
    for step, batch in enumerate(batches(job, 5, total), start=1):
        inputs = tuple(tensor.clone() for tensor in share(batch, rank, size))
        around = meter.metered_step(optimizer, model) if step > 2 else meter.timed_step()
        with around:
            with meter.phase("load"):
                inputs = tuple(tensor.clone() for tensor in inputs)
                for tensor in inputs:
                    meter.holds(tensor, "input")
            with meter.phase("forward"):
                loss = loss_of(model, inputs)
            with meter.phase("backward"):
                loss.backward()
            exact = exact_events(rank, model, optimizer)
            with meter.phase("step"):
                guard.settle()
                optimizer.step()
                optimizer.zero_grad()
            del loss
        if step > 2:
            by_step.append(meter.events())
            meter.forget_peaks()
    return exact, by_step, list(meter.actions)
