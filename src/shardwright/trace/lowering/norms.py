"""RMSNorm as CUDA's fused kernel does it: ``aten::_fused_rms_norm``, which the CPU takes apart.

torch registers that operator for accelerators only, so it is made again here under the same name in
our namespace. It computes what it should, so that a trace and a real run agree in values too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_EPSILON = torch.finfo(torch.float32).eps  # rms_norm_composite, aten/src/ATen/native/layer_norm.cpp


@torch.library.custom_op("shardwright::_fused_rms_norm", mutates_args=())
def fused_rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """The result in the dtype of ``x``, and 1/rms in fp32, one value a row."""
    wide = x.to(_accumulated(x))
    axes = _axes(normalized_shape)
    square = wide.pow(2).mean(axes, keepdim=True)
    inverse = torch.rsqrt(square + (_EPSILON if eps is None else eps))
    normal = wide * inverse
    return (normal if weight is None else normal * weight).to(x.dtype), inverse


@fused_rms_norm.register_fake
def _(x: Tensor, normalized_shape: Sequence[int], weight: Any, eps: Any) -> Any:
    rows = (*x.shape[: x.dim() - len(normalized_shape)], *(1 for _ in normalized_shape))
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return result, torch.empty(rows, dtype=_accumulated(x), device=x.device)


@torch.library.custom_op("shardwright::_fused_rms_norm_backward", mutates_args=())
def fused_rms_norm_backward(
    grad_out: Tensor, x: Tensor, normalized_shape: Sequence[int], rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and weight."""
    axes, dtype = _axes(normalized_shape), rstd.dtype
    normal, grad = x.to(dtype) * rstd, grad_out.to(dtype)
    scaled = grad * weight.to(dtype)
    inner = (normal * scaled).mean(axes, keepdim=True)
    leading = tuple(range(x.dim() - len(normalized_shape)))
    of_weight = (grad * normal).sum(leading) if leading else grad * normal
    return ((scaled - normal * inner) * rstd).to(x.dtype), of_weight.to(weight.dtype)


@fused_rms_norm_backward.register_fake
def _(grad_out: Tensor, x: Tensor, normalized_shape: Any, rstd: Any, weight: Tensor) -> Any:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return result, torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, normalized_shape, weight, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.normalized_shape, ctx.weighted = normalized_shape, weight is not None
    ctx.save_for_backward(x, weight, output[1])


def _differentiate(context: Any, grad: Any, _: Any) -> Any:
    x, weight, inverse = context.saved_tensors
    shape = context.normalized_shape
    if grad is None:
        return None, None, None, None
    scale = weight if context.weighted else x.new_ones(shape)
    of_input, of_weight = fused_rms_norm_backward(grad, x, shape, inverse, scale)
    return of_input, None, of_weight if context.weighted else None, None


fused_rms_norm.register_autograd(_differentiate, setup_context=_save)


def rms_norm(
    input: Tensor,  # noqa: A002 - torch's name, which callers may write
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """torch's function of this name, fused; a caller asks :func:`fusible` first."""
    result: Tensor = fused_rms_norm(input, list(normalized_shape), weight, eps)[0]
    return result


def fusible(x: Tensor, weight: Tensor | None) -> bool:
    """Whether torch takes the fused kernel: one dtype, nothing complex."""
    return not x.is_complex() and (weight is None or weight.dtype == x.dtype)


def _accumulated(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _axes(normalized_shape: Sequence[int]) -> list[int]:
    return [-1 - place for place in range(len(normalized_shape))]
