"""One model held in several ways: whole, by FSDP2, by ours; what all of them must agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from probe_tasks import MESHES
from torch import nn
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.core.placement import Owned, Placement

Found = dict[str, Any]


class World:
    """One way to hold a model: ``flat`` and the other strategies, ``owned``, ``hfsdp`` (rows, on
    two replicas of shards that share the states, too), ``offloaded`` (flat, shards in host memory),
    ``fsdp2``, or ``alone``: whole, with the inputs of all ranks."""

    def __init__(self, mesh: DeviceMesh, way: str) -> None:
        self.mesh, self.way = mesh, way
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.ours = way not in ("fsdp2", "alone")

    def inputs(self, step: int = 0, width: int = 8) -> torch.Tensor:
        """[3, width] of this rank, or [3 x ranks, width] of all."""
        every = [_draw(rank, step, width) for rank in range(self.size)]
        return torch.cat(every) if self.way == "alone" else every[self.rank]

    def unit(self, module: Any, half: bool = False) -> None:
        """Shard one module, or several as one unit."""
        options: dict[str, Any] = {}
        if self.ours:
            if self.way == "owned":
                options["shard_placement_fn"] = self._owner
            elif self.way == "hfsdp":
                options["zero"] = (2, 3)
            elif self.way == "offloaded":
                options |= {"shard_strategy": "flat", "cpu_offload": True}
            else:
                options["shard_strategy"] = self.way
            if half:
                options["precision"] = sw.MixedPrecision(reduce_dtype=torch.float16)
            mesh = MESHES[2, self.size // 2] if self.way == "hfsdp" else self.mesh
            sw.fully_shard_flat(module, mesh, **options)
        elif self.way == "fsdp2":
            if half:
                options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float16)
            fully_shard(module, mesh=self.mesh, **options)

    def _owner(self, fqn: str, _: nn.Parameter) -> Placement:
        return Owned((len(fqn) // 2 + 1) % self.size)

    def shard(self, model: nn.Module, **options: Any) -> Any:
        """Every child with parameters, then the model."""
        for child in model.children():
            if any(True for _ in child.parameters()):
                self.unit(child, **options)
        self.unit(model, **options)
        return model

    def flat(self, model: nn.Module, groups: Any = None, **options: Any) -> Any:
        """``optimizer_parameters``, and where there is none what they stand for."""
        if self.ours:
            return sw.optimizer_parameters(model, groups, **options)
        if groups is None:
            return list(model.parameters())
        named = dict(model.named_parameters())
        return [{**g, "params": [named[name] for name in g["params"]]} for g in groups]


def _draw(rank: int, step: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, width, dtype=torch.float64, generator=generator)


def net(seed: int = 0) -> nn.Sequential:
    """8 to 4 numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def step(world: World, model: nn.Module, number: int = 0) -> None:
    """One backward of a mean."""
    model(world.inputs(number)).square().mean().backward()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor (collective)."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(model: nn.Module, prefix: str = "") -> Found:
    """Every whole parameter (collective)."""
    return {f"{prefix}{name}": whole(p) for name, p in model.named_parameters()}


def grads(model: nn.Module) -> Found:
    """Every whole gradient, or None (collective)."""
    named = model.named_parameters()
    return {f"grad {n}": None if p.grad is None else whole(p.grad) for n, p in named}


def train(world: World, model: nn.Module, optimizer: Any, steps: int = 3, first: int = 0) -> None:
    for number in range(first, first + steps):
        optimizer.zero_grad()
        step(world, model, number)
        optimizer.step()


def step_in_backward(
    model: nn.Module, make: Callable[[nn.Parameter], torch.optim.Optimizer]
) -> None:
    """Let every parameter be stepped by an optimizer of its own as soon as it has a gradient."""
    optimizers = {parameter: make(parameter) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)


def apart(found: Any, true: Any) -> float:
    """The largest difference."""
    if isinstance(true, torch.Tensor) and isinstance(found, torch.Tensor):
        if found.shape != true.shape:
            return torch.inf
        return (found - true).abs().max().item() if true.numel() else 0.0
    if isinstance(true, list):
        return max(map(apart, found, true), default=0.0)
    if isinstance(true, float):
        return abs(found - true)
    return 0.0 if type(found) is type(true) and found == true else torch.inf
