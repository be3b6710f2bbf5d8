"""A mixture of experts: a router sends every token to a few of them, perhaps on other ranks.

One product serves many experts: rows are sorted by expert, each group times its own matrix.
"""

# Grouped kernels need a device; what counts here is that a trace sees what they take and compute:
# one operator with one result for all experts and two factors kept, whatever the number of experts.
# Inside of it there is a loop where there are numbers, which a test can compare. Rows are sorted by
# expert, since a group has to be one stretch.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    gated,
    has_data,
    leave,
)

Context = Any


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    adds: bool = False,
    narrow: bool = False,
) -> torch.Tensor:
    """[rows, in] times [experts, out, in] transposed -> [rows, out].

    Rows of expert e stop at ``ends[e]``, int64 on any device; rows beyond the last end are unset.
    It takes and keeps what a grouped kernel does: one result, and for backward its two factors.
    One that ``adds`` has its gradient of weights in the runtime's buffer, where there is no data;
    one that is ``narrow`` is computed in 8 bits there.
    """
    return _GroupedProduct.apply(x, weight, ends, adds, narrow)


@torch.library.custom_op("shardwright::grouped_product", mutates_args=("result",))
def _multiply(
    one: torch.Tensor,
    other: torch.Tensor,
    ends: torch.Tensor,
    result: torch.Tensor,
    narrow: bool,
) -> None:
    """Fill ``result`` as ``torch._grouped_mm`` does: rows of ``one`` times their expert's matrix,
    or an expert's columns of it times its rows of ``other``. One operator, for a policy of
    checkpointing that keeps the results of products would find each expert's written to again, in
    the buffer of all."""
    stops = ends.tolist()
    for expert, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        if other.dim() == 3:
            torch.mm(one[start:stop], other[expert], out=result[start:stop])
        else:
            torch.mm(one[:, start:stop], other[start:stop], out=result[expert])


_multiply.register_fake(lambda one, other, ends, result, narrow: None)


def _product(
    one: torch.Tensor, other: torch.Tensor, ends: torch.Tensor, narrow: bool
) -> torch.Tensor:
    sizes = one.shape[0], other.shape[-1]
    result = one.new_empty(sizes if other.dim() == 3 else (len(ends), *sizes))
    _multiply(one, other, ends, result, narrow)
    return result


class _GroupedProduct(torch.autograd.Function):
    """Keeps its two factors, and where rows end."""

    @staticmethod
    def forward(
        ctx: Context,
        x: torch.Tensor,
        weight: torch.Tensor,
        ends: torch.Tensor,
        adds: bool,
        narrow: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.adds, ctx.narrow = adds and not has_data(x), narrow
        return _product(x, weight.transpose(1, 2), ends, narrow)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad_x = _product(grad, weight, ends, ctx.narrow)
        if ctx.adds:
            # What is there already and has the size of the buffer's part stands for it.
            _multiply(grad.T, x, ends, weight.data, ctx.narrow)
            return grad_x, None, None, None, None
        return grad_x, _product(grad.T, x, ends, ctx.narrow), None, None, None


class Experts(nn.Module):
    """The experts of this rank: two or three weights [experts, ...], rows sorted by expert."""

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.activation = shape.activation
        here, dim = local.experts(shape), shape.dim
        wide = shape.expert_ffn_dim // local.expert_width_degree
        self.w1 = nn.Parameter(torch.empty(here, wide, dim, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(here, dim, wide, device=device, dtype=dtype))
        self.w3 = None
        if not shape.ungated:
            self.w3 = nn.Parameter(torch.empty(here, wide, dim, device=device, dtype=dtype))
        self.b1 = self.b2 = self.b3 = None
        if shape.expert_bias:
            self.b1 = nn.Parameter(torch.empty(here, wide, device=device, dtype=dtype))
            self.b2 = nn.Parameter(torch.empty(here, dim, device=device, dtype=dtype))
            if self.w3 is not None:
                self.b3 = nn.Parameter(torch.empty(here, wide, device=device, dtype=dtype))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[rows, D] -> [rows, D]; ``ends[e]`` is where the rows of expert e stop."""
        of = None if self.b1 is None else _expert_of(rows, ends)
        inner = _biased(grouped_product(rows, self.w1, ends), self.b1, of)
        if self.w3 is None:
            inner = ACTIVATIONS[self.activation](inner)
        else:
            up = partial(grouped_product, rows, self.w3, ends)
            inner = gated(self.activation, inner, lambda: _biased(up(), self.b3, of))
        return _biased(grouped_product(inner, self.w2, ends), self.b2, of)


def _expert_of(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The expert of each row, int64; the last one of rows beyond the last end."""
    places = torch.arange(len(rows), device=rows.device)
    return torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)


def _biased(rows: torch.Tensor, bias: torch.Tensor | None, of: torch.Tensor | None) -> torch.Tensor:
    """Rows with the bias of their expert added, where there are biases."""
    return rows if bias is None or of is None else rows + bias[of]


class MixtureOfExperts(nn.Module):
    """[B, T, D] -> [B, T, D]: softmax of the router in fp32, the best experts' share of it
    normalised, their results added in that proportion; and a shared expert where there is one."""

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.shape, self.local = shape, local
        bias = bool(shape.expert_bias)
        self.router = Linear(shape.dim, shape.experts, bias, device=device, dtype=dtype)
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
