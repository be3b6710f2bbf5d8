"""Steps in which one gradient of one rank is not finite; tasks take their mesh first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from probe_tasks import said
from reference import batches, loss_of
from tasks import share
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.estimate.own_model import Task
from shardwright.job.job import Job
from shardwright.job.plan import Plan
from shardwright.models.dlrm import DLRM
from shardwright.runtime.apply import apply
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.guard import Guard
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters
from shardwright.runtime.units.dstorage import DStorage, units_in
from shardwright.train.sources import task_of

BAD_STEP = 3  # from 1 on; the steps before it are good ones
Loss = Callable[[nn.Module], torch.Tensor]


def spoil(module: nn.Module, value: float, *place: int) -> Callable[[], None]:
    """Let the gradient of what ``module`` returns have ``value`` at ``place``; ends when called."""

    def one(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[place] = value
        return gradient

    def on_output(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.register_hook(one)

    return module.register_forward_hook(on_output).remove


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """A copy of everything a step changes on this rank."""
    found = [DStorage(storage).byte_storage for storage in units_in(model)]
    for module in model.modules():
        if isinstance(module, ShardedTables):
            for store in module.every_store:
                found += [store.weight, *store.states.values()]
    for state in optimizer.state.values():
        found += [value for value in state.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in found]


def steps(
    model: nn.Module, job: Job, guard: Guard | None, losses: list[Loss], bad: Callable[[], Any]
) -> tuple[str, bool, bool]:
    """What the bad step said, whether it left everything as it was, and whether the good one after
    it changed something. ``bad`` spoils a gradient and gives what ends that, if anything."""
    parameters = optimizer_parameters(model, per_unit=True)
    optimizer = make_optimizer(job.train.optimizer, parameters, job.train.learning_rate)

    def step(loss: Loss) -> None:
        loss(model).backward()
        if guard is not None:
            guard.settle()
        optimizer.step()
        optimizer.zero_grad()

    for loss in losses[: BAD_STEP - 1]:
        step(loss)
    before = kept(model, optimizer)
    end = bad()
    text = said(lambda: step(losses[BAD_STEP - 1]))
    if end is not None:
        end()
    after = kept(model, optimizer)
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    optimizer.zero_grad()
    step(losses[BAD_STEP])
    return text, same, not all(map(torch.equal, before, kept(model, optimizer)))


def _clicks_loss(batch: Any, model: nn.Module) -> torch.Tensor:
    return loss_of(model, batch)


def _task_loss(task: Task, batch: Any, model: nn.Module) -> torch.Tensor:
    return task.loss(model, batch)


def clicks(
    mesh: DeviceMesh,
    job: Job,
    made: Plan,
    places: list[tuple[str, tuple[int, ...]]],
    value: float,
    guarded: bool,
    bad_ranks: tuple[int, ...],
) -> list[tuple[str, bool, bool]]:
    """One DLRM for each of ``places``: a module, and where its output's gradient is spoilt."""
    rank, size = mesh.get_local_rank(), mesh.size()
    found = []
    for path, place in places:
        comm = Comm(mesh)
        guard = Guard(comm) if guarded else None
        model = apply(DLRM(job, device="meta"), made, mesh, guard=guard)
        comm.step = BAD_STEP if guarded else None

        def bad(model: nn.Module = model, path: str = path, place: Any = place) -> Any:
            return spoil(model.get_submodule(path), value, *place) if rank in bad_ranks else None

        losses = [partial(_clicks_loss, share(batch, rank, size)) for batch in batches(job)]
        found.append(steps(model, job, guard, losses, bad))
        comm.step = None
    return found


def on_a_grid(mesh: DeviceMesh, bad: int) -> str:
    """What every one of two replicas of two shards says of a gradient that rank ``bad`` has."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    guard = Guard(grid)
    value = torch.full((3,), torch.nan if grid.get_rank() == bad else 1.0)
    guard.look([value], ["gradient of weight"], lambda: [value])
    return said(guard.settle)


def bad_in_two_places(mesh: DeviceMesh) -> str:
    """What is said of two gradients: the first is nan on rank 1, the second infinite on rank 2."""
    guard, rank = Guard(mesh), mesh.get_local_rank()
    first = torch.full((3,), torch.nan if rank == 1 else 1.0)
    second = torch.full((3,), torch.inf if rank == 2 else 1.0)
    parts = [first, second]
    guard.look(parts, ["gradient of first", "gradient of second"], lambda: parts)
    return said(guard.settle)


def language(mesh: DeviceMesh, job: Job, made: Plan, path: str) -> tuple[str, bool, bool]:
    """A transformer whose module ``path`` gets a bad gradient on the last rank."""
    rank, size = mesh.get_local_rank(), mesh.size()
    guard = Guard(Comm(mesh))
    task = task_of(job)
    model = apply(task.model(torch.device("cpu")), made, mesh, guard=guard)
    arrays = task.batches(rank, size)
    made_batches = [tuple(map(torch.from_numpy, next(arrays))) for _ in range(BAD_STEP + 1)]
    losses = [partial(_task_loss, task, batch) for batch in made_batches]

    def bad() -> Any:
        found = model.get_submodule(path)
        return spoil(found, float("nan"), 0, 0, 0) if rank == size - 1 else None

    return steps(model, job, guard, losses, bad)
