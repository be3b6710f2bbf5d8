"""Our runtime behind the three functions that a side-by-side benchmark of FSDP runtimes calls.

``wrap(model, mesh)`` shards a model with ``model.layers``, every layer a unit and the rest another,
``make_optimizer(model)`` gives the fused optimizer over flat tensors, ``finish(model)`` is called
after a backward and has nothing to do: the runtime orders itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw


def _wrap(model: Any, mesh: DeviceMesh, layers_per_unit: int = 1, **options: Any) -> nn.Module:
    layers = list(model.layers)
    for first in range(0, len(layers), layers_per_unit):
        sw.fully_shard_flat(layers[first : first + layers_per_unit], mesh, **options)
    sw.fully_shard_flat(model, mesh, **options)
    return model  # type: ignore[no-any-return]


def wrap(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2's schedule: a gather each way and a reduce for every layer, one after the other."""
    return _wrap(model, mesh, shard_strategy="flat", prefetch=0)


def wrap_per_param(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The same with every parameter cut by rows, as FSDP2 does."""
    return _wrap(model, mesh, shard_strategy="per_param", prefetch=0)


def wrap_prefetch(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The same as ``wrap`` with the next unit on its way while one computes."""
    return _wrap(model, mesh, shard_strategy="flat", prefetch=1)


def wrap_kept(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Nothing is freed after the forward."""
    return _wrap(model, mesh, shard_strategy="flat", prefetch=0, reshard_after_forward=False)


def wrap_merged(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Four layers to a unit, prefetched."""
    return _wrap(model, mesh, 4, shard_strategy="flat", prefetch=1)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW over one flat tensor a unit, so that gradients come one by one."""
    parameters = sw.optimizer_parameters(model, per_unit=True)
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def finish(model: nn.Module) -> None:
    """Nothing is left to do after a backward."""
