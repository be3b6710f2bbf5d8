"""What several of the architectures are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, Any]


@dataclass
class Output:
    """What a forward gives."""

    loss: torch.Tensor
    logits: torch.Tensor


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    """The mean cross-entropy of every word but the first."""
    if labels is None:
        return logits.new_zeros(())
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class Attention(nn.Module):
    """Of one's own words or of another sequence's, with groups of heads that share keys."""

    def __init__(
        self, width: int, heads: int, key_heads: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.key_heads = key_heads or heads
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, self.key_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.key_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=bias)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        memory = x if memory is None else memory
        query = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.k_proj(memory).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        value = self.v_proj(memory).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        if rotary is not None:
            query, key = _turned(query, *rotary), _turned(key, *rotary)
        key = key.repeat_interleave(self.heads // self.key_heads, dim=1)
        value = value.repeat_interleave(self.heads // self.key_heads, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out


def _turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
