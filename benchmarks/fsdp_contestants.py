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
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from shardwright.job.job import Job, parse_job
from shardwright.models.transformer import Transformer

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 24, "dim": 64, "heads": 4, "vocab": 256, "sequence": 16, "batch": 2},
    "mid": {"layers": 8, "dim": 512, "heads": 8, "vocab": 512, "sequence": 64, "batch": 2},
}
_GPT2 = {"layers": 10, "dim": 320, "heads": 8, "sequence": 64, "batch": 4}
GPT2_SIZES: dict[str, dict[str, int]] = {
    f"gpt2 {vocab}{' tied' if tied else ''}": {**_GPT2, "vocab": vocab, "tied": tied}
    for vocab in (500, 16000)
    for tied in (0, 1)
}


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.c_fc, self.c_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, dim] to the same."""
        batch, length, dim = x.shape
        parts = self.c_attn(self.ln_1(x)).split(dim, 2)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.c_proj(seen.reshape(batch, length, dim))
        found: torch.Tensor = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return found


class GPT2(nn.Module):
    """A language model of GPT-2's shape, whose head may be its embedding."""

    def __init__(self, keys: dict[str, int]) -> None:
        super().__init__()
        dim, vocab = keys["dim"], keys["vocab"]
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(keys["sequence"], dim)
        self.layers = nn.ModuleList(Block(dim, keys["heads"]) for _ in range(keys["layers"]))
        self.ln_f, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        if keys["tied"]:
            nn.init.normal_(self.wte.weight, std=0.02)
            self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocab] of tokens [B, T]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(self.ln_f(x))
        return found


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
    tensor: int = 1  # so many ranks have the same samples
    replicas: int = 1  # on a mesh of so many times shards


def adamw(
    parameters: Any, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> torch.optim.Optimizer:
    """The same for everyone."""
    return make(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **options)


def _fused(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model.parameters(), fused=True)


def _flat(model: nn.Module, *, per_unit: bool = True) -> torch.optim.Optimizer:
    return adamw(sw.optimizer_parameters(model, per_unit=per_unit), fused=True)


class _Both(torch.optim.Optimizer):
    """Muon for the matrices of the layers, AdamW for the rest."""

    def __init__(self, model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> None:
        named = dict(model.named_parameters())
        matrices = [p for n, p in named.items() if "layers." in n and p.ndim == 2]
        others = [p for n, p in named.items() if "layers." not in n or p.ndim != 2]
        self._both = make(matrices, lr=0.02), adamw(others, fused=True)
        super().__init__([*matrices, *others], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self._both:
            optimizer.step()


def _fsdp2(
    model: Any,
    mesh: DeviceMesh,
    *,
    reshard: bool = True,
    merged: int = 1,
    offloaded: bool = False,
) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=False) if offloaded else OffloadPolicy()
    options: Any = {"mesh": mesh, "reshard_after_forward": reshard, "offload_policy": policy}
    layers = list(model.layers)
    for first in range(0, len(layers), merged):
        fully_shard(layers[first : first + merged], **options)
    fully_shard(model, **options)
    return model  # type: ignore[no-any-return]


def _ours(model: Any, mesh: DeviceMesh, *, merged: int = 1, **options: Any) -> nn.Module:
    layers = list(model.layers)
    for first in range(0, len(layers), merged):
        sw.fully_shard_flat(layers[first : first + merged], mesh, **options)
    sw.fully_shard_flat(model, mesh, **options)
    return model  # type: ignore[no-any-return]


def _ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _redundancy(model: nn.Module) -> torch.optim.Optimizer:
    """Torch's ZeRO-1: each rank updates parameters of its own and broadcasts them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns where it is imported

    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)


def _defaults(shard: Callable[..., Any], model: Any, mesh: DeviceMesh) -> nn.Module:
    """What a first user writes: no option but the mesh."""
    for layer in model.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return model  # type: ignore[no-any-return]


def _torchs(module: nn.Module, *, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh)


def _flat_strategy(module: nn.Module, *, mesh: DeviceMesh) -> None:
    sw.fully_shard_flat(module, mesh, shard_strategy="flat")


def flat_case(strategy: str = "flat", **options: Any) -> Contestant:
    options.setdefault("prefetch", 0)
    return Contestant(functools.partial(_ours, shard_strategy=strategy, **options), _flat)


def eight_bits_case(**options: Any) -> Contestant:
    """AdamW with averages in 8 bits."""
    wrap = functools.partial(_ours, shard_strategy="flat", prefetch=0, block_size=256, **options)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return adamw(sw.optimizer_parameters(model), make=sw.AdamW8bit)

    return Contestant(wrap, make)


def buckets_case(**options: Any) -> Contestant:
    """The whole model in four buckets, whatever its modules are."""

    def wrap(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        quarter = sum(p.numel() for p in model.parameters()) // 4
        sw.fully_shard_flat(model, mesh, shard_strategy="flat", bucket_size=quarter, **options)
        return model

    return Contestant(wrap, _flat)


def replicas_case(**options: Any) -> Contestant:
    """Two replicas of shards; ``fsdp2`` where torch's own runtime makes them."""

    def wrap(model: Any, mesh: DeviceMesh) -> nn.Module:
        grid = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("replicate", "shard"))
        if options.get("fsdp2"):
            return _fsdp2(model, grid)
        return _ours(model, grid, shard_strategy="flat", prefetch=0, **options)

    return Contestant(wrap, _fused if options.get("fsdp2") else _flat, replicas=2)


def muon_case(strategy: str, make: Callable[..., torch.optim.Optimizer] = sw.Muon) -> Contestant:
    wrap = functools.partial(_ours, shard_strategy=strategy, prefetch=0)
    return Contestant(wrap, functools.partial(_Both, make=make))


def tensor_case(shard: Callable[..., nn.Module]) -> Contestant:
    """The MLPs are cut over pairs of ranks, and everything by ``shard`` over the others."""

    def wrap(model: Any, mesh: DeviceMesh) -> nn.Module:
        grid = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("shard", "tensor"))
        for layer in model.layers:
            plan = {"c_fc": ColwiseParallel(), "c_out": RowwiseParallel()}
            parallelize_module(layer, grid["tensor"], plan)
        return shard(model, grid["shard"])

    return Contestant(wrap, lambda model: adamw(model.parameters()), tensor=2)


def contestants() -> dict[str, Contestant]:
    """By name; "planned" is added where there is a plan."""
    return {
        "single": Contestant(lambda model, mesh: model, _fused, alone=True),
        "fsdp2": Contestant(_fsdp2, _fused),
        "fsdp2 kept": Contestant(functools.partial(_fsdp2, reshard=False), _fused),
        "fsdp2 offload": Contestant(functools.partial(_fsdp2, offloaded=True), _fused),
        "flat offload": flat_case(cpu_offload=True),
        "zero 2 offload": flat_case(zero=2, cpu_offload=True),
        "fsdp2 merged 4": Contestant(functools.partial(_fsdp2, merged=4), _fused),
        "fsdp2 defaults": Contestant(functools.partial(_defaults, _torchs), _fused),
        "per_param defaults": Contestant(functools.partial(_defaults, sw.fully_shard_flat), _fused),
        "flat defaults": Contestant(functools.partial(_defaults, _flat_strategy), _flat),
        "flat": flat_case(),
        "per_param": flat_case("per_param"),
        "param_boundary": flat_case("param_boundary"),
        "flat prefetch": flat_case(prefetch=1),
        "ddp": Contestant(_ddp, _fused),
        "ddp, zero redundancy": Contestant(_ddp, _redundancy),
        "replicated": flat_case("per_param", placements=(sw.Replicate(),)),
        "zero 1": flat_case(zero=1),
        "zero 2": flat_case(zero=2),
        "fsdp2 hsdp": replicas_case(fsdp2=True),
        "hsdp": replicas_case(),
        "hsdp, zero 2": replicas_case(zero=2),
        "hfsdp": replicas_case(zero=(2, 3)),
        "zero 2 prefetch": flat_case(zero=2, prefetch=1),
        "zero 2 merged 4": flat_case(zero=2, merged=4),
        "zero 1 buckets": buckets_case(zero=1),
        "zero 2 buckets": buckets_case(zero=2),
        "zero 2 buckets prefetch": buckets_case(zero=2, prefetch=1),
        "flat kept": flat_case(reshard_after_forward=False),
        "fsdp2 muon": Contestant(_fsdp2, functools.partial(_Both, make=torch.optim.Muon)),
        "flat torch's muon": muon_case("flat", torch.optim.Muon),
        "flat muon": muon_case("flat"),
        "owned muon": muon_case("param_boundary"),
        "flat 8 bits": eight_bits_case(),
        "flat merged 4, 8 bits": eight_bits_case(merged=4),
        "fsdp2 tensor": tensor_case(_fsdp2),
        "flat tensor": tensor_case(functools.partial(_ours, shard_strategy="flat", prefetch=0)),
        "per_param tensor": tensor_case(functools.partial(_ours, prefetch=0)),
        "flat tensor kept": tensor_case(
            functools.partial(_ours, shard_strategy="flat", reshard_after_forward=False)
        ),
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
    if size in GPT2_SIZES:
        torch.manual_seed(0)
        return GPT2(GPT2_SIZES[size])
    return Transformer(job_of(size, 1))


def batch_of(size: str, step: int, rank: int, world_size: int) -> tuple[torch.Tensor, ...]:
    """Tokens and targets [B, T] of one rank."""
    keys = SIZES.get(size) or GPT2_SIZES[size]
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (keys["batch"] * world_size, keys["sequence"] + 1)
    tokens = torch.randint(keys["vocab"], shape, generator=generator)
    mine = tokens[rank * keys["batch"] : (rank + 1) * keys["batch"]]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
