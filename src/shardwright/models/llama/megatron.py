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
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from shardwright.core.llama import LlamaShape, LocalShape
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
    has_data,
    reduce_scatter,
)
from shardwright.models.llama.products import (
    Given,
    columns,
    is_narrow,
    rows,
    settings_of,
    sum_in_place,
)

FP32 = torch.float32


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
        adds, narrow = fused.gradient_accumulation_fusion, is_narrow(x, local)
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
        sum_in_place(x)
    return x
