"""A llama with frozen weights whose queries and values are trained by LoRA, as LitGPT ran it in
October 2023: one product for queries, keys and values, dropout before the factors, everything in
bf16 but what the loss sees, and a loss of pieces of 128 tokens.

``build`` is a job's ``model.python``: on the meta device, for estimates alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

RANK, SCALE, DROPPED, PIECE = 8, 2.0, 0.05, 128


class Norm(nn.Module):
    """Root mean square norm in the dtype of its input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5))


class Attention(nn.Module):
    """Causal attention; the factors' update is laid between zeros for the keys and added."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(dim, 3 * dim, bias=False)
        self.lora_a = nn.Parameter(torch.zeros(2 * RANK, dim))
        self.lora_b = nn.Parameter(torch.zeros(2 * dim, RANK, 1))
        self.dropout = nn.Dropout(DROPPED)
        self.proj = nn.Linear(dim, dim, bias=False)
        columns = [*range(dim), *range(2 * dim, 3 * dim)]
        self.columns: Tensor
        self.register_buffer("columns", torch.tensor(columns), persistent=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        low = functional.linear(self.dropout(x), self.lora_a).transpose(1, 2)
        update = functional.conv1d(low, self.lora_b, groups=2).transpose(1, 2)
        rows = update.transpose(0, 1).reshape(batch * tokens, 2 * dim)
        laid = rows.new_zeros(batch * tokens, 3 * dim).index_copy(1, self.columns, rows)
        found = self.linear(x) + laid.view(tokens, batch, -1).transpose(0, 1) * SCALE
        parts = found.view(batch, tokens, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        query, key = turned(parts[0], turn), turned(parts[1], turn)
        seen = functional.scaled_dot_product_attention(query, key, parts[2], is_causal=True)
        out: Tensor = self.proj(seen.transpose(1, 2).reshape(batch, tokens, dim))
        return out


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions: ``turn`` [2, tokens, width] has cosines and sines."""
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-second, first), -1) * turn[1]


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, dim: int, heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = Norm(dim), Norm(dim)
        self.attention = Attention(dim, heads)
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), turn)
        h = self.norm_2(x)
        out: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


class Decoder(nn.Module):
    """Logits of pieces of the tokens, in fp32."""

    def __init__(
        self, layers: int, dim: int, heads: int, ffn_dim: int, vocab: int, tokens: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, ffn_dim) for _ in range(layers))
        self.norm = Norm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        turn = torch.zeros(2, tokens, dim // heads)
        self.register_buffer("turn", turn, persistent=False)

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.embedding(ids)
        for block in self.layers:
            x = block(x, self.turn)
        logits = [self.head(piece) for piece in self.norm(x).split(PIECE, 1)]
        return [piece.float() for piece in logits]


def build(
    layers: int = 32,
    dim: int = 4096,
    heads: int = 32,
    ffn_dim: int = 11008,
    vocab: int = 32000,
    tokens: int = 1304,
    batch: int = 1,
) -> tuple[Any, ...]:
    """Module, inputs, loss and targets of Llama 2's widths; only LoRA's factors are trained."""
    with torch.device("meta"):
        module = Decoder(layers, dim, heads, ffn_dim, vocab, tokens).bfloat16()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora" in name)
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return module, (ids,), loss, ids


def loss(logits: list[Tensor], targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token, piece by piece."""
    pieces = [*logits[:-1], logits[-1][:, :-1]]
    found = [
        functional.cross_entropy(piece.flatten(0, 1), its.flatten(), reduction="none")
        for piece, its in zip(pieces, torch.split(targets[:, 1:], PIECE, 1), strict=True)
    ]
    return torch.cat(found).mean()
