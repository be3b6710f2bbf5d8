"""One product for many experts: rows that are sorted by expert, each group times its own matrix."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.models.llama.linear import has_data

Context = Any


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[rows, in] times [experts, out, in] transposed -> [rows, out].

    Rows of expert e stop at ``ends[e]``, int64 on any device; rows beyond the last end are unset.
    It takes and keeps what a grouped kernel does: one result, and for backward its two factors.
    """
    return _GroupedProduct.apply(x, weight, ends)


class _GroupedProduct(torch.autograd.Function):
    """A loop over experts that writes into one buffer; without data only the buffer is made."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        result = x.new_empty(x.shape[0], weight.shape[1])
        for expert, group in _groups(x, ends):
            torch.mm(x[group], weight[expert].T, out=result[group])
        return result

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        for expert, group in _groups(x, ends):
            torch.mm(grad[group], weight[expert], out=grad_x[group])
            torch.mm(grad[group].T, x[group], out=grad_weight[expert])
        return grad_x, grad_weight, None


def _groups(x: torch.Tensor, ends: torch.Tensor) -> list[tuple[int, slice]]:
    """The rows of every expert; none where tensors have no data."""
    if not has_data(x):
        return []
    stops = ends.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip([0, *stops], stops, strict=False))]
