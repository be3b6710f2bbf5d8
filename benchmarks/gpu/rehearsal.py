"""A configuration's step on the device, its three parts apart."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from gpu.configurations import PLAN, Configuration
from gpu.predict import Prediction
from gpu.rows import Setting, fake_group, group_of_one
from shardwright.estimate.rehearsal import Rehearsed, optimizer_for, rehearsed

STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
}
OF_WORDS = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())


@dataclass(slots=True)
class Run:
    """Parts of a step, in the order in which they have to be called."""

    rehearsed: Rehearsed
    optimizer: torch.optim.Optimizer
    loss: torch.Tensor | None = None

    def forward(self) -> None:
        """To the loss."""
        self.loss = self.rehearsed.loss()

    def backward(self) -> None:
        """To the gradients, which are reduced."""
        assert self.loss is not None
        self.loss.backward()
        self.loss = None

    def update(self) -> None:
        """The optimizer's step; gradients are gone after it."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """All three."""
        self.forward()
        self.backward()
        self.update()


@contextmanager
def running(setting: Setting, configuration: Configuration, known: Prediction) -> Iterator[Run]:
    """The configuration made and sharded; after it nothing of it is left on the device."""
    job, ranks = configuration.job(setting), configuration.ranks
    clear(setting)
    torch.manual_seed(0)
    with ExitStack() as inside:
        inside.enter_context(group_of_one(setting) if ranks == 1 else fake_group(ranks))
        if configuration.memory.get("runtime") == "ddp":
            mesh, data = None, None
        else:
            mesh, data = _meshes(setting, configuration)

        def cut(model: nn.Module) -> None:
            if configuration.tensor > 1:
                assert mesh is not None
                plan = {name: STYLES[style] for name, style in PLAN.items()}
                parallelize_module(model, mesh["tensor"], {**plan, "words": OF_WORDS})
            if configuration.compiled:
                for block in model.get_submodule("layers").values():
                    block.compile()

        made = rehearsed(job, setting.device, data, units=known.units if known else (), before=cut)
        found = inside.enter_context(made)
        inside.enter_context(found.treatment.around())
        clear(setting)  # the whole model was there, of which a rank has a part
        yield Run(found, optimizer_for(job, found.model))
        found.model.zero_grad(set_to_none=True)
    clear(setting)


def _meshes(setting: Setting, configuration: Configuration) -> tuple[DeviceMesh, DeviceMesh]:
    """All ranks, and those that share data."""
    tensor, replicas = configuration.tensor, configuration.replicas
    shards = configuration.ranks // tensor // replicas
    sizes, names = (shards,), ("shard",)
    if replicas > 1:
        sizes, names = (replicas, shards), ("replicate", "shard")
    if tensor > 1:
        sizes, names = (*sizes, tensor), (*names, "tensor")
    mesh = init_device_mesh(setting.device, sizes, mesh_dim_names=names)
    return mesh, mesh[names[:-1]] if tensor > 1 else mesh


def clear(setting: Setting) -> None:
    """Leave nothing on the device that no tensor holds: neither caches nor workspaces."""
    if setting.device == "cuda":
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
