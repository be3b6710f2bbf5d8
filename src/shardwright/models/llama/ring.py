"""Attention over a sequence that is divided among ranks: a stand-in that allocates what torch's
context parallelism does (``torch.distributed.tensor.experimental._context_parallel``, 2.13: keys
and values gathered at once, partial results merged in fp32, their gradients handed around in fp32).

It computes nothing. Of the steps of a ring the first two differ and the rest repeat the second, so
three are enough for the largest total; the rank is the last one, whose steps see all its queries.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.models.llama.collectives import exchanged, gathered

Context = Any
DISTINCT_STEPS = 3
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, degree: int
) -> torch.Tensor:
    """[B, H, T, head_dim] each, T being this rank's tokens -> the same shape."""
    return _RingAttention.apply(query, key, value, degree)


class _RingAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the result and its log-sums for backward, like one kernel."""

    @staticmethod
    def forward(
        ctx: Context, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, degree: int
    ) -> torch.Tensor:
        everyone = gathered(_joined(key.contiguous(), value.contiguous()), degree)
        merged, sums = _kernel(query)
        merged, sums = merged.float(), sums[..., None]
        for _ in range(1, min(degree, DISTINCT_STEPS)):
            part, part_sums = _kernel(query)
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
        sums = [torch.zeros_like(part, dtype=torch.float32) for part in (query, key, value)]
        everyone = gathered(_joined(key.contiguous(), value.contiguous()), ctx.degree)
        for _ in range(min(ctx.degree, DISTINCT_STEPS)):
            parts = [torch.empty_like(part) for part in (query, key, value)]
            for total, part in zip(sums, parts, strict=True):
                total += part
            sent = _joined(sums[1], sums[2])
            arrived = exchanged(sent, sent.shape[0])
            sums[1] = arrived[: key.numel()].view(key.shape)
            sums[2] = arrived[key.numel() :].view(value.shape)
        del everyone
        results = [total.to(query.dtype) for total in sums]
        return results[0], results[1], results[2], None


def _kernel(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What one call of the attention kernel returns: its result and a log-sum per query."""
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _joined(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.cat((key.flatten(), value.flatten()))
