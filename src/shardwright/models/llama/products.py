"""Megatron-LM's products whose inputs or results are divided among tensor ranks, some in 8 bits.

Source, Megatron-LM (core 0.14) and Transformer Engine 2: ``core/tensor_parallel/layers.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import linear

from shardwright.core.llama import LocalShape
from shardwright.core.megatron import MegatronSettings
from shardwright.models.llama.layers import (
    Context,
    gathered,
    gathered_beside,
    has_data,
    scattered,
)

Given = torch.Tensor | None


def settings_of(local: LocalShape) -> MegatronSettings:
    """How the layers of a rank are made that are Megatron's."""
    assert local.megatron is not None
    return local.megatron


def columns(
    x: torch.Tensor, parts: Sequence[nn.Linear], local: LocalShape, narrow: bool = True
) -> tuple[torch.Tensor, ...]:
    """This rank's part of the stream times matrices that are one, cut in columns: a result each.
    ``narrow`` products are in 8 bits where the rank's are."""
    factors = (factor for part in parts for factor in (part.weight, part.bias))
    found: tuple[torch.Tensor, ...] = _Columns.apply(x, local, narrow, *factors)
    return found


def rows(x: torch.Tensor, part: nn.Linear, local: LocalShape) -> torch.Tensor:
    """A matrix cut in rows, and the sum over tensor ranks: of this rank's tokens, or of all."""
    found: torch.Tensor = _Rows.apply(x, part.weight, part.bias, local)
    return found


class _Columns(torch.autograd.Function):
    """Keeps its input as it is divided (``LinearWithGradAccumulationAndAsyncCommunication``)."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, local: LocalShape, narrow: bool, *factors: Given
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = factors[::2], factors[1::2]
        narrow = narrow and is_narrow(x, local)
        ctx.save_for_backward(_narrowed(x, narrow), *weights)
        ctx.local, ctx.narrow, ctx.biased = local, narrow, [bias is not None for bias in biases]
        every = _gathered(x, local)
        pairs = zip(weights, biases, strict=True)
        return tuple(_linear(every, w, bias, narrow) for w, bias in pairs if w is not None)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[Given, ...]:
        x, *weights = ctx.saved_tensors
        every = _widened(_gathered(x, ctx.local, gathered_beside), grads[0]).flatten(0, -2)
        flat = [grad.flatten(0, -2) for grad in grads]
        # One matrix has one gradient of its result, in which those of its parts lie side by side.
        if len(flat) > 1:
            flat = list(torch.cat(flat, -1).split([grad.shape[-1] for grad in flat], -1))
        of_input = _product(flat[0], weights[0], ctx.narrow, 1)
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            if ctx.narrow:
                _fill(grad, weight, of_input, 1)
            else:
                torch.addmm(of_input, grad, weight, out=of_input)
        shape = (*grads[0].shape[:-1], x.shape[-1])
        found = _summed(of_input.view(shape), ctx.local)
        of_weights: list[Given] = []
        for grad, weight, biased in zip(flat, weights, ctx.biased, strict=True):
            of_weights.append(_of_weight(grad, every, weight, ctx.local, ctx.narrow))
            of_weights.append(grad.sum(0) if biased else None)
        return found, None, None, *of_weights


class _Rows(torch.autograd.Function):
    """Keeps its input; the result that is summed is no other's, so the sum is in its place."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, bias: Given, local: LocalShape
    ) -> torch.Tensor:
        ctx.narrow = is_narrow(x, local)
        ctx.save_for_backward(_narrowed(x, ctx.narrow), weight)
        ctx.local, ctx.biased = local, bias is not None
        return _summed(_linear(x, weight, bias, ctx.narrow), local)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[Given, ...]:
        x, weight = ctx.saved_tensors
        of_bias = grad.flatten(0, -2).sum(0) if ctx.biased else None
        every, x = _gathered(grad, ctx.local), _widened(x, grad)
        flat = every.flatten(0, -2)
        of_weight = _of_weight(flat, x.flatten(0, -2), weight, ctx.local, ctx.narrow)
        of_input = _product(flat, weight, ctx.narrow, 1).view(*every.shape[:-1], weight.shape[1])
        return of_input, of_weight, of_bias, None


def is_narrow(x: torch.Tensor, local: LocalShape) -> bool:
    """Whether products with ``x`` are in 8 bits, by kernels that only a device has."""
    return settings_of(local).fp8_format != "none" and not has_data(x)


def _narrowed(x: torch.Tensor, narrow: bool) -> torch.Tensor:
    """What a product keeps of its input: a copy in 8 bits where it computes in them."""
    return torch.empty_like(x, dtype=torch.uint8) if narrow else x


@torch.library.custom_op("shardwright::narrow_product", mutates_args=("result",))
def _fill(one: torch.Tensor, other: torch.Tensor, result: torch.Tensor, casts: int) -> None:
    """Stands for a product [m, k] x [k, n] in 8 bits, for which ``one`` is cast where ``casts`` is
    1; a matrix of weights is cast once a step, which is not counted."""


_fill.register_fake(lambda one, other, result, casts: None)


def _product(one: torch.Tensor, other: torch.Tensor, narrow: bool, casts: int = 0) -> torch.Tensor:
    """[m, k] x [k, n]."""
    if not narrow:
        return one @ other
    result = one.new_empty(one.shape[0], other.shape[1])
    _fill(one, other, result, casts)
    return result


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Given, narrow: bool) -> torch.Tensor:
    if not narrow:
        return linear(x, weight, bias)
    return _product(x.flatten(0, -2), weight.T, narrow, 1).view(*x.shape[:-1], len(weight))


def _widened(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy in 8 bits for an operator that has no kernel of them; it stands for what it was."""
    return x if x.dtype == like.dtype else like.new_empty(1).expand(x.shape)


def _gathered(
    x: torch.Tensor, local: LocalShape, by: Callable[..., torch.Tensor] = gathered
) -> torch.Tensor:
    """Tokens of all tensor ranks [B, T, D]; Megatron has them first, so pieces need no order."""
    if local.stream_degree == 1:
        return x
    found = by(x.contiguous(), local.tensor)
    return found.view(x.shape[0], -1, x.shape[-1])


def _summed(x: torch.Tensor, local: LocalShape) -> torch.Tensor:
    """The sum over tensor ranks, of this rank's tokens or in place."""
    if local.tensor == 1:
        return x
    if local.sequence_parallel:
        found = scattered(x.contiguous().flatten(0, 1), local.tensor)
        return found.view(x.shape[0], -1, x.shape[-1])
    sum_in_place(x)
    return x


@torch.library.custom_op("shardwright::all_reduce_", mutates_args=("x",))
def sum_in_place(x: torch.Tensor, group: str = "tensor") -> None:
    """The sum of ``x`` over ranks, where it is."""


sum_in_place.register_fake(lambda x, group="tensor": None)


def _of_weight(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, local: LocalShape, narrow: bool
) -> Given:
    """The gradient of a weight; none where the product adds it to the runtime's buffer itself."""
    if settings_of(local).gradient_accumulation_fusion and not has_data(weight):
        # What is there already and has the size of the buffer's part stands for it.
        if narrow:
            _fill(grad.T, x, weight.data, 0)
        else:
            torch.mm(grad.T, x, out=weight.data)
        return None
    return _product(grad.T, x, narrow)
