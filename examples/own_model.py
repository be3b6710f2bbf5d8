"""A model of your own, planned and trained like the built-in ones; the job is own_model.toml.

An encoder and a decoder that share one embedding, which is the decoder's head too, learn to write
words backwards. The model is plain PyTorch and knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor, nn

LETTERS = 27  # and 0, which begins what is written
Example = tuple[tuple[Tensor, Tensor], Tensor]


class Reverser(nn.Module):
    """Letters [B, T] and what is written so far [B, T] -> logits of the next letters [B, T, V]."""

    def __init__(self, dim: int, layers: int, longest: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, dim)
        self.places = nn.Embedding(longest, dim)
        kept = {"dim_feedforward": 4 * dim, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, **kept) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(dim, 4, **kept) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        for table in (self.letters, self.places):
            nn.init.normal_(table.weight, std=dim**-0.5)

    def forward(self, word: Tensor, written: Tensor) -> Tensor:
        """All letters of the word, and those of its reverse that come before each place."""
        places = self.places.weight[: word.shape[1]]
        memory = self.letters(word) + places
        for layer in self.encoder:
            memory = layer(memory)
        x = self.letters(written) + places
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
        return nn.functional.linear(self.norm(x), self.letters.weight)


def build(batch: int, sequence: int, dim: int = 64, layers: int = 2) -> tuple[object, ...]:
    """The module, what it is called with, its loss, and what the loss compares with."""
    inputs, targets = example(batch, sequence, torch.Generator().manual_seed(0))
    return Reverser(dim, layers, sequence), inputs, loss, targets


def loss(logits: Tensor, reverse: Tensor) -> Tensor:
    """Mean cross entropy of the letters, in nats."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), reverse.flatten())


def batches(
    batch: int, sequence: int, rank: int, world_size: int, seed: int, start: int = 0
) -> Iterator[Example]:
    """Words without end, others on every rank: (inputs, targets) as ``build`` returns them. A run
    that goes on, on as many ranks or on others, has had ``start`` of them."""
    for number in count(start // batch + rank, world_size):
        yield example(batch, sequence, torch.Generator().manual_seed(1_000_000 * seed + number))


def example(batch: int, sequence: int, generator: torch.Generator) -> Example:
    """Words, their reverses one place later, and the reverses."""
    word = torch.randint(1, LETTERS, (batch, sequence), generator=generator)
    reverse = word.flip(1)
    written = nn.functional.pad(reverse, (1, 0))[:, :-1]
    return (word, written), reverse
