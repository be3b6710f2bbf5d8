"""Functions as CUDA's kernels do them: fused RMSNorm, Liger's cross-entropy, and attention by the
kernel that CUDA would choose."""

# ``aten::_fused_rms_norm``, which the CPU takes apart, is registered by torch for accelerators
# only, so it is made again here under the same name in our namespace. It computes what it should,
# so that a trace and a real run agree in values too.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.trace.lowering.kernels import Attention

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
    return fused_rms_norm(input, list(normalized_shape), weight, eps)[0]


def fusible(x: Tensor, weight: Tensor | None) -> bool:
    """Whether torch takes the fused kernel: one dtype, nothing complex."""
    return not x.is_complex() and (weight is None or weight.dtype == x.dtype)


def _accumulated(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _axes(normalized_shape: Sequence[int]) -> list[int]:
    return [-1 - place for place in range(len(normalized_shape))]


@torch.library.custom_op("shardwright::fused_cross_entropy", mutates_args=("logits",))
def fused_cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, mean: bool) -> Tensor:
    """The loss in fp32; ``logits`` (rows x classes) become their gradient."""
    wide = logits.float()
    reduction = "mean" if mean else "sum"
    loss = torch.nn.functional.cross_entropy(
        wide, target, ignore_index=ignore_index, reduction=reduction
    )
    grad = wide.softmax(-1)
    kept = target != ignore_index
    grad[torch.arange(len(target)), target.clamp(min=0)] -= 1.0
    grad *= kept[:, None] / (kept.sum() if mean else 1)
    logits.copy_(grad)
    return loss


@fused_cross_entropy.register_fake
def _(logits: Tensor, target: Tensor, ignore_index: int, mean: bool) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=logits.device)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: Tensor, target: Tensor, ignore_index: int, mean: bool
    ) -> Tensor:
        held = logits.detach()
        loss: Tensor = fused_cross_entropy(held, target, ignore_index, mean)
        # As Liger's kernel does it: the gradient is written over the logits in the forward, so that
        # nothing else is kept.
        context.save_for_backward(held)
        return loss

    @staticmethod
    def backward(context: Any, *grads: Any) -> Any:
        (held,) = context.saved_tensors
        return held.mul_(grads[0]), None, None, None


def cross_entropy(
    input: Tensor,  # noqa: A002 - torch's name, which callers may write
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """torch's function of this name, fused; None for all but rows of logits, class numbers, and a
    mean or a sum."""
    plain = weight is None and label_smoothing == 0.0 and size_average is None and reduce is None
    rows = input.dim() == 2 and not target.is_floating_point()
    if not (plain and rows and reduction in ("mean", "sum")):
        return None
    return _CrossEntropy.apply(input, target, ignore_index, reduction == "mean")


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
    if wanted == "eager":
        return _eager(query, key, value, (attn_mask, is_causal, scale), dropout_p)
    inputs = (query, key, value), attn_mask, is_causal, enable_gqa
    # In torch's order of trying: each kernel keeps other tensors for the backward, and "math" keeps
    # the whole matrix of scores, so a kernel that is taken for another one makes a wrong peak.
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


Masked = tuple[Tensor | None, bool, float | None]


def _eager(query: Tensor, key: Tensor, value: Tensor, masked: Masked, dropout: float) -> Tensor:
    """Attention operator by operator, its scores [..., T, T] there as a whole, its softmax in fp32,
    as ``transformers`` has it (``eager_attention_forward``, 5.24)."""
    mask, is_causal, scale = masked
    if key.size(-3) != query.size(-3):  # groups of heads share them
        repeats = query.size(-3) // key.size(-3)
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1))
    scores = scores * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if mask is not None:
        bias = mask.dtype != torch.bool
        scores = scores + mask if bias else scores.masked_fill(~mask, float("-inf"))
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    del scores
    if dropout:
        shares = torch.native_dropout(shares, dropout, True)[0]
    return torch.matmul(shares, value)


def _takes(
    name: Attention,
    heads: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    is_causal: bool,
    grouped: bool,
) -> bool:
    """Whether a kernel is for these ``heads`` of queries, keys and values."""
    if name == "math":
        return True
    if any(tensor.dim() != 4 or tensor.stride(-1) != 1 for tensor in heads):
        return False
    query, key, value = heads
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
    # torch pads the last dimension for the flash kernel and keeps the padded copies for the
    # backward. The scale is that of the width before padding.
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
    # Rows are padded so that each begins aligned, and then cut to their length again as a view: the
    # memory is that of the padded ones.
    missing = -key.size(2) % MASK_MULTIPLE
    if not missing:
        return mask
    return functional.pad(mask, (0, missing))[..., : key.size(2)]
