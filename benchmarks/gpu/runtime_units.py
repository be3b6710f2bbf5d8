"""A small GPT under ``fully_shard_flat`` on one rank: in fp32 it is the plain module, in mixed
precision it stands beside FSDP2."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from fsdp_contestants import GPT2, adamw
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import shardwright as sw
from gpu.rows import Row, Setting, group_of_one, timed
from shardwright.models.transformer import next_token_loss

STEPS = 4  # of training, each with a batch of its own
Wrap = Callable[[Any, DeviceMesh], None]
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Size:
    """A GPT, and its batch."""

    layers: int
    dim: int
    heads: int
    vocab: int
    sequence: int
    batch: int

    def model(self, setting: Setting) -> GPT2:
        """The same weights for everyone, on the device."""
        torch.manual_seed(0)
        return GPT2({**vars(self), "tied": 0}).to(setting.device)

    def batches(self, setting: Setting, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens and targets [B, T] of so many steps, on the device."""
        generator = torch.Generator().manual_seed(1)
        shape = (count, self.batch, self.sequence + 1)
        tokens = torch.randint(self.vocab, shape, generator=generator).to(setting.device)
        return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def size_of(setting: Setting) -> Size:
    """Of rows that compare numbers."""
    return Size(2, 64, 4, 128, 16, 2) if setting.small else Size(4, 512, 8, 4096, 256, 8)


def large(setting: Setting) -> Size:
    """Of rows that measure time and memory."""
    return Size(3, 64, 4, 128, 16, 2) if setting.small else Size(8, 1024, 16, 8192, 512, 8)


@dataclass(frozen=True)
class Trained:
    """What some steps left: losses, the last gradients, the weights, by name and on the host."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    def beside(self, other: Trained) -> dict[str, float]:
        """The greatest differences from ``other``: of losses over the loss, of gradients over the
        largest element of their tensor, of weights as they are, where a step is 0.001."""
        pairs = zip(self.losses, other.losses, strict=True)
        return {
            "loss_apart": max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs),
            "gradient_apart": apart(self.gradients, other.gradients),
            "weight_apart": max(
                (self.weights[name] - value).abs().max().item()
                for name, value in other.weights.items()
            ),
        }


def apart(found: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> float:
    """The greatest difference of any element over the largest one of its tensor."""
    assert found.keys() == true.keys(), "the same names"
    parts = ((found[name] - value, value) for name, value in true.items())
    return max((d.abs().max() / v.abs().max().clamp(min=1e-20)).item() for d, v in parts)


def flat_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Over flat tensors."""
    return adamw(sw.optimizer_parameters(model), fused=True)


def usual_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Over the model's own parameters."""
    return adamw(model.parameters(), fused=True)


def step(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Forward and backward; the loss."""
    tokens, targets = batch
    loss = next_token_loss(model(tokens).float(), targets)
    loss.backward()
    return loss


def trained(setting: Setting, model: nn.Module, make: Optimizers) -> Trained:
    """Some steps, of which the last one's gradients stay."""
    optimizer, losses = make(model), []
    for batch in size_of(setting).batches(setting, STEPS):
        optimizer.zero_grad()
        losses.append(step(model, batch).detach())
        optimizer.step()
    named = dict(model.named_parameters())
    gradients = {name: whole(p.grad) for name, p in named.items() if p.grad is not None}
    weights = {name: whole(p) for name, p in named.items()}
    return Trained([loss.item() for loss in losses], gradients, weights)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of whichever kind, as fp32 on the host."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().cpu().clone()


@cache
def plain(setting: Setting) -> Trained:
    """The module itself, in fp32."""
    return trained(setting, size_of(setting).model(setting), usual_adamw)


def ours(model: Any, mesh: DeviceMesh, **options: Any) -> None:
    """A unit for each layer and one for the rest."""
    for layer in model.layers:
        sw.fully_shard_flat(layer, mesh, **options)
    sw.fully_shard_flat(model, mesh, **options)


def fsdp2(model: Any, mesh: DeviceMesh, **options: Any) -> None:
    """The same by torch."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def half(**options: Any) -> Wrap:
    """Ours, which computes in bf16 and sums gradients in fp32."""
    precision = sw.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return partial(ours, precision=precision, **options)


def half_fsdp2(model: Any, mesh: DeviceMesh, **options: Any) -> None:
    """FSDP2 with the same precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp2(model, mesh, mp_policy=policy, **options)


def compared(setting: Setting, wrap: Wrap, make: Optimizers, others: Iterable[str]) -> Any:
    """Trained on one rank beside ``others``."""
    with group_of_one(setting):
        model = size_of(setting).model(setting)
        wrap(model, init_device_mesh(setting.device, (1,)))
        found = trained(setting, model, make)
    figures: dict[str, Any] = {"losses": found.losses}
    for name in others:
        figures[f"beside {name}"] = found.beside(REFERENCES[name](setting))
    return figures


@cache
def _of_fsdp2(setting: Setting) -> Trained:
    with group_of_one(setting):
        model = size_of(setting).model(setting)
        half_fsdp2(model, init_device_mesh(setting.device, (1,)))
        return trained(setting, model, usual_adamw)


REFERENCES: dict[str, Callable[[Setting], Trained]] = {"plain": plain, "fsdp2 bf16": _of_fsdp2}


def noise(setting: Setting) -> dict[str, Any]:
    """The plain module a second time: what differences of other rows are held against."""
    again = trained(setting, size_of(setting).model(setting), usual_adamw)
    return {"losses": again.losses, "beside plain": again.beside(plain(setting))}


def clipped(setting: Setting) -> dict[str, Any]:
    """Norms of gradients, and what clipping leaves of them."""
    batch = size_of(setting).batches(setting, 1)[0]
    true: Any = size_of(setting).model(setting)
    step(true, batch)
    wanted = nn.utils.clip_grad_norm_(true.parameters(), 0.1)
    gradients = {name: whole(p.grad) for name, p in true.named_parameters()}
    figures: dict[str, Any] = {"norm": wanted.item()}
    for strategy in ("flat", "per_param"):
        with group_of_one(setting):
            model: Any = size_of(setting).model(setting)
            ours(model, init_device_mesh(setting.device, (1,)), shard_strategy=strategy)
            step(model, batch)
            found = sw.clip_grad_norm_(model, 0.1)
            mine = {name: whole(p.grad) for name, p in model.named_parameters()}
        figures[strategy] = {
            "norm_apart": abs(found.item() - wanted.item()) / max(wanted.item(), 1e-30),
            "gradient_apart": apart(mine, gradients),
        }
    return figures


def taken(
    setting: Setting, wrap: Wrap | None, make: Optimizers, size: Size | None = None
) -> dict[str, Any]:
    """Seconds of a forward and backward, and of an update; the most memory of both passes, of which
    ``resting`` is there before them, and ``begun`` before anything was made."""
    with group_of_one(setting):
        size, begun = size or large(setting), _allocated(setting)
        model = size.model(setting)
        if wrap is not None:
            wrap(model, init_device_mesh(setting.device, (1,)))
        optimizer = make(model)
        batch = size.batches(setting, 1)[0]

        def pass_through() -> None:
            optimizer.zero_grad()
            step(model, batch)

        pass_through()
        optimizer.step()
        optimizer.zero_grad()
        figures = {**begun, **memory(setting, pass_through), "parameters": _elements(model)}
        figures["passes"] = timed(setting, pass_through)
        figures["update"] = timed(setting, optimizer.step)
    return figures


def _allocated(setting: Setting) -> dict[str, int]:
    gc.collect()  # what earlier rows left in cycles
    return {"begun": torch.cuda.memory_allocated()} if setting.device == "cuda" else {}


def memory(setting: Setting, run: Callable[[], Any]) -> dict[str, Any]:
    """Bytes of the device before ``run`` and at most inside; nothing of a CPU."""
    if setting.device != "cuda":
        run()
        return {}
    torch.cuda.synchronize()
    resting = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return {"resting": resting, "peak": torch.cuda.max_memory_allocated()}


def _elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def rows(setting: Setting) -> list[Row]:
    """Equal numbers first."""
    found = [Row("plain again", partial(noise, setting))]
    for strategy in ("flat", "per_param", "param_boundary"):
        for zero in (3, 2, 1):
            wrap = partial(ours, shard_strategy=strategy, zero=zero)
            run = partial(compared, setting, wrap, flat_adamw, ["plain"])
            found.append(Row(f"fp32 {strategy} zero {zero}", run, 3))
    for name, options in (
        ("replicated", {"placements": (sw.Replicate(),)}),
        ("kept", {"shard_strategy": "flat", "reshard_after_forward": False}),
        ("prefetch 0", {"shard_strategy": "flat", "prefetch": 0}),
        ("buckets", {"shard_strategy": "flat", "zero": 2, "prefetch": 1}),
        ("sharded parameters", {}),
    ):
        wrap, make = partial(ours, **options), flat_adamw
        if name == "buckets":
            wrap = partial(bucketed, **options)
        if name == "sharded parameters":
            make = usual_adamw
        run = partial(compared, setting, wrap, make, ["plain"])
        found.append(Row(f"fp32 {name}", run, 3))
    found.append(Row("clipping", partial(clipped, setting), 3))
    beside = ["plain", "fsdp2 bf16"]
    for strategy in ("flat", "per_param"):
        for zero in (3, 2, 1):
            wrap = half(shard_strategy=strategy, zero=zero)
            run = partial(compared, setting, wrap, flat_adamw, beside)
            found.append(Row(f"bf16 {strategy} zero {zero}", run, 3))
    wraps: dict[str, tuple[Wrap | None, Optimizers]] = {
        "plain fp32": (None, usual_adamw),
        "fsdp2 bf16": (half_fsdp2, usual_adamw),
        "flat bf16": (half(shard_strategy="flat"), flat_adamw),
        "per_param bf16": (half(), flat_adamw),
        "flat bf16 zero 2": (half(shard_strategy="flat", zero=2), flat_adamw),
        "fsdp2 fp32": (fsdp2, usual_adamw),
        "flat fp32": (partial(ours, shard_strategy="flat"), flat_adamw),
        "flat fp32 zero 2": (partial(ours, shard_strategy="flat", zero=2), flat_adamw),
    }
    for name, (each, make) in wraps.items():
        found.append(Row(f"step {name}", partial(taken, setting, each, make), 4))
    return found


def bucketed(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """The whole model in four buckets, whatever its modules are."""
    sw.fully_shard_flat(model, mesh, bucket_size=_elements(model) // 4, **options)
