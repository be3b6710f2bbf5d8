"""Public architectures trained on ranks under every strategy, beside one process."""

from __future__ import annotations

from typing import Any

import torch
from public_models import MODELS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from worlds import apart, whole

import shardwright as sw
from shardwright.core.placement import Owned, Placement

STEPS = 3
WAYS = ("flat", "per_param", "param_boundary", "owned", "flat tensors", "one unit")


def trained_apart(
    mesh: DeviceMesh, name: str, ways: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """What differs from one process by more than 1e-9 after three clipped steps of AdamW with
    decay groups, and by how much: weights, buffers, losses, norms; per way."""
    true = _alone(mesh, name)
    found = {way: _sharded(mesh, name, way) for way in ways}
    return {
        way: {key: d for key in true if not (d := apart(got.get(key), true[key])) <= 1e-9}
        for way, got in found.items()
    }


def _built(name: str) -> nn.Module:
    torch.manual_seed(7)
    model: nn.Module = MODELS[name]().double()
    return model


def _batch(name: str, rank: int, step: int) -> dict[str, Any]:
    found: dict[str, Any] = MODELS[name].batch(torch.Generator().manual_seed(31 * step + rank))
    return found


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


def _optimizer(model: nn.Module, flat: bool) -> torch.optim.Optimizer:
    """AdamW without decay for what has one dimension."""
    decays = {name: p.ndim > 1 for name, p in model.named_parameters() if p.requires_grad}
    groups: Any = [
        {"params": [n for n, yes in decays.items() if yes], "weight_decay": 0.1},
        {"params": [n for n, yes in decays.items() if not yes], "weight_decay": 0.0},
    ]
    if flat:
        groups = sw.optimizer_parameters(model, groups)
    else:
        named = dict(model.named_parameters())
        groups = [{**group, "params": [named[n] for n in group["params"]]} for group in groups]
    return torch.optim.AdamW(groups, lr=0.01, foreach=flat)


def _alone(mesh: DeviceMesh, name: str) -> dict[str, Any]:
    """One process with the batches of all ranks; each rank has buffers of its own."""
    model, size = _built(name), mesh.size()
    buffers = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(size)]
    optimizer = _optimizer(model, flat=False)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        for rank in range(size):
            for key, buffer in model.named_buffers():
                buffer.copy_(buffers[rank][key])
            loss = _loss(model(**_batch(name, rank, step)))
            (loss / size).backward()
            buffers[rank] = {n: b.clone() for n, b in model.named_buffers()}
            if rank == mesh.get_local_rank():
                found[f"loss {step}"] = loss.item()
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
    found.update({key: p.detach() for key, p in model.named_parameters()})
    return {**found, **buffers[mesh.get_local_rank()]}


def _sharded(mesh: DeviceMesh, name: str, way: str) -> dict[str, Any]:
    model = _built(name)
    options: dict[str, Any] = {"shard_strategy": way if way.startswith("p") else "flat"}
    if way == "owned":
        options = {"shard_placement_fn": lambda fqn, _: _owner(fqn, mesh.size())}
    units = [m for m in model.modules() if isinstance(m, MODELS[name].units)]
    for module in reversed(units) if way != "one unit" else ():
        sw.fully_shard_flat(module, mesh, **options)
    sw.fully_shard_flat(model, mesh, **options)
    optimizer = _optimizer(model, flat=way in ("flat tensors", "one unit"))
    found: dict[str, Any] = {}
    for step in range(STEPS):
        loss = _loss(model(**_batch(name, mesh.get_local_rank(), step)))
        loss.backward()
        found[f"loss {step}"] = loss.item()
        found[f"norm {step}"] = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item()
        optimizer.step()
        optimizer.zero_grad()
    found.update({key: whole(p) for key, p in model.named_parameters()})
    return {**found, **dict(model.named_buffers())}


def _owner(fqn: str, size: int) -> Placement:
    return Owned(len(fqn) % size)
