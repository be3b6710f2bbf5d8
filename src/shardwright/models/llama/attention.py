"""Causal attention with grouped heads of keys, whole or divided by heads and by sequence."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from shardwright.core.llama import LlamaShape
from shardwright.core.llama_local import LocalShape
from shardwright.models.llama.linear import Device, Linear, RMSNorm
from shardwright.models.llama.ring import ring_attention
from shardwright.models.llama.rotary import rotate
from shardwright.models.llama.streams import enter, leave


class Attention(nn.Module):
    """[B, T, D] -> [B, T, D]; keys and values are repeated for the heads that share them, as
    TorchTitan does, so the kernel sees as many heads of keys as of queries.

    A sliding window is not applied: it changes values where T is longer, never bytes.
    """

    def __init__(
        self, shape: LlamaShape, local: LocalShape, device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.local = local
        self.heads, self.kv_heads = local.heads(shape), local.kv_heads(shape)
        self.head_dim = shape.head_dim
        queries, keys = self.heads * shape.head_dim, self.kv_heads * shape.head_dim
        bias = shape.attention_bias
        self.wq = Linear(shape.dim, queries, bias, device=device, dtype=dtype)
        self.wk = Linear(shape.dim, keys, bias, device=device, dtype=dtype)
        self.wv = Linear(shape.dim, keys, bias, device=device, dtype=dtype)
        self.wo = Linear(queries, shape.dim, shape.output_bias, device=device, dtype=dtype)
        self.inner_attention = CoreAttention(local.context)
        self.q_norm = self.k_norm = None
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``x`` is this rank's part of the stream; so is what comes back."""
        x = enter(x, self.local)
        size, length, _ = x.shape
        query = self.wq(x).view(size, length, self.heads, self.head_dim)
        key = self.wk(x).view(size, length, self.kv_heads, self.head_dim)
        value = self.wv(x).view(size, length, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        repeats = self.heads // self.kv_heads
        key, value = repeat_heads(key, repeats), repeat_heads(value, repeats)
        found = self.inner_attention(*(part.transpose(1, 2) for part in (query, key, value)))
        joined = found.transpose(1, 2).reshape(size, length, -1)
        return leave(self.wo(joined), self.local)


class CoreAttention(nn.Module):
    """Queries, keys, values [B, heads, T, head_dim] -> [B, heads, T, head_dim], over the tokens of
    all context ranks. A module of its own, so that a policy can compute it again."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.context = context

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal attention; the kernel forms no [T, T] matrix."""
        if self.context > 1:
            return ring_attention(query, key, value, self.context)
        return scaled_dot_product_attention(query, key, value, is_causal=True)


def repeat_heads(x: torch.Tensor, repeats: int) -> torch.Tensor:
    """[B, T, heads, head_dim] -> [B, T, heads x repeats, head_dim], a copy unless it is once."""
    if repeats == 1:
        return x
    size, length, heads, width = x.shape
    wide = x[:, :, :, None, :].expand(size, length, heads, repeats, width)
    return wide.reshape(size, length, heads * repeats, width)
