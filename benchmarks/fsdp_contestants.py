"""Ways to train the same model that ``fsdp.py`` holds beside each other.

A contestant wraps a model and makes its optimizer. All see the same batches, the same fused AdamW
and the same loss; ``layers`` of the model are units, or several of them together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.core.job import Job, parse_job
from shardwright.models.transformer import Transformer

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 24, "dim": 64, "heads": 4, "vocab": 256, "sequence": 16, "batch": 2},
    "mid": {"layers": 8, "dim": 512, "heads": 8, "vocab": 512, "sequence": 64, "batch": 2},
}


def job_of(size: str, world_size: int, cluster: dict[str, Any] | None = None) -> Job:
    """The job of one of ``SIZES``, trained with Adam."""
    keys = SIZES[size]
    model = {name: keys[name] for name in ("layers", "dim", "heads", "vocab")}
    return parse_job(
        {
            "model": {"kind": "transformer", **model},
            "cluster": {"world_size": world_size, **(cluster or {"preset": "local"})},
            "batch": {"size": keys["batch"], "sequence": keys["sequence"]},
            "data": {"kind": "text"},
            "train": {"optimizer": "adam", "learning_rate": 1e-3},
        }
    )


@dataclass(frozen=True)
class Contestant:
    """How a model is wrapped and what optimizes it."""

    wrap: Wrap
    optimizer: Optimizers
    alone: bool = False  # runs without communication, so on one rank only


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """The same for everyone."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **options)


def _fused(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model.parameters(), fused=True)


def _flat(model: nn.Module, *, per_unit: bool = True) -> torch.optim.Optimizer:
    return adamw(sw.optimizer_parameters(model, per_unit=per_unit), fused=True)


def _fsdp2(model: Any, mesh: DeviceMesh, *, reshard: bool = True, merged: int = 1) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    layers = list(model.layers)
    for first in range(0, len(layers), merged):
        fully_shard(layers[first : first + merged], mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model  # type: ignore[no-any-return]


def _ours(model: Any, mesh: DeviceMesh, *, merged: int = 1, **options: Any) -> nn.Module:
    layers = list(model.layers)
    for first in range(0, len(layers), merged):
        sw.fully_shard_flat(layers[first : first + merged], mesh, **options)
    sw.fully_shard_flat(model, mesh, **options)
    return model  # type: ignore[no-any-return]


def flat_case(strategy: str = "flat", **options: Any) -> Contestant:
    options.setdefault("prefetch", 0)
    return Contestant(functools.partial(_ours, shard_strategy=strategy, **options), _flat)


def contestants() -> dict[str, Contestant]:
    """By name; "planned" is added where there is a plan."""
    return {
        "single": Contestant(lambda model, mesh: model, _fused, alone=True),
        "fsdp2": Contestant(_fsdp2, _fused),
        "fsdp2 kept": Contestant(functools.partial(_fsdp2, reshard=False), _fused),
        "fsdp2 merged 4": Contestant(functools.partial(_fsdp2, merged=4), _fused),
        "flat": flat_case(),
        "per_param": flat_case("per_param"),
        "param_boundary": flat_case("param_boundary"),
        "flat prefetch": flat_case(prefetch=1),
        "flat kept": flat_case(reshard_after_forward=False),
        "flat merged 4": flat_case(merged=4),
        "flat merged 4 prefetch": flat_case(merged=4, prefetch=1),
    }


def planned(plan: sw.Plan) -> Contestant:
    """Exactly what a plan says."""

    def wrap(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return sw.apply(model, plan, mesh)

    return Contestant(wrap, _flat)


def model_of(size: str) -> nn.Module:
    """The same start on every rank and for every contestant."""
    return Transformer(job_of(size, 1))


def batch_of(size: str, step: int, rank: int, world_size: int) -> tuple[torch.Tensor, ...]:
    """Tokens and targets [B, T] of one rank."""
    keys = SIZES[size]
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (keys["batch"] * world_size, keys["sequence"] + 1)
    tokens = torch.randint(keys["vocab"], shape, generator=generator)
    mine = tokens[rank * keys["batch"] : (rank + 1) * keys["batch"]]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
