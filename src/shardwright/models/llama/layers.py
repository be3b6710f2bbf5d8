"""Layers of a decoder: linear, norm, table of tokens, feed-forward, whole or divided among ranks,
and stand-ins for the collectives between its parts.

Starting values are not made: a trace needs none, and a model makes its own.
"""

# A stand-in computes nothing and talks to nobody: what other ranks would send is left unset. What
# it allocates are the buffers of torch's functional collectives as DTensor calls them, forward and
# backward: an output of its own, never in place, and a copy wherever pieces have to be laid side by
# side in a dimension other than the first. They are operators (``torch.ops.shardwright``), so that
# a trace can see them and a checkpointing policy can name them.

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, relu, silu

from shardwright.core.errors import UnsupportedError
from shardwright.core.llama import Activation, LlamaShape, LocalShape

Device = torch.device | str | None
Context = Any
Moves = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "squared_relu": lambda x: relu(x).square(),
}


CLIP, STEEPNESS = 7.0, 1.702  # gpt-oss, swiglu_limit of its configuration and alpha of its code


def gated(
    activation: Activation, gate: torch.Tensor, made: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """What is ``made`` behind a gate, scaled by it."""
    if activation == "clipped_silu":
        up = made().clamp(-CLIP, CLIP)
        gate = gate.clamp(max=CLIP)
        return gate * torch.sigmoid(STEEPNESS * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * made()


class Linear(nn.Linear):
    """A linear layer with unset weights [out, in]."""

    def reset_parameters(self) -> None:
        """Leave them unset."""


class Adapted(Linear):
    """A linear layer and beside it a narrow one of ``rank`` numbers, which alone is trained; as
    peft's and torchtune's, with a scale of 2, as is usual, and no dropout."""

    def __init__(
        self, inside: int, out: int, bias: bool, rank: int, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__(inside, out, bias, device=device, dtype=dtype)
        self.lora_a = Linear(inside, rank, bias=False, device=device, dtype=dtype)
        self.lora_b = Linear(rank, out, bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both added."""
        return super().forward(x) + self.lora_b(self.lora_a(x)) * ADAPTER_SCALE


def linear(
    shape: LlamaShape,
    size: tuple[int, int],
    bias: bool,
    device: Device,
    dtype: torch.dtype,
) -> Linear:
    """A layer of so many numbers to so many, with an adapter where the shape has them."""
    if shape.lora:
        return Adapted(*size, bias, shape.lora, device, dtype)
    return Linear(*size, bias, device=device, dtype=dtype)


class RMSNorm(nn.RMSNorm):
    """An RMSNorm with unset weights [width]."""

    def reset_parameters(self) -> None:
        """Leave them unset."""


class LayerNorm(nn.LayerNorm):
    """A LayerNorm with unset weights and biases [width]."""

    def reset_parameters(self) -> None:
        """Leave them unset."""


def norm(shape: LlamaShape, width: int, device: Device, dtype: torch.dtype) -> nn.Module:
    """A norm over the last dimension, of the kind of the shape."""
    kind = LayerNorm if shape.layer_norm else RMSNorm
    return kind(width, shape.norm_eps, device=device, dtype=dtype)


def dropped(of: nn.Module, x: Tensor) -> Tensor:
    """``x`` with the share of it 0 that a module drops; as it is where that is none."""
    # No nn.Dropout: modules are listed by estimates, and one that does nothing is none.
    return dropout(x, of.dropout, of.training) if of.dropout else x


def has_data(tensor: Tensor) -> bool:
    """Whether a tensor has values: not on the meta device, not a fake one of a trace."""
    return not tensor.is_meta and type(tensor) in (Tensor, nn.Parameter)


ADAPTER_SCALE = 2.0  # lora_alpha over the rank
TOKENS = 1  # the dimension of a stream [B, T, D] that sequence parallelism cuts


def enter(x: Tensor, local: LocalShape) -> Tensor:
    """All tokens of the tensor ranks: gathered once for all products that read them, and kept."""
    if local.sequence_parallel:
        return all_gather(x, TOKENS, local.tensor)
    return copy_to_ranks(x, local.tensor)


def leave(x: Tensor, local: LocalShape) -> Tensor:
    """The sum over the tensor ranks: of this rank's tokens, or of all."""
    if local.sequence_parallel:
        return reduce_scatter(x, TOKENS, local.tensor)
    return all_reduce(x, local.tensor)


class Embedding(nn.Module):
    """Tokens [B, T] int64 -> this rank's part of the stream [B, T, D], perhaps scaled, perhaps with
    learned positions added."""

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.local, self.vocab = local, shape.vocab
        self.scale = math.sqrt(shape.dim) if shape.scaled_embedding else None
        self.weight = nn.Parameter(
            torch.empty(local.vocab(shape), shape.dim, device=device, dtype=dtype)
        )
        self.positions = None
        if shape.learned_positions:
            self.positions = nn.Parameter(
                torch.empty(shape.learned_positions, shape.dim, device=device, dtype=dtype)
            )
        self.dropout = shape.dropout or 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of the table."""
        if self.local.tensor == 1:
            rows = nn.functional.embedding(tokens, self.weight)
        else:
            vocab = len(self.weight) if self.local.megatron else self.vocab
            rows = leave(rows_here(self.weight, tokens, vocab), self.local)
        rows = rows if self.scale is None else rows * self.scale
        if self.positions is not None:
            length = tokens.shape[TOKENS] * self.local.context
            if length > len(self.positions):
                wanted = f"at most the {len(self.positions)} positions of the model"
                raise UnsupportedError("batch.sequence", wanted, str(length))
            # As the first rank sees it: other ranks' tokens have as many rows of the same table.
            rows = rows + self.positions[: rows.shape[TOKENS]]
        return dropped(self, rows)


def rows_here(weight: Tensor, tokens: Tensor, vocab: int) -> Tensor:
    """Rows of the ``weight`` that is here of a table of ``vocab`` rows, 0 for others' tokens."""
    return _RowsHere.apply(weight, tokens, vocab)


class _RowsHere(torch.autograd.Function):
    """A rank looks up the tokens that it has; the others add nothing.

    Backward is DTensor's (torch 2.2 to 2.13): every rank computes the gradient of the whole table,
    of which it then keeps a copy of its part. Where ``vocab`` is its part, it has no other.
    """

    @staticmethod
    def forward(ctx: Context, weight: Tensor, tokens: Tensor, vocab: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.vocab, ctx.here = vocab, weight.shape[0]
        # As rank 0 sees it: which words are here changes no byte, and one trace stands for all
        # ranks.
        foreign = tokens >= weight.shape[0]
        rows = nn.functional.embedding(tokens.masked_fill(foreign, 0), weight)
        return rows.masked_fill_(foreign[..., None], 0.0)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        # A padded last rank may have more rows than there are words.
        size = max(ctx.vocab, ctx.here)
        whole = torch.ops.aten.embedding_dense_backward(grad, tokens, size, -1, False)
        if size == ctx.here:
            return whole, None, None
        # A clone, so that the whole gradient can be freed: a view would keep it alive.
        return whole[: ctx.here].clone(), None, None


class MLP(nn.Module):
    """[..., D] -> [..., D] on tokens that are all here; with a degree the result is a summand. The
    activation is the shape's, of a gate or of what is between two matrices."""

    def __init__(
        self, shape: LlamaShape, wide: int, device: Device, dtype: torch.dtype, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        self.w1 = linear(shape, (shape.dim, wide), bias, device, dtype)
        self.w2 = linear(shape, (wide, shape.dim), bias, device, dtype)
        self.w3 = None
        if not shape.ungated:
            self.w3 = linear(shape, (shape.dim, wide), bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, product, and back; or there and back."""
        # No result has a name: where nothing is kept, each goes as soon as it is used.
        if self.w3 is None:
            return self.w2(self.activation(self.w1(x)))
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class FeedForward(MLP):
    """The MLP of a block, on this rank's part of the stream."""

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, shape.ffn_dim // local.tensor, device, dtype, shape.mlp_bias)
        self.local = local

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return leave(super().forward(enter(x, self.local)), self.local)


def capped(logits: Tensor, cap: float) -> Tensor:
    """Logits between ``-cap`` and ``cap``; as they are where it is 0."""
    return torch.tanh(logits / cap) * cap if cap else logits


# ---- collectives ---------------------------------------------------------------------------------

# An operator names the degree whose ranks take part, its ``group``: so a recording says between
# whom bytes travel.


def _empty_gathered(x: Tensor, degree: int, group: str = "tensor") -> Tensor:
    """The pieces of ``degree`` ranks one after another in the first dimension."""
    return x.new_empty((x.shape[0] * degree, *x.shape[1:]))


def _empty_scattered(x: Tensor, degree: int, group: str = "tensor") -> Tensor:
    """This rank's piece of the sum, cut in the first dimension."""
    return x.new_empty((x.shape[0] // degree, *x.shape[1:]))


def _empty_reduced(x: Tensor, group: str = "tensor") -> Tensor:
    """The sum, in a buffer of its own."""
    return torch.empty_like(x)


def _empty_exchanged(x: Tensor, rows: int, group: str = "expert") -> Tensor:
    """``rows`` received from all ranks."""
    return x.new_empty((rows, *x.shape[1:]))


def operator(name: str, allocate: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that does the same with data and without."""
    made = torch.library.custom_op(f"shardwright::{name}", allocate, mutates_args=())
    made.register_fake(allocate)
    return made


gathered = operator("all_gather", _empty_gathered)
# Beside a product of the same pass that takes longer and does not wait for it.
gathered_beside = operator("all_gather_beside", _empty_gathered)
scattered = operator("reduce_scatter", _empty_scattered)
reduced = operator("all_reduce", _empty_reduced)
exchanged = operator("all_to_all", _empty_exchanged)


def all_gather(x: Tensor, dim: int, degree: int) -> Tensor:
    """``x`` of all ranks side by side in ``dim``; its gradient is reduced and scattered."""
    there = partial(_gather, dim=dim, degree=degree)
    back = partial(_scatter, dim=dim, degree=degree)
    return x if degree == 1 else _Exchange.apply(x, there, back)


def reduce_scatter(x: Tensor, dim: int, degree: int) -> Tensor:
    """This rank's part of the sum of ``x``, cut in ``dim``; its gradient is gathered."""
    there = partial(_scatter, dim=dim, degree=degree)
    back = partial(_gather, dim=dim, degree=degree)
    return x if degree == 1 else _Exchange.apply(x, there, back)


def all_reduce(x: Tensor, degree: int) -> Tensor:
    """The sum of ``x`` over ranks that then work alike; its gradient passes as it is."""
    return x if degree == 1 else _Exchange.apply(x, reduced, _as_it_is)


def copy_to_ranks(x: Tensor, degree: int) -> Tensor:
    """``x`` as it is, to ranks that each use it for their part; its gradient is summed."""
    return x if degree == 1 else _Exchange.apply(x, lambda it: it.view_as(it), reduced)


def gather_alike(x: Tensor, dim: int, degree: int) -> Tensor:
    """``x`` of all ranks side by side in ``dim`` for ranks that then work alike; of its gradient
    every rank keeps its own part, which DTensor clones, so that the whole gradient can go."""
    size = x.shape[dim]

    def back(grad: Tensor) -> Tensor:
        return grad.narrow(dim, 0, size).clone()

    return x if degree == 1 else _Exchange.apply(x, partial(_gather, dim=dim, degree=degree), back)


def all_to_all(x: Tensor, rows: int, degree: int) -> Tensor:
    """Rows of ``x`` sent to the ranks they belong to; ``rows`` come back."""
    sent = x.shape[0]

    def exchange(it: Tensor, rows: int) -> Tensor:
        return exchanged(it.contiguous(), rows)

    there, back = partial(exchange, rows=rows), partial(exchange, rows=sent)
    return x if degree == 1 else _Exchange.apply(x, there, back)


class _Exchange(torch.autograd.Function):
    """What goes ``there`` forward and ``back`` backward; neither may keep the tensor."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, there: Moves, back: Moves) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad), None, None


def _as_it_is(grad: Tensor) -> Tensor:
    return grad


def _gather(x: Tensor, dim: int, degree: int) -> Tensor:
    """The buffer that arrives; where pieces are not rows, a second one in which they lie right."""
    # Pieces arrive one after another. Where only dimensions of size 1 lie before ``dim`` that is
    # their order already.
    flat = gathered(x.contiguous(), degree)
    dim %= x.dim()
    if all(size == 1 for size in x.shape[:dim]):
        return flat.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return torch.cat(flat.chunk(degree), dim=dim)


def _scatter(x: Tensor, dim: int, degree: int) -> Tensor:
    """Pieces are laid one after another first, then summed into a buffer of their own."""
    dim %= x.dim()
    if dim:
        x = torch.cat(x.chunk(degree, dim=dim))
    return scattered(x.contiguous(), degree)
