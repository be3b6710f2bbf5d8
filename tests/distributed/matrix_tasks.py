"""One state saved in three forms, with and without recomputation wrappers, and read by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW
from worlds import Found, World, train, weights

import shardwright as sw

FORMS = ("dcp", "torch", "ours")
SHARED = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=True,
    use_async_staging=False,
    use_non_blocking_copy=False,
)
REUSABLE = torch.__version__ >= "2.12"  # torch 2.11 empties a stager once it has staged


def _net(seed: int, wrapped: bool) -> nn.Sequential:
    """Odd sizes and a buffer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 5)).double()
    model.register_buffer("seen", torch.tensor([seed]))
    for index in (0, 2) if wrapped else ():
        model[index] = checkpoint_wrapper(model[index])
    return model


def _made(mesh: DeviceMesh, seed: int, strategy: str, wrapped: bool) -> tuple[World, Any, AdamW]:
    world = World(mesh, strategy)
    model = world.shard(_net(seed, wrapped))
    return world, model, AdamW(sw.optimizer_parameters(model), lr=0.1)


def _all(model: nn.Module, optimizer: AdamW) -> Found:
    """Every whole weight, buffer and state by its unsharded name (collective)."""
    found: Found = {**sw.full_state_dict(model)}
    for name, entry in sw.optimizer_state_dict(model, optimizer)["state"].items():
        for key, value in entry.items():
            whole = getattr(value, "full_tensor", None)
            found[f"{name} {key}"] = torch.as_tensor(whole() if whole else value).clone()
    return found


def save(mesh: DeviceMesh, folder: str, strategy: str, wrapped: bool) -> Found:
    """Train, save in every form, and say what was saved."""
    world, model, optimizer = _made(mesh, 1, strategy, wrapped)
    train(world, model, optimizer, 2)
    state = {"model": model.state_dict(), "optimizer": sw.optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/dcp", process_group=mesh.get_group())
    found = _all(model, optimizer)
    if not world.rank:
        torch.save(found, Path(folder) / "whole.pt")
    sw.save_checkpoint(f"{folder}/ours", model, optimizer, step=2)
    dist.barrier(mesh.get_group())
    return found


def load(mesh: DeviceMesh, folder: str, strategy: str, wrapped: bool, form: str) -> Found:
    """What a model of other values has after a load."""
    _, model, optimizer = _made(mesh, 2, strategy, wrapped)
    if form == "dcp":
        train(World(mesh, strategy), model, optimizer, 1)  # torch loads into a state that is there
        state = {
            "model": model.state_dict(),
            "optimizer": sw.optimizer_state_dict(model, optimizer),
        }
        try:
            dcp.load(state, checkpoint_id=f"{folder}/dcp", process_group=mesh.get_group())
        except CheckpointException as error:  # no Exception: it would end the worker
            raise AssertionError(str(error)) from None
        model.load_state_dict(state["model"])
        sw.load_optimizer_state_dict(model, optimizer, state["optimizer"])
    elif form == "torch":
        found = torch.load(Path(folder) / "whole.pt")
        model.load_state_dict({name: v for name, v in found.items() if " " not in name})
        return {**weights(model), "seen": model.seen}
    else:
        sw.load_checkpoint(f"{folder}/ours", model, optimizer)
    return _all(model, optimizer)


def save_asynchronously(mesh: DeviceMesh, folder: str, strategy: str) -> list[str]:
    """What torch saved asynchronously and is not what was there when it was asked to: with and
    without biases, weights and states, twice by one stager."""
    try:
        return _saved_otherwise(mesh, folder, strategy)
    except CheckpointException as error:  # no Exception: it would end the worker
        raise AssertionError(str(error)) from None


def _saved_otherwise(mesh: DeviceMesh, folder: str, strategy: str) -> list[str]:
    group, wrong = mesh.get_group(), []
    for bias in (True, False):
        torch.manual_seed(1)
        model = World(mesh, strategy).shard(nn.Sequential(nn.Linear(8, 7, bias), nn.Linear(7, 5)))
        optimizer = AdamW(sw.optimizer_parameters(model), lr=0.1)
        shared = DefaultStager(SHARED)
        again = shared if REUSABLE else DefaultStager(SHARED)
        for number, stager in enumerate((None, shared, again)):
            _step(model, optimizer, number)
            state = {
                "model": model.state_dict(),
                "optimizer": sw.optimizer_state_dict(model, optimizer),
            }
            then, place = _all(model, optimizer), f"{folder}/{bias}{number}"
            saving: Any = dcp.async_save(
                state, checkpoint_id=place, process_group=group, async_stager=stager
            )
            _clear(model, optimizer)  # which needs no group: torch is using it
            getattr(saving, "upload_completion", saving).result(timeout=60)
            dcp.load(state, checkpoint_id=place, process_group=group)
            model.load_state_dict(state["model"])
            sw.load_optimizer_state_dict(model, optimizer, state["optimizer"])
            found = _all(model, optimizer)
            wrong += [f"{bias} {number} {n}" for n in then if not torch.equal(found[n], then[n])]
    return wrong


def _step(model: nn.Module, optimizer: AdamW, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(3, 8)).square().mean().backward()
    optimizer.step()


def _clear(model: nn.Module, optimizer: AdamW) -> None:
    states = (v for state in optimizer.state.values() for v in state.values())
    with torch.no_grad():
        for tensor in (*model.parameters(), *states):
            tensor.zero_()
