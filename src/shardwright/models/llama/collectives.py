"""Stand-ins for the collectives of a decoder that is divided: they allocate what the real ones do.

Each computes nothing and talks to nobody: what other ranks would send is left unset. What they
allocate are the buffers of torch's functional collectives as DTensor calls them, forward and
backward: an output of their own, never in place, and a copy wherever pieces have to be laid side by
side in a dimension other than the first. They are operators (``torch.ops.shardwright``), so that a
trace can see them and a checkpointing policy can name them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Context = Any


def _empty_gathered(x: torch.Tensor, degree: int) -> torch.Tensor:
    """The pieces of ``degree`` ranks one after another in the first dimension."""
    return x.new_empty((x.shape[0] * degree, *x.shape[1:]))


def _empty_scattered(x: torch.Tensor, degree: int) -> torch.Tensor:
    """This rank's piece of the sum, cut in the first dimension."""
    return x.new_empty((x.shape[0] // degree, *x.shape[1:]))


def _empty_reduced(x: torch.Tensor) -> torch.Tensor:
    """The sum, in a buffer of its own."""
    return torch.empty_like(x)


def _empty_exchanged(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``rows`` received from all ranks."""
    return x.new_empty((rows, *x.shape[1:]))


def _operator(name: str, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An operator that does the same with data and without."""
    made = torch.library.custom_op(f"shardwright::{name}", allocate, mutates_args=())
    made.register_fake(allocate)
    return made


gathered = _operator("all_gather", _empty_gathered)
scattered = _operator("reduce_scatter", _empty_scattered)
reduced = _operator("all_reduce", _empty_reduced)
exchanged = _operator("all_to_all", _empty_exchanged)


def all_gather(x: torch.Tensor, dim: int, degree: int) -> torch.Tensor:
    """``x`` of all ranks side by side in ``dim``; its gradient is reduced and scattered."""
    return x if degree == 1 else _AllGather.apply(x, dim, degree)


def reduce_scatter(x: torch.Tensor, dim: int, degree: int) -> torch.Tensor:
    """This rank's part of the sum of ``x``, cut in ``dim``; its gradient is gathered."""
    return x if degree == 1 else _ReduceScatter.apply(x, dim, degree)


def all_reduce(x: torch.Tensor, degree: int) -> torch.Tensor:
    """The sum of ``x`` over ranks that then work alike; its gradient passes as it is."""
    return x if degree == 1 else _AllReduce.apply(x)


def copy_to_ranks(x: torch.Tensor, degree: int) -> torch.Tensor:
    """``x`` as it is, to ranks that each use it for their part; its gradient is summed."""
    return x if degree == 1 else _CopyToRanks.apply(x)


def gather_alike(x: torch.Tensor, dim: int, degree: int) -> torch.Tensor:
    """``x`` of all ranks side by side in ``dim`` for ranks that then work alike; of its gradient
    every rank keeps its own part."""
    return x if degree == 1 else _GatherAlike.apply(x, dim, degree)


def all_to_all(x: torch.Tensor, rows: int, degree: int) -> torch.Tensor:
    """Rows of ``x`` sent to the ranks they belong to; ``rows`` come back."""
    return x if degree == 1 else _AllToAll.apply(x, rows)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, dim: int, degree: int) -> torch.Tensor:
        ctx.dim, ctx.degree = dim, degree
        return _gather(x, dim, degree)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _scatter(grad, ctx.dim, ctx.degree), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, dim: int, degree: int) -> torch.Tensor:
        ctx.dim, ctx.degree = dim, degree
        return _scatter(x, dim, degree)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather(grad, ctx.dim, ctx.degree), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return reduced(x)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> torch.Tensor:
        return reduced(grad)


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, dim: int, degree: int) -> torch.Tensor:
        ctx.dim, ctx.size = dim, x.shape[dim]
        return _gather(x, dim, degree)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # DTensor clones the part, so that the whole gradient can go.
        return grad.narrow(ctx.dim, 0, ctx.size).clone(), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.rows = x.shape[0]
        return exchanged(x.contiguous(), rows)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return exchanged(grad.contiguous(), ctx.rows), None


def _gather(x: torch.Tensor, dim: int, degree: int) -> torch.Tensor:
    """The buffer that arrives; where pieces are not rows, a second one in which they lie right."""
    flat = gathered(x.contiguous(), degree)
    dim %= x.dim()
    if all(size == 1 for size in x.shape[:dim]):
        return flat.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return torch.cat(flat.chunk(degree), dim=dim)


def _scatter(x: torch.Tensor, dim: int, degree: int) -> torch.Tensor:
    """Pieces are laid one after another first, then summed into a buffer of their own."""
    dim %= x.dim()
    if dim:
        x = torch.cat(x.chunk(degree, dim=dim))
    return scattered(x.contiguous(), degree)
