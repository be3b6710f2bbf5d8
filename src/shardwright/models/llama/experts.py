"""A mixture of experts: a router sends every token to a few of them, perhaps on other ranks.

One product serves many experts: rows are sorted by expert, each group times its own matrix.
"""

# Grouped kernels need a device; what counts here is that a trace sees what they take: one result
# for all experts and two factors kept, whatever the number of experts. So there is a loop where
# there are numbers, which a test can compare, and one allocation where there are none. Rows are
# sorted by expert, since a group has to be one stretch.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.models.llama.layers import (
    ACTIVATIONS,
    MLP,
    Device,
    Linear,
    all_to_all,
    enter,
    has_data,
    leave,
)

Context = Any


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, adds: bool = False
) -> torch.Tensor:
    """[rows, in] times [experts, out, in] transposed -> [rows, out].

    Rows of expert e stop at ``ends[e]``, int64 on any device; rows beyond the last end are unset.
    It takes and keeps what a grouped kernel does: one result, and for backward its two factors.
    One that ``adds`` has its gradient of weights in the runtime's buffer, where there is no data.
    """
    return _GroupedProduct.apply(x, weight, ends, adds)


@torch.library.custom_op("shardwright::grouped_product", mutates_args=("result",))
def _multiply(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, result: torch.Tensor
) -> None:
    """Fill ``result``: one operator, for a policy of checkpointing that keeps the results of
    products would find each expert's written to again, in the buffer of all."""
    for expert, group in _groups(x, ends):
        torch.mm(x[group], weight[expert].T, out=result[group])


class _GroupedProduct(torch.autograd.Function):
    """A loop over experts that writes into one buffer; without data only the buffer is made."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, adds: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.adds = adds and not has_data(x)
        result = x.new_empty(x.shape[0], weight.shape[1])
        # Under a trace `ends` has no values, so no loop could be cut by them.
        if has_data(x):
            _multiply(x, weight, ends, result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        if ctx.adds:
            return grad_x, None, None, None
        grad_weight = torch.empty_like(weight)
        for expert, group in _groups(x, ends):
            torch.mm(grad[group], weight[expert], out=grad_x[group])
            torch.mm(grad[group].T, x[group], out=grad_weight[expert])
        return grad_x, grad_weight, None, None


def _groups(x: torch.Tensor, ends: torch.Tensor) -> list[tuple[int, slice]]:
    """The rows of every expert; none where tensors have no data."""
    if not has_data(x):
        return []
    stops = ends.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip([0, *stops], stops, strict=False))]


class Experts(nn.Module):
    """The experts of this rank: two or three weights [experts, ...], rows sorted by expert."""

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        here, dim = local.experts(shape), shape.dim
        wide = shape.expert_ffn_dim // local.expert_width_degree
        self.w1 = nn.Parameter(torch.empty(here, wide, dim, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(here, dim, wide, device=device, dtype=dtype))
        self.w3 = None
        if not shape.ungated:
            self.w3 = nn.Parameter(torch.empty(here, wide, dim, device=device, dtype=dtype))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[rows, D] -> [rows, D]; ``ends[e]`` is where the rows of expert e stop."""
        inner = self.activation(grouped_product(rows, self.w1, ends))
        if self.w3 is None:
            return grouped_product(inner, self.w2, ends)
        return grouped_product(inner * grouped_product(rows, self.w3, ends), self.w2, ends)


class MixtureOfExperts(nn.Module):
    """[B, T, D] -> [B, T, D]: softmax of the router in fp32, the best experts' share of it
    normalised, their results added in that proportion; and a shared expert where there is one."""

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.shape, self.local = shape, local
        self.router = Linear(shape.dim, shape.experts, bias=False, device=device, dtype=dtype)
        self.experts = Experts(shape, local, device, dtype)
        self.shared_experts = self.shared_gate = None
        if shape.shared_ffn_dim:
            wide = shape.shared_ffn_dim // local.tensor
            self.shared_experts = MLP(shape, wide, device, dtype)
            if shape.shared_gate:
                self.shared_gate = Linear(shape.dim, 1, bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the stream in and out."""
        stream = enter(x, self.local)
        tokens = stream.flatten(0, 1)
        share, chosen = self._route(tokens)
        # Stable, so that the rows of an expert stay in the order of tokens and sums are the same
        # every time.
        order = torch.argsort(chosen, stable=True)
        token_of = order // self.shape.experts_per_token
        found = self._compute(tokens[token_of], chosen)
        # Shares are fp32, as the softmax that made them; the sum is taken in the dtype of the
        # stream.
        weighted = (found.float() * share[order][:, None]).type_as(found)
        total = torch.zeros_like(tokens).index_add(0, token_of, weighted)
        if self.shared_experts is not None:
            shared = self.shared_experts(tokens)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(tokens)) * shared
            total = total + shared
        return leave(total.view(stream.shape), self.local)

    def _route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The share of each chosen expert in a token's result, and the experts, both [rows].

        Where experts are whole on tensor ranks that all have the same tokens, each takes a part.
        """
        # In fp32: bf16 tells few of many small shares apart, and the choice would be one of ties.
        scores = torch.softmax(self.router(tokens).float(), dim=-1)
        share, chosen = torch.topk(scores, self.shape.experts_per_token, dim=-1)
        share = share / share.sum(-1, keepdim=True)
        # Cut to a part by count alone: a stand-in has no need of the right tokens, only of as many.
        rows = self.local.routed_rows(self.shape, tokens.shape[0])
        return share.flatten()[:rows], chosen.flatten()[:rows]

    def _compute(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What the experts make of ``rows``, which are sorted by expert."""
        counts = torch.zeros(self.shape.experts, dtype=torch.int64, device=rows.device)
        counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))
        local, ends = self.local, counts.cumsum(0)
        if local.expert == 1:
            return self.experts(rows, ends)
        received, here = local.received_rows(self.shape, rows.shape[0]), local.experts(self.shape)
        return elsewhere(self.experts, rows, received, here, local.expert)


def elsewhere(
    experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    received: int,
    here: int,
    degree: int,
) -> torch.Tensor:
    """``rows`` go to the ranks of their experts, are sorted by expert there, and come back: a rank
    has ``here`` of the experts, which are given ``received`` rows and where those of each end."""
    arrived = all_to_all(rows, received, degree)
    order = torch.arange(received, device=rows.device)
    # Even groups: which rows go to which expert changes no byte.
    ends = (torch.arange(here, device=rows.device) + 1) * (received // here)
    found = experts(arrived[order], ends)
    sorted_back = torch.empty_like(found).index_copy_(0, order, found)
    return all_to_all(sorted_back, rows.shape[0], degree)
