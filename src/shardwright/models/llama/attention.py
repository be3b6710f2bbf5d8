"""Causal attention with grouped heads of keys, whole or divided by heads and by sequence.

Over a sequence that is divided among ranks it is a stand-in that allocates what torch's context
parallelism does (``torch.distributed.tensor.experimental._context_parallel``, 2.13: keys and values
gathered at once, partial results merged in fp32, their gradients handed around in fp32). It
computes nothing. Of the steps of a ring the first two differ and the rest repeat the second, so
three are enough for the largest total; the rank is the last one, whose steps see all its queries.
"""

# Written to keep, tensor by tensor, what TorchTitan's and torch's own attention keep: a trace of
# this module is the estimate. So keys are repeated although the kernel could do without, latent
# attention concatenates where TorchTitan does, and a divided sequence allocates the buffers of
# torch's ring without sending anything.

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.models.llama.layers import (
    TOKENS,
    Device,
    Linear,
    capped,
    copy_to_ranks,
    enter,
    exchanged,
    gather_alike,
    gathered,
    leave,
    norm,
    operator,
)


def rotations(
    length: int, head_dim: int, theta: float, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each [length, head_dim / 2] fp32: the bytes of one complex table."""
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(
        torch.arange(length, device=device, dtype=torch.float32), 1.0 / theta**steps
    )
    return torch.cos(angles), torch.sin(angles)


def rotate(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
    """``x`` [B, T, heads, head_dim] turned, in the dtype of ``x``; as it is without rotations.

    The first half of a head is paired with the second, as Hugging Face lays weights out. It is
    computed in the wider dtype of the two; autograd keeps the cosines and sines, not ``x``.
    """
    if cos is None or sin is None:
        return x
    # Two real tables instead of a complex one: the same bytes, and operators that every backend
    # has.
    cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)


Context = Any
Rotation = torch.Tensor | None
DISTINCT_STEPS = 3
CONTEXT = "context"
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, degree: int
) -> torch.Tensor:
    """[B, H, T, head_dim] each, T being this rank's tokens -> the shape of values."""
    return _RingAttention.apply(query, key, value, degree)


class _RingAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the result and its log-sums for backward, like one kernel."""

    @staticmethod
    def forward(
        ctx: Context, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, degree: int
    ) -> torch.Tensor:
        # Keys and values in one collective, as torch gathers them, so both are there until the last
        # step.
        everyone = gathered(_joined(key.contiguous(), value.contiguous()), degree, CONTEXT)
        # Half of all pairs are masked, and ranks share them evenly: what all steps of the ring
        # compute is said at once, for of many steps few are made.
        keys = key.shape[-2] * degree // 2
        attends(query, value, keys, 1)
        merged, sums = _kernel(query, value)
        # Partial results are merged in fp32, which is what peaks: two results, their difference and
        # a product of it are there at once.
        merged, sums = merged.float(), sums[..., None]
        for _ in range(1, min(degree, DISTINCT_STEPS)):
            part, part_sums = _kernel(query, value)
            part, part_sums = part.float(), part_sums[..., None]
            merged = merged - torch.sigmoid(part_sums - sums) * (merged - part)
            sums = sums - torch.nn.functional.logsigmoid(sums - part_sums)
        del everyone
        result = merged.to(query.dtype)
        ctx.degree = degree
        ctx.save_for_backward(query, key, value, result, sums.squeeze(-1))
        return result

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        # Gradients are added up over the steps of the ring in fp32, each as large as twice its
        # tensor in bf16.
        sums = [torch.zeros_like(part, dtype=torch.float32) for part in (query, key, value)]
        everyone = gathered(_joined(key.contiguous(), value.contiguous()), ctx.degree, CONTEXT)
        # Queries by keys again, and a gradient of each of the four that two products have.
        attends(query, value, key.shape[-2] * ctx.degree // 2, 2.5)
        for _ in range(min(ctx.degree, DISTINCT_STEPS)):
            parts = [torch.empty_like(part) for part in (query, key, value)]
            for total, part in zip(sums, parts, strict=True):
                total += part
            sent = _joined(sums[1], sums[2])
            arrived = exchanged(sent, sent.shape[0], CONTEXT)
            sums[1] = arrived[: key.numel()].view(key.shape)
            sums[2] = arrived[key.numel() :].view(value.shape)
        del everyone
        results = [total.to(query.dtype) for total in sums]
        return results[0], results[1], results[2], None


def _kernel(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What one call of the attention kernel returns: its result and a log-sum per query."""
    return torch.empty_like(value), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _nothing(query: torch.Tensor, value: torch.Tensor, keys: int, times: float) -> None:
    """Says what kernels compute, ``times`` a forward whose queries attend to ``keys`` each."""


attends = operator("attention", _nothing)


def _joined(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.cat((key.flatten(), value.flatten()))


class CoreAttention(nn.Module):
    """Queries, keys, values [B, heads, T, head_dim] -> [B, heads, T, head_dim] (of a value's), over
    the tokens of all context ranks. A module of its own, so that a policy can compute it again."""

    def __init__(self, shape: LlamaShape, local: LocalShape) -> None:
        super().__init__()
        self.context, self.cap = local.context, shape.attention_cap or 0.0
        self.dropout = shape.attention_dropout or 0.0

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal attention; the kernel forms no [T, T] matrix, but caps no scores either."""
        dropout = self.dropout if self.training else 0.0
        if self.cap:
            return capped_attention(query, key, value, self.cap)
        if self.context > 1:
            return ring_attention(query, key, value, self.context)
        return scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


class Attention(nn.Module):
    """[B, T, D] -> [B, T, D]; keys and values are repeated for the heads that share them, as
    TorchTitan does, so the kernel sees as many heads of keys as of queries.

    A sliding window is not applied: it changes values where T is longer, never bytes.
    """

    core: type[nn.Module] = CoreAttention

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.local = local
        self.heads, self.kv_heads = local.heads(shape), local.kv_heads(shape)
        self.head_dim = shape.head_dim
        queries, keys = self.heads * shape.head_dim, self.kv_heads * shape.head_dim
        bias = shape.attention_bias
        self.wq = Linear(shape.dim, queries, bias, device=device, dtype=dtype)
        self.wk = Linear(shape.dim, keys, bias, device=device, dtype=dtype)
        self.wv = Linear(shape.dim, keys, bias, device=device, dtype=dtype)
        self.wo = Linear(queries, shape.dim, shape.output_bias, device=device, dtype=dtype)
        self.inner_attention = self.core(shape, local)
        self.q_norm = self.k_norm = None
        if shape.qk_norm:
            self.q_norm = norm(shape, shape.head_dim, device, dtype)
            self.k_norm = norm(shape, shape.head_dim, device, dtype)

    def forward(self, x: torch.Tensor, cos: Rotation, sin: Rotation) -> torch.Tensor:
        """``x`` is this rank's part of the stream; so is what comes back."""
        x = enter(x, self.local)
        size, length, _ = x.shape
        query = self.wq(x).view(size, length, self.heads, self.head_dim)
        key = self.wk(x).view(size, length, self.kv_heads, self.head_dim)
        value = self.wv(x).view(size, length, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        repeats = self.heads // self.kv_heads
        key, value = repeat_heads(key, repeats), repeat_heads(value, repeats)
        found = self.inner_attention(*(part.transpose(1, 2) for part in (query, key, value)))
        joined = found.transpose(1, 2).reshape(size, length, -1)
        return leave(self.wo(joined), self.local)


class LatentAttention(nn.Module):
    """[B, T, D] -> [B, T, D], keys and values made of a few numbers that all heads share, as
    TorchTitan's ``deepseek_v3`` does it. Under tensor parallelism what makes those few is whole on
    every rank, and so is what comes of it."""

    core: type[nn.Module] = CoreAttention

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.shape, self.local, self.heads = shape, local, local.heads(shape)
        self.unturned = shape.head_dim - shape.qk_rope_head_dim
        dim, shared, queries = shape.dim, shape.kv_lora_rank, self.heads * shape.head_dim
        linear = partial(Linear, bias=False, device=device, dtype=dtype)
        if shape.q_lora_rank:
            self.wq_a = linear(dim, shape.q_lora_rank)
            self.q_norm = norm(shape, shape.q_lora_rank, device, dtype)
            self.wq_b = linear(shape.q_lora_rank, queries)
        else:
            self.wq = linear(dim, queries)
        self.wkv_a = linear(dim, shared + shape.qk_rope_head_dim)
        self.kv_norm = norm(shape, shared, device, dtype)
        self.wkv_b = linear(shared, self.heads * (self.unturned + shape.value_dim))
        self.wo = linear(self.heads * shape.value_dim, dim, bias=shape.output_bias)
        self.inner_attention = self.core(shape, local)

    def forward(self, x: torch.Tensor, cos: Rotation, sin: Rotation) -> torch.Tensor:
        """``x`` is this rank's part of the stream; so is what comes back."""
        shape, degree = self.shape, self.local.tensor
        # Not `enter`: what makes the few numbers is whole on every rank, so their gradients are
        # alike and must not be summed.
        x = gather_alike(x, TOKENS, self.local.stream_degree)
        size, length, _ = x.shape
        query = self._query(x).view(size, length, self.heads, shape.head_dim)
        fixed, turned = query.split((self.unturned, shape.qk_rope_head_dim), dim=-1)
        query = torch.cat((fixed, rotate(turned, cos, sin)), dim=-1)
        few, turned = self.wkv_a(x).split((shape.kv_lora_rank, shape.qk_rope_head_dim), dim=-1)
        # One head of turned numbers for all heads: each rank uses it for its own, so gradients are
        # summed.
        turned = rotate(copy_to_ranks(turned, degree)[:, :, None], cos, sin)
        pair = self.wkv_b(copy_to_ranks(self.kv_norm(few), degree))
        fixed, value = pair.view(size, length, self.heads, -1).split(
            (self.unturned, shape.value_dim), dim=-1
        )
        key = torch.cat((fixed, turned.expand(-1, -1, self.heads, -1)), dim=-1)
        found = self.inner_attention(*(part.transpose(1, 2) for part in (query, key, value)))
        joined = found.transpose(1, 2).reshape(size, length, -1)
        return leave(self.wo(joined), self.local)

    def _query(self, x: torch.Tensor) -> torch.Tensor:
        """All heads of queries, side by side."""
        degree = self.local.tensor
        if not self.shape.q_lora_rank:
            return self.wq(copy_to_ranks(x, degree))
        return self.wq_b(copy_to_ranks(self.q_norm(self.wq_a(x)), degree))


def capped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cap: float
) -> torch.Tensor:
    """Causal attention, [B, heads, T, head_dim] each, whose scores ``cap`` times a tanh keeps below
    it: operator by operator, as ``transformers`` has it (``eager_attention_forward`` of Gemma 2,
    5.24). Of its scores [B, heads, T, T] a backward has the tanh, the softmax in fp32, and that in
    the dtype of values."""
    scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    scores = capped(scores, cap)
    length = scores.shape[-1]
    later = torch.full((length, length), -math.inf, dtype=scores.dtype, device=scores.device)
    shares = torch.softmax(scores + later.triu(1), dim=-1, dtype=torch.float32)
    return torch.matmul(shares.to(value.dtype), value)


def repeat_heads(x: torch.Tensor, repeats: int) -> torch.Tensor:
    """[B, T, heads, head_dim] -> [B, T, heads x repeats, head_dim], a copy unless it is once."""
    if repeats == 1:
        return x
    size, length, heads, width = x.shape
    wide = x[:, :, :, None, :].expand(size, length, heads, repeats, width)
    return wide.reshape(size, length, heads * repeats, width)
