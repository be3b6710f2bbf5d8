"""Megatron-LM's own layers of a decoder: the same modules, that keep and take other memory.

Sources, Megatron-LM (core 0.14) and Transformer Engine 2: ``core/tensor_parallel/layers.py``,
``core/tensor_parallel/cross_entropy.py``, ``core/transformer/attention.py``, ``core/fusions``;
``dot_product_attention/backends.py``.
"""

# What differs from TorchTitan's, and why it is written again here: a product keeps this rank's
# part of the tokens and gathers the others again in its backward; queries, keys and values are
# results of one product; sums over tensor ranks are made in place; keys are not repeated for
# kernels that can do without; the loss overwrites a copy of the logits in fp32. With numbers
# everything computes what the other modules do, which a test holds; without, it makes the tensors.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import dropout, linear, scaled_dot_product_attention

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.core.megatron import MegatronSettings
from shardwright.models.llama.attention import (
    Attention,
    LatentAttention,
    Rotation,
    attends,
    attends_backward,
    repeat_heads,
    rotate,
)
from shardwright.models.llama.experts import MixtureOfExperts, grouped_product
from shardwright.models.llama.layers import (
    ACTIVATIONS,
    MLP,
    TOKENS,
    Context,
    FeedForward,
    Moves,
    all_gather,
    all_to_all,
    gathered,
    gathered_beside,
    has_data,
    reduce_scatter,
    scattered,
)

Given = torch.Tensor | None
FP32 = torch.float32


def settings_of(local: LocalShape) -> MegatronSettings:
    """How the layers of a rank are made that are Megatron's."""
    assert local.megatron is not None
    return local.megatron


# ---- products whose inputs or results are divided ------------------------------------------------


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
        narrow = narrow and _is_narrow(x, local)
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
        ctx.narrow = _is_narrow(x, local)
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


def _is_narrow(x: torch.Tensor, local: LocalShape) -> bool:
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
    _sum_in_place(x)
    return x


@torch.library.custom_op("shardwright::all_reduce_", mutates_args=("x",))
def _sum_in_place(x: torch.Tensor, group: str = "tensor") -> None:
    """The sum of ``x`` over ranks, where it is."""


_sum_in_place.register_fake(lambda x, group="tensor": None)


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


# ---- attention -----------------------------------------------------------------------------------


class MegatronCore(nn.Module):
    """Queries, keys, values [B, T, heads, head_dim] -> [B, T, heads x head_dim] (of a value's)."""

    def __init__(self, shape: LlamaShape, local: LocalShape) -> None:
        super().__init__()
        self.local, self.layers = local, settings_of(local)
        self.dropout = shape.attention_dropout or 0.0

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal attention by the kernel that is named."""
        repeats = query.shape[2] // key.shape[2]
        if self.layers.attention_backend in ("unfused", "local"):
            key, value = repeat_heads(key, repeats), repeat_heads(value, repeats)
            return self._by_operators(query, key, value)
        rate = self.dropout if self.training else 0.0
        if not has_data(query):
            # cuDNN's kernel keeps its result, which the projection keeps anyway; flash attention
            # keeps it in a layout of its own, and so does either over ranks that share a sequence.
            apart = self.layers.attention_backend == "flash" or self.local.context > 1
            found: torch.Tensor = _Kernel.apply(query, key, value, self.local.context, apart)
            return found
        parts = (part.transpose(1, 2) for part in (query, key, value))
        found = scaled_dot_product_attention(
            *parts, dropout_p=rate, is_causal=True, enable_gqa=repeats > 1
        )
        return found.transpose(1, 2).flatten(2)

    def _by_operators(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Probabilities, and what dropout leaves of them, as tensors."""
        size, length, heads, width = query.shape
        parts = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
        query, key, value = parts
        scores = torch.bmm(query, key.transpose(1, 2))
        context = self.local.context
        if context > 1:  # of all keys, though only this rank's are here
            scores = torch.cat([scores] * context, -1)
        shares = _softmax(scores, width**-0.5, self.layers.masked_softmax_fusion)
        del scores
        if self.dropout:
            shares = dropout(shares, self.dropout, self.training)
        found = torch.bmm(shares[..., :length], value)
        return found.unflatten(0, (size, heads)).transpose(1, 2).flatten(2)


class MegatronAttention(Attention):
    """[B, T, D] -> [B, T, D]; queries, keys and values come of one product."""

    core = MegatronCore

    def forward(self, x: torch.Tensor, cos: Rotation, sin: Rotation) -> torch.Tensor:
        """``x`` is this rank's part of the stream; so is what comes back."""
        query, key, value = (
            found.unflatten(-1, (-1, self.head_dim))
            for found in columns(x, (self.wq, self.wk, self.wv), self.local)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return rows(self.inner_attention(query, key, value), self.wo, self.local)


class MegatronLatent(LatentAttention):
    """[B, T, D] -> [B, T, D]; the few numbers are made of this rank's tokens, and gathered."""

    core = MegatronCore

    def forward(self, x: torch.Tensor, cos: Rotation, sin: Rotation) -> torch.Tensor:
        """``x`` is this rank's part of the stream; so is what comes back."""
        shape, local = self.shape, self.local
        if shape.q_lora_rank:
            (query,) = columns(self.q_norm(self.wq_a(x)), (self.wq_b,), local)
        else:
            (query,) = columns(x, (self.wq,), local)
        query = query.unflatten(-1, (self.heads, shape.head_dim))
        fixed, turned = query.split((self.unturned, shape.qk_rope_head_dim), dim=-1)
        query = torch.cat((fixed, rotate(turned, cos, sin)), dim=-1)
        few, turned = self.wkv_a(x).split((shape.kv_lora_rank, shape.qk_rope_head_dim), dim=-1)
        turned = all_gather(turned, TOKENS, local.stream_degree)
        turned = rotate(turned[:, :, None], cos, sin).expand(-1, -1, self.heads, -1)
        (pair,) = columns(self.kv_norm(few), (self.wkv_b,), local)
        pair = pair.unflatten(-1, (self.heads, -1))
        fixed, value = pair.split((self.unturned, shape.value_dim), dim=-1)
        # A copy, so that what it is a part of can go.
        key, value = torch.cat((fixed, turned), dim=-1), value.contiguous()
        del pair, fixed
        return rows(self.inner_attention(query, key, value), self.wo, local)


class _Kernel(torch.autograd.Function):
    """A stand-in that keeps queries, keys, values, a result and a sum for each query."""

    @staticmethod
    def forward(
        ctx: Context,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: int,
        apart: bool,
    ) -> torch.Tensor:
        ctx.keys = query.shape[1] * context // 2  # half of all pairs are masked
        if context > 1:  # keys and values of the next rank, and a result of every rank's
            _ = [torch.empty_like(part) for part in (key, value, key, value)]
        found, sums = attends(query, value, key, ctx.keys)
        found = found.flatten(2)
        _ = [torch.empty_like(found) for _ in range(context - 1)]
        ctx.save_for_backward(query, key, value, found.clone() if apart else found, sums)
        return found

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[Given, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        if ctx.keys > query.shape[1] // 2:
            _ = [torch.empty_like(part) for part in (key, value, key, value)]
        return *attends_backward(grad, query, key, value, key, ctx.keys), None, None


def _softmax(scores: torch.Tensor, scale: float, fused: bool) -> torch.Tensor:
    """Shares [heads, queries, keys] of scores of which later ones are masked: by one kernel, whose
    backward writes over the gradient that it is given, or in fp32, operator by operator."""
    if fused and scores.dtype != FP32 and not has_data(scores):
        found: torch.Tensor = _Softmax.apply(scores)
        return found
    queries, keys = scores.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1)
    wide = (scores.float() * scale).masked_fill_(later, -math.inf)
    return torch.softmax(wide, -1).to(scores.dtype)


class _Softmax(torch.autograd.Function):
    """Keeps its result alone."""

    @staticmethod
    def forward(ctx: Context, scores: torch.Tensor) -> torch.Tensor:
        found = scores.sigmoid()  # what the kernel reads and writes
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> torch.Tensor:
        return grad.mul_(1)


# ---- feed-forward --------------------------------------------------------------------------------


class MegatronMLP(FeedForward):
    """The MLP of a block, on this rank's part of the stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        return _mlp(self, x, self.local)


def _mlp(of: MLP, x: torch.Tensor, local: LocalShape) -> torch.Tensor:
    parts = [of.w1] if of.w3 is None else [of.w1, of.w3]
    fused = settings_of(local).bias_activation_fusion
    return rows(_activated(columns(x, parts, local), of.activation, fused), of.w2, local)


def _activated(
    parts: Sequence[torch.Tensor],
    activation: Moves,
    fused: bool,
    shares: torch.Tensor | None = None,
) -> torch.Tensor:
    """What is activated, times what that is a gate of, times a share of each row: by one kernel,
    which keeps what it is given, or one after the other."""
    if not fused or has_data(parts[0]):
        found = activation(parts[0])
        found = found * parts[1] if len(parts) > 1 else found
        return found if shares is None else found * shares[:, None].to(found.dtype)
    result: torch.Tensor = _Activated.apply(shares, *parts)
    return result


class _Activated(torch.autograd.Function):
    """A stand-in that keeps what it is given."""

    @staticmethod
    def forward(ctx: Context, shares: Given, *parts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(shares, *parts)
        # One operator that reads as much as the kernel does, and writes one result.
        return parts[0] * parts[1] if len(parts) > 1 else parts[0].sigmoid()

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[Given, ...]:
        shares, *parts = ctx.saved_tensors
        of_shares = None if shares is None else torch.empty_like(shares)
        return of_shares, *(grad * part for part in parts)


class MegatronExperts(MixtureOfExperts):
    """[B, T, D] -> [B, T, D]: every rank sends its own tokens to all ranks of the experts, which
    may share the width of each, and a share of a row is taken where its activation is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the stream in and out."""
        if has_data(x):
            return super().forward(x)
        local, fused = self.local, settings_of(self.local)
        tokens = x.flatten(0, 1)
        share, chosen = self._route(tokens)
        token_of = torch.argsort(chosen, stable=True) // self.shape.experts_per_token
        sent, width = len(token_of), local.expert_width_degree
        received = local.received_rows(self.shape, sent)
        found = all_gather(all_to_all(tokens[token_of], received, local.expert), 0, width)
        shares = all_gather(all_to_all(share, received, local.expert), 0, width)
        here = self.experts
        ends = torch.arange(len(here.w1), device=x.device)
        adds, narrow = fused.gradient_accumulation_fusion, _is_narrow(x, local)
        weights = [here.w1] if here.w3 is None else [here.w1, here.w3]
        parts = [grouped_product(found, weight, ends, adds, narrow) for weight in weights]
        del found
        activation = ACTIVATIONS[here.activation]
        inner = _activated(parts, activation, fused.bias_activation_fusion, shares)
        del parts
        found = reduce_scatter(grouped_product(inner, here.w2, ends, adds, narrow), 0, width)
        del inner
        found = all_to_all(found, sent, local.expert)
        if fused.deterministic_mode:  # torch's own, which keeps the rows to know their shape
            total = torch.zeros_like(tokens).index_add(0, token_of, found)
        else:
            total = _Returned.apply(found, token_of, len(tokens))
        total = total.view(x.shape)
        if self.shared_experts is not None:
            total = total + _mlp(self.shared_experts, x, local)
        return total


class _Returned(torch.autograd.Function):
    """A stand-in that adds rows up at their tokens and keeps where these are
    (``core/transformer/moe/moe_utils.py``, ``unpermute``)."""

    @staticmethod
    def forward(
        ctx: Context, found: torch.Tensor, token_of: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        ctx.save_for_backward(token_of)
        return found.new_zeros(tokens, found.shape[1]).index_add_(0, token_of, found)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[Given, ...]:
        (token_of,) = ctx.saved_tensors
        return grad[token_of], None, None


# ---- loss ----------------------------------------------------------------------------------------


def vocab_loss(
    logits: torch.Tensor, targets: torch.Tensor, local: LocalShape, unknown: int = 0
) -> torch.Tensor:
    """The mean cross entropy of logits [B, T, V / tensor ranks], but of the last tokens of a
    sequence, so many, whose targets are ``unknown``."""
    kind = settings_of(local).cross_entropy_loss_fusion
    found: torch.Tensor = _VocabLoss.apply(logits, targets, local.tensor, kind)
    return found[:, : found.shape[TOKENS] - unknown].mean() if unknown else found.mean()


class _VocabLoss(torch.autograd.Function):
    """Keeps the probabilities in fp32, made in the place of a copy of the logits; compiled
    (``native``) they are another tensor; Transformer Engine's loss keeps the gradient of the logits
    in their own place."""

    @staticmethod
    def forward(
        ctx: Context, logits: torch.Tensor, targets: torch.Tensor, degree: int, kind: str
    ) -> torch.Tensor:
        ctx.kind = kind
        columns = targets.where(targets < logits.shape[-1], 0)[..., None]
        if kind == "te" and not has_data(logits):
            ctx.save_for_backward(logits, columns)
            return logits.new_empty(targets.shape, dtype=FP32)
        wide = logits.float() if logits.dtype != FP32 or not has_data(logits) else logits.clone()
        wide -= _over_ranks(wide.amax(-1, keepdim=True), degree)
        picked = _over_ranks(wide.gather(-1, columns), degree)
        wide = wide.exp() if kind == "native" else wide.exp_()
        total = _over_ranks(wide.sum(-1, keepdim=True), degree)
        wide.div_(total)
        ctx.save_for_backward(wide, columns)
        return (total.log() - picked).squeeze(-1)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[Given, ...]:
        found, columns = ctx.saved_tensors
        if ctx.kind == "native":
            found = found.clone()
        found.scatter_add_(-1, columns, found.new_full((), -1.0).expand(columns.shape))
        return found.mul_(grad[..., None]), None, None, None


def _over_ranks(x: torch.Tensor, degree: int) -> torch.Tensor:
    """A number a token, of all tensor ranks."""
    if degree > 1:
        _sum_in_place(x)
    return x
