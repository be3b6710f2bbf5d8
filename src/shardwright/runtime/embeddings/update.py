"""Exact fused updates of embedding rows: no dense gradient, no optimizer pass.

``rows`` may repeat; repeated gradients are summed first where the rule is not linear. Equal to the
unsharded optimizer on the summed gradient. Row-wise Adagrad keeps one running sum per row of the
mean over columns of the squared gradient.
"""

from __future__ import annotations

import torch

EPSILON = 1e-8


def sgd(weight: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
    """``weight[rows] -= rate * gradient``; weight [R, D], rows [N] int64, gradient [N, D]."""
    gradient.mul_(-rate)
    # scatter_add_ is an order of magnitude faster than index_add_ on CPU
    weight.scatter_add_(0, rows.unsqueeze(1).expand_as(gradient), gradient)


def rowwise_adagrad(
    weight: torch.Tensor,
    state: torch.Tensor,
    rows: torch.Tensor,
    gradient: torch.Tensor,
    rate: float,
) -> None:
    """Row-wise Adagrad on distinct rows; weight [R, D], state [R], rows [N], gradient [N, D]."""
    if rows.numel() == 0:
        return
    ordered, permutation = torch.sort(rows)
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    starts = first.nonzero().squeeze(1)
    distinct = ordered[starts]
    summed = torch.nn.functional.embedding_bag(permutation, gradient, starts, mode="sum")
    running = state[distinct] + summed.square().mean(1)
    state.index_put_((distinct,), running)
    step = summed.mul_((rate / (running.sqrt_() + EPSILON)).unsqueeze(1))
    weight.index_put_((distinct,), weight[distinct] - step)


def dense_sgd(weight: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
    """SGD on every row; used for replicas, whose gradient is dense."""
    weight.add_(gradient, alpha=-rate)


def dense_rowwise_adagrad(
    weight: torch.Tensor, state: torch.Tensor, gradient: torch.Tensor, rate: float
) -> None:
    """Row-wise Adagrad on every row; a row whose gradient is zero does not change."""
    state.add_(gradient.square().mean(1))
    weight.sub_(gradient.mul_((rate / (state.sqrt() + EPSILON)).unsqueeze(1)))
