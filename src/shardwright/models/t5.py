"""An encoder and a decoder in the manner of T5: biases of distances instead of positions, norms
before sublayers, one embedding for both sides. A function for ``[model] python``."""

# Attention is written out, since the bias of distances goes into the scores before the softmax: the
# matrix of scores is kept for the backward, and an estimate has to see it.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.core.t5 import T5Shape
from shardwright.tracker.tensors import DTYPES

Masked = Tensor | None


def build(batch: int, sequence: int, **sizes: Any) -> tuple[nn.Module, Any, Any, Tensor]:
    """A T5 of these sizes (``T5Shape``) and a batch for it, [batch, sequence] on either side."""
    shape = T5Shape(**sizes)
    # Counted and not drawn, so that every run of the function gives the same batch.
    ids = torch.arange(batch * sequence).remainder(shape.vocab).view(batch, sequence)
    return T5(shape).to(DTYPES[shape.dtype]), (ids, ids.clone()), loss, ids.flip(-1)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of ``logits`` [B, T, V] at ``targets`` [B, T]."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class T5(nn.Module):
    """Ids of both sides [B, S] and [B, T] -> logits [B, T, V]."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.shared = nn.Embedding(shape.vocab, shape.dim)
        self.encoder = Stack(shape, shape.layers, decodes=False)
        self.decoder = Stack(shape, shape.decoder_layers, decodes=True)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        self.scale = shape.dim**-0.5 if shape.tied else None
        if shape.tied:
            self.head.weight = self.shared.weight

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        """What comes next in ``decoder_ids``, of which the encoder reads ``ids``."""
        memory = self.encoder(self.shared(ids))
        states = self.decoder(self.shared(decoder_ids), memory)
        return self.head(states if self.scale is None else states * self.scale)


class Stack(nn.Module):
    """Blocks that all add the same bias of distances to their scores."""

    def __init__(self, shape: T5Shape, layers: int, *, decodes: bool) -> None:
        super().__init__()
        self.decodes, self.buckets, self.farthest = decodes, shape.buckets, shape.farthest
        self.distances = nn.Embedding(shape.buckets, shape.heads)
        self.layers = nn.ModuleList(T5Block(shape, decodes=decodes) for _ in range(layers))
        self.norm = nn.RMSNorm(shape.dim, shape.norm_eps)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, memory: Masked = None) -> Tensor:
        """[B, T, D] -> [B, T, D], with what the encoder gave as ``memory``."""
        x, bias = self.dropout(x), self.bias(x)
        for layer in self.layers:
            x = layer(x, bias, memory)
        return self.dropout(self.norm(x))

    def bias(self, x: Tensor) -> Tensor:
        """[1, H, T, T]: what is added to the score of two places, nothing behind a decoder's."""
        places = torch.arange(x.shape[1], device=x.device)
        away = places[None] - places[:, None]
        found = self.distances(bucket(away, self.buckets, self.farthest, both=not self.decodes))
        found = found.permute(2, 0, 1)[None]
        if not self.decodes:
            return found
        # A finite minimum: -inf times 0 would be no number where nothing is masked.
        return found + (away > 0) * torch.finfo(found.dtype).min


def bucket(away: Tensor, buckets: int, farthest: int, *, both: bool) -> Tensor:
    """The bucket of every distance: near ones have their own, farther ones share them on a scale of
    logarithms up to ``farthest``; of both directions each has half, otherwise only what lies before
    counts."""
    found = torch.zeros_like(away)
    if both:
        buckets //= 2
        found, away = (away > 0) * buckets, away.abs()
    else:
        away = (-away).clamp(min=0)
    near = buckets // 2
    share = (away.clamp(min=1) / near).log() / math.log(farthest / near)
    far = (near + share * (buckets - near)).long().clamp(max=buckets - 1)
    return found + torch.where(away < near, away, far)


class T5Block(nn.Module):
    """Attention to its own side, in a decoder to the other one, and a feed-forward."""

    def __init__(self, shape: T5Shape, *, decodes: bool) -> None:
        super().__init__()
        self.attention = T5Attention(shape)
        self.cross = T5Attention(shape) if decodes else None
        self.feed_forward = T5FeedForward(shape)
        self.norms = nn.ModuleList(
            nn.RMSNorm(shape.dim, shape.norm_eps) for _ in range(3 if decodes else 2)
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, bias: Tensor, memory: Masked = None) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        y = self.norms[0](x)
        x = x + self.dropout(self.attention(y, y, bias))
        if self.cross is not None:
            x = x + self.dropout(self.cross(self.norms[1](x), memory))
        return x + self.dropout(self.feed_forward(self.norms[-1](x)))


class T5Attention(nn.Module):
    """Scores that are not scaled, in fp32 where they become shares."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.width, wide = shape.head_dim, shape.heads * shape.head_dim
        self.q, self.k, self.v = (nn.Linear(shape.dim, wide, bias=False) for _ in range(3))
        self.o = nn.Linear(wide, shape.dim, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, seen: Tensor, bias: Masked = None) -> Tensor:
        """Places of ``x`` [B, T, D] look at those of ``seen`` [B, S, D] -> [B, T, D]."""
        q, k, v = (
            part(of).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for part, of in ((self.q, x), (self.k, seen), (self.v, seen))
        )
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        # In fp32 as in transformers, whatever the scores are computed in.
        shares = self.dropout(scores.float().softmax(-1).to(scores.dtype))
        return self.o((shares @ v).transpose(1, 2).flatten(2))


class T5FeedForward(nn.Module):
    """One wide layer between two, in later models a gated one."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False) if shape.gated else None
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        if self.gate is None:
            return self.down(self.dropout(self.up(x).relu()))
        gate = functional.gelu(self.gate(x), approximate="tanh")
        return self.down(self.dropout(gate * self.up(x)))
