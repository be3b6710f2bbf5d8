"""The table of tokens, its rows divided by the tensor degree."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.core.llama import LlamaShape
from shardwright.core.llama_local import LocalShape
from shardwright.models.llama.linear import Device
from shardwright.models.llama.streams import leave

Context = Any


class Embedding(nn.Module):
    """Tokens [B, T] int64 -> this rank's part of the stream [B, T, D]."""

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.local, self.vocab = local, shape.vocab
        self.weight = nn.Parameter(
            torch.empty(local.vocab(shape), shape.dim, device=device, dtype=dtype)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the table."""
        if self.local.tensor == 1:
            return nn.functional.embedding(tokens, self.weight)
        return leave(_RowsHere.apply(self.weight, tokens, self.vocab), self.local)


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
