"""Layers of a decoder: linear, norm, table of tokens, feed-forward, whole or divided among ranks.

Starting values are not made: a trace needs none, and a model makes its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, silu

from shardwright.core.llama import Activation, LlamaShape, LocalShape
from shardwright.models.llama.collectives import (
    all_gather,
    all_reduce,
    copy_to_ranks,
    reduce_scatter,
)

Device = torch.device | str | None
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


class Linear(nn.Linear):
    """A linear layer with unset weights [out, in]."""

    def reset_parameters(self) -> None:
        """Leave them unset."""


class RMSNorm(nn.RMSNorm):
    """An RMSNorm with unset weights [width]."""

    def reset_parameters(self) -> None:
        """Leave them unset."""


def has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: not on the meta device, not a fake one of a trace."""
    return not tensor.is_meta and type(tensor) in (torch.Tensor, nn.Parameter)


TOKENS = 1  # the dimension of a stream [B, T, D] that sequence parallelism cuts


def enter(x: torch.Tensor, local: LocalShape) -> torch.Tensor:
    """All tokens of the tensor ranks: gathered once for all products that read them, and kept."""
    if local.sequence_parallel:
        return all_gather(x, TOKENS, local.tensor)
    return copy_to_ranks(x, local.tensor)


def leave(x: torch.Tensor, local: LocalShape) -> torch.Tensor:
    """The sum over the tensor ranks: of this rank's tokens, or of all."""
    if local.sequence_parallel:
        return reduce_scatter(x, TOKENS, local.tensor)
    return all_reduce(x, local.tensor)


Context = Any


class Embedding(nn.Module):
    """Tokens [B, T] int64 -> this rank's part of the stream [B, T, D], perhaps scaled."""

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.local, self.vocab = local, shape.vocab
        self.scale = math.sqrt(shape.dim) if shape.scaled_embedding else None
        self.weight = nn.Parameter(
            torch.empty(local.vocab(shape), shape.dim, device=device, dtype=dtype)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the table."""
        if self.local.tensor == 1:
            rows = nn.functional.embedding(tokens, self.weight)
        else:
            rows = leave(rows_here(self.weight, tokens, self.vocab), self.local)
        return rows if self.scale is None else rows * self.scale


def rows_here(weight: torch.Tensor, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """Rows of the ``weight`` that is here of a table of ``vocab`` rows, 0 for others' tokens."""
    return _RowsHere.apply(weight, tokens, vocab)


class _RowsHere(torch.autograd.Function):
    """A rank looks up the tokens that it has; the others add nothing.

    Backward is DTensor's (torch 2.2 to 2.13): every rank computes the gradient of the whole table,
    of which it then keeps a copy of its part.
    """

    @staticmethod
    def forward(
        ctx: Context, weight: torch.Tensor, tokens: torch.Tensor, vocab: int
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.vocab, ctx.here = vocab, weight.shape[0]
        foreign = tokens >= weight.shape[0]
        rows = nn.functional.embedding(tokens.masked_fill(foreign, 0), weight)
        return rows.masked_fill_(foreign[..., None], 0.0)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        size = max(ctx.vocab, ctx.here)
        whole = torch.ops.aten.embedding_dense_backward(grad, tokens, size, -1, False)
        return whole[: ctx.here].clone(), None, None


class SwiGLU(nn.Module):
    """[..., D] -> [..., D] on tokens that are all here; with a degree the result is a summand. The
    gate's activation is the shape's, so a GeGLU is one, too."""

    def __init__(
        self,
        shape: LlamaShape,
        wide: int,
        device: Device,
        dtype: torch.dtype,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        self.w1 = Linear(shape.dim, wide, bias, device=device, dtype=dtype)
        self.w2 = Linear(wide, shape.dim, bias, device=device, dtype=dtype)
        self.w3 = Linear(shape.dim, wide, bias, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gate, product, and back."""
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class FeedForward(SwiGLU):
    """The SwiGLU of a block, on this rank's part of the stream."""

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, shape.ffn_dim // local.tensor, device, dtype, shape.mlp_bias)
        self.local = local

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        return leave(super().forward(enter(x, self.local)), self.local)
