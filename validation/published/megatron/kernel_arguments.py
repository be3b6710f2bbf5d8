"""Which kernels a Megatron-LM run uses, as far as memory depends on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from published.megatron.description import Attention, Device, Kernels, Shape
from published.megatron.flags import Flags

CUBLAS_WORKSPACE_HOPPER = 32 * 2**20
CUBLAS_WORKSPACE = (2 * 4096 + 8 * 16) * 2**10
"""Bytes of torch's cuBLAS workspace where no environment variable sets them
(``aten/src/ATen/cuda/CublasHandlePool.cpp``)."""


def read_kernels(
    flags: Flags,
    shape: Shape,
    device: Device,
    environment: Mapping[str, Any],
    old_engine: bool,
    assumed: list[str],
) -> Kernels:
    """Kernels that the flags, the device and the age of Transformer Engine lead to."""
    engine = flags.text("transformer-impl", "transformer_engine") != "local"
    scaled = flags.on("apply-query-key-layer-scaling")
    return Kernels(
        engine=engine,
        attention=_attention(flags, device, environment, engine, old_engine, assumed),
        fused_softmax=not flags.on("no-masked-softmax-fusion"),
        softmax_fp32=flags.on("attention-softmax-in-fp32") or scaled,
        fused_rope=not flags.on("no-rope-fusion"),
        fused_activation=_fused_activation(flags, shape),
        fused_loss=_fused_loss(flags),
        fused_weight_gradient=not flags.on("no-gradient-accumulation-fusion"),
        fused_permute=flags.on("moe-permute-fusion"),
        attention_dropout=flags.number("attention-dropout", 0.1),
        hidden_dropout=flags.number("hidden-dropout", 0.1),
        deferred_embedding=flags.on("defer-embedding-wgrad-compute"),
        overlap_experts=flags.on("overlap-moe-expert-parallel-comm") or flags.on("combined-1f1b"),
        attention_mask=not flags.on("no-create-attention-mask-in-dataloader"),
        deterministic=_deterministic(flags, environment),
        user_buffers=flags.on("tp-comm-overlap"),
    )


def _deterministic(flags: Flags, environment: Mapping[str, Any]) -> bool:
    return flags.on("deterministic-mode") or (
        str(environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "")) == "0"
    )


def _fused_loss(flags: Flags) -> str:
    return flags.text("cross-entropy-fusion-impl", "native") * flags.on("cross-entropy-loss-fusion")


def _fused_activation(flags: Flags, shape: Shape) -> bool:
    if flags.on("squared-relu"):
        return flags.on("use-fused-weighted-squared-relu")
    if shape.gated:
        return not flags.on("no-bias-swiglu-fusion")
    return shape.bias and not flags.on("no-bias-gelu-fusion")


def _attention(
    flags: Flags,
    device: Device,
    environment: Mapping[str, Any],
    engine: bool,
    old_engine: bool,
    assumed: list[str],
) -> Attention:
    """What ``attention-backend`` chooses; ``auto`` takes cuDNN's fused attention from Hopper on
    and flash attention before it, as Transformer Engine prefers them. cuDNN's is not
    deterministic on Blackwell."""
    if not engine:
        return "local"
    choice = flags.text("attention-backend", "auto").rsplit(".", 1)[-1]
    if choice in ("flash", "fused", "unfused"):
        return cast(Attention, choice)
    if choice == "local":
        return "local"
    deterministic = _deterministic(flags, environment)
    if old_engine and deterministic:
        assumed.append(
            "unfused attention: an old Transformer Engine has no other deterministic one"
        )
        return "unfused"
    if not flags.on("bf16") and not flags.on("fp16"):
        assumed.append("unfused attention: the others do not take fp32")
        return "unfused"
    picked: Attention = "fused" if device.hopper else "flash"
    if device.blackwell and deterministic:
        picked = "flash"
    assumed.append(f"attention backend {picked}: left to Transformer Engine")
    return picked


def cublas_workspace(environment: Mapping[str, Any], device: Device) -> int:
    """Bytes of a cuBLAS workspace: pairs of ``:KiB:count``, else torch's default."""
    pairs = re.findall(r":(\d+):(\d+)", str(environment.get("CUBLAS_WORKSPACE_CONFIG", "")))
    if pairs:
        return sum(int(size) * 2**10 * int(count) for size, count in pairs)
    return CUBLAS_WORKSPACE_HOPPER if device.hopper else CUBLAS_WORKSPACE
