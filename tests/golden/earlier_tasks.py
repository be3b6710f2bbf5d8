"""Two ranks that train a little, save, and train on: what files of earlier versions are held
against. Public names alone, and no random numbers, so that any version does the same.

``continued`` gives each rank's losses after a checkpoint was written, ``resumed`` those after it
was read. ``plan`` is that of the tables, read by one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw

SAVED, STEPS = 2, 5
RATE = 0.05
Made = tuple[nn.Module, list[torch.optim.Optimizer], Callable[[int], Tensor]]


def filled(module: nn.Module) -> nn.Module:
    """Every parameter with numbers of its own."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters(), 1):
            values = torch.arange(parameter.numel(), dtype=torch.float32) + number
            parameter.copy_(torch.frac(values * 0.6180339).sub(0.5).mul(0.5).view_as(parameter))
    return module


def numbers(step: int, rank: int, *sizes: int) -> Tensor:
    """Of a step and rank, between -0.5 and 0.5."""
    values = torch.arange(int(torch.Size(sizes).numel()), dtype=torch.float32)
    return torch.frac(values * 0.7548776 + 0.37 * step + 0.11 * rank).sub(0.5).view(sizes)


def dense(mesh: DeviceMesh, **how: Any) -> Made:
    """Three layers of uneven sizes in two units, with AdamW."""
    model = filled(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 3)))
    sw.fully_shard_flat(model[0], mesh, **how)
    sw.fully_shard_flat(model, mesh, **how)
    optimizer = torch.optim.AdamW(sw.optimizer_parameters(model), lr=RATE)
    rank = mesh.get_local_rank()
    return model, [optimizer], lambda step: model(numbers(step, rank, 4, 6)).square().mean()


class Towers(nn.Module):
    """Ids of users [B], of items [B, 3] and of days [B] -> [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(40, 4)
        self.items = nn.EmbeddingBag(30, 4, mode="mean")
        self.days = nn.Embedding(7, 4)
        self.top = nn.Linear(4, 4)

    def forward(self, users: Tensor, items: Tensor, days: Tensor) -> Tensor:
        """The sum of what the three say, through one layer."""
        return self.top(self.users(users) + self.items(items) + self.days(days))


def routed(mesh: DeviceMesh, plan: sw.Plan) -> Made:
    """Tables with row-wise Adagrad and Adam by the plan that is kept, beside a unit with AdamW."""
    model = sw.shard_embeddings(filled(Towers()), plan, mesh, learning_rate=RATE)
    sw.fully_shard_flat(model.top, mesh, shard_strategy="flat")
    optimizer = torch.optim.AdamW(sw.optimizer_parameters(model.top), lr=RATE)
    rank = mesh.get_local_rank()

    def loss(step: int) -> Tensor:
        ids = torch.arange(6) * 5 + 3 * step + rank
        found = model(ids % 40, torch.stack([ids % 30, ids % 11, ids % 2], 1), ids % 7)
        return (found - numbers(step, rank, 6, 4)).square().mean()

    return model, [optimizer], loss


CASES: dict[str, Callable[[DeviceMesh, sw.Plan], Made]] = {
    "flat": lambda mesh, _: dense(mesh, shard_strategy="flat"),
    "per_param": lambda mesh, _: dense(mesh, shard_strategy="per_param"),
    "param_boundary": lambda mesh, _: dense(mesh, shard_strategy="param_boundary"),
    "zero2": lambda mesh, _: dense(mesh, shard_strategy="flat", zero=2),
    "routed": routed,
}


def _trained(made: Made, steps: range) -> list[str]:
    """A rank's losses, to the last bit."""
    _, optimizers, loss = made
    losses = []
    for step in steps:
        value = loss(step)
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(value.item().hex())
    return losses


def continued(mesh: DeviceMesh, case: str, folder: str, plan: sw.Plan) -> list[str]:
    """Losses after a checkpoint that is written into ``folder``."""
    made = CASES[case](mesh, plan)
    _trained(made, range(SAVED))
    sw.save_checkpoint(folder, made[0], made[1], step=SAVED, mesh=mesh)
    return _trained(made, range(SAVED, STEPS))


def resumed(mesh: DeviceMesh, case: str, folder: str, plan: sw.Plan) -> list[str]:
    """Losses after the checkpoint in ``folder``."""
    made = CASES[case](mesh, plan)
    step = sw.load_checkpoint(folder, made[0], made[1], mesh=mesh).step
    return _trained(made, range(step, STEPS))
