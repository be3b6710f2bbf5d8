"""A small GPT: embeddings, pre-norm blocks of causal attention and a GELU MLP, a head of its own.

Weights start as in GPT-2: normal with deviation 0.02, what is added to the residual stream
divided by sqrt(2 layers), biases 0, norms 1. Every tensor has a generator of its own, so that a
rank can make any part of it and it comes out the same under every plan.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import skip_init

from shardwright.job.job import Job
from shardwright.models.start import Started, generator_of

DEVIATION = 0.02
Device = torch.device | str | None


class Embed(nn.Module):
    """Tokens [B, T] int64 -> [B, T, D]: what the token is plus where it stands."""

    def __init__(self, vocab: int, sequence: int, dim: int, device: Device) -> None:
        super().__init__()
        # Without torch's own starting values, which would be drawn and then overwritten.
        self.token = skip_init(nn.Embedding, vocab, dim, device=device or "cpu")
        self.position = skip_init(nn.Embedding, sequence, dim, device=device or "cpu")

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] with T at most the job's sequence."""
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class GPTBlock(nn.Module):
    """Attention over what came before, then an MLP at each position; [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, heads: int, ffn_dim: int, device: Device) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = skip_init(nn.LayerNorm, dim, device=device or "cpu")
        self.qkv = skip_init(nn.Linear, dim, 3 * dim, device=device or "cpu")
        self.proj = skip_init(nn.Linear, dim, dim, device=device or "cpu")
        self.norm2 = skip_init(nn.LayerNorm, dim, device=device or "cpu")
        self.up = skip_init(nn.Linear, dim, ffn_dim, device=device or "cpu")
        self.down = skip_init(nn.Linear, ffn_dim, dim, device=device or "cpu")

    def forward(self, x: Tensor) -> Tensor:
        """One block; nothing outside the residual stream is handed on."""
        x = x + self.proj(self._attend(self.qkv(self.norm1(x))))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    def _attend(self, qkv: Tensor) -> Tensor:
        """Queries, keys and values [B, T, 3 D] -> [B, T, D]; the kernel forms no [T, T] matrix."""
        size, length, width = qkv.shape
        query, key, value = (
            part.view(size, length, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, -1)
        )
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        return found.transpose(1, 2).reshape(size, length, width // 3)


class Head(nn.Module):
    """[B, T, D] -> logits [B, T, V]."""

    def __init__(self, dim: int, vocab: int, device: Device) -> None:
        super().__init__()
        self.norm = skip_init(nn.LayerNorm, dim, device=device or "cpu")
        self.vocab = skip_init(nn.Linear, dim, vocab, bias=False, device=device or "cpu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the token that follows each position."""
        return self.vocab(self.norm(x))


class Transformer(Started):
    """Embeddings, blocks, head; gives logits [B, T, V]."""

    def __init__(self, job: Job, device: Device = None) -> None:
        super().__init__()
        section = job.model
        self.seed = job.train.seed
        self.embed = Embed(section.vocab, job.batch.sequence, section.dim, device)
        self.layers = nn.ModuleList(
            GPTBlock(section.dim, section.heads, section.ffn_dim or 4 * section.dim, device)
            for _ in range(section.layers)
        )
        self.head = Head(section.dim, section.vocab, device)
        self.shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}
        if torch.device(device or "cpu").type != "meta":
            self.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] int64 -> logits [B, T, V]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def _start(self, fqn: str) -> Tensor:
        shape = self.shapes[fqn]
        if len(shape) == 1:
            module, _, name = fqn.rpartition(".")
            is_norm = name == "weight" and "norm" in module.rpartition(".")[2]
            return torch.full(shape, 1.0 if is_norm else 0.0)
        deviation = DEVIATION
        if fqn.endswith((".proj.weight", ".down.weight")):
            deviation /= math.sqrt(2 * len(self.layers))
        generator = generator_of(self.seed, fqn)
        return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over all tokens, in nats, computed in fp32: logits [B, T, V], targets
    [B, T] int64."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
