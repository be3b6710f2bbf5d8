"""Attention as CUDA runs it: aten's own operators of the fused kernels, on fake CPU tensors.

Their autograd formulas and shapes are torch's, so that what is saved is not written down a second
time; only the choice of kernel, the padding in front of it and its inner buffers are ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.trace.lowering.kernels import Attention

HALF = (torch.float16, torch.bfloat16)
FLASH_MAX_HEAD_DIM = 256  # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
CUDNN_MAX_HEAD_DIM = 128  # the same; 192 and 256 on some devices
HEAD_DIM_MULTIPLE = 8  # pad_last_dim<8> in aten/src/ATen/native/transformers/attention.cpp
MASK_MULTIPLE = 16  # preprocess_mask in the same file
FALLBACKS: tuple[Attention, ...] = ("flash", "efficient", "math")

aten = torch.ops.aten


def scaled_dot_product_attention(
    wanted: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function of this name with the kernel that CUDA would run; the first argument is the
    kernel that is tried first."""
    inputs = (query, key, value, attn_mask, is_causal, enable_gqa)
    backend = next(name for name in (wanted, *FALLBACKS) if _takes(name, *inputs))
    if backend == "math":
        output, _ = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return output  # type: ignore[no-any-return]
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if backend == "efficient":
        return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query, key, value, bias, grad, dropout_p, is_causal, scale=scale
        )[0]
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
            query, key, value, bias, grad, dropout_p, is_causal, False, scale=scale
        )[0]
    return _flash(query, key, value, dropout_p, is_causal, scale)


def _takes(
    name: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    grouped: bool,
) -> bool:
    if name == "math":
        return True
    if any(tensor.dim() != 4 or tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return False
    same_heads = query.size(1) == key.size(1) == value.size(1)
    even = query.size(-1) == key.size(-1) == value.size(-1)
    if name == "flash":
        square = query.size(2) == key.size(2) or not is_causal
        usable = even and query.size(-1) <= FLASH_MAX_HEAD_DIM and (same_heads or grouped)
        return usable and mask is None and square and query.dtype in HALF
    if name == "cudnn":
        widths = (query.size(-1), value.size(-1))
        fits = all(n <= CUDNN_MAX_HEAD_DIM and n % HEAD_DIM_MULTIPLE == 0 for n in widths)
        return fits and (same_heads or grouped) and query.dtype in HALF
    multiple = HEAD_DIM_MULTIPLE if query.dtype in HALF else HEAD_DIM_MULTIPLE // 2
    aligned = query.size(-1) % multiple == 0 and value.size(-1) % multiple == 0
    return same_heads and aligned and query.dtype in (*HALF, torch.float32)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    width = query.size(-1)
    missing = -width % HEAD_DIM_MULTIPLE
    if missing:
        scale = 1 / math.sqrt(width) if scale is None else scale
        query, key, value = (functional.pad(t, (0, missing)) for t in (query, key, value))
    output = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]
    return output[..., :width] if missing else output  # type: ignore[no-any-return]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the fused kernels take it: additive, of every head, its rows aligned."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    missing = -key.size(2) % MASK_MULTIPLE
    if not missing:
        return mask
    return functional.pad(mask, (0, missing))[..., : key.size(2)]
