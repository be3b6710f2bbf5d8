"""A model of one's own and its batches, as JOB names them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor, nn

WORDS, CLASSES, LENGTH = 20_000, 10, 12


class Classifier(nn.Module):
    """Ids [B, LENGTH] -> logits [B, CLASSES]. It knows of no ranks."""

    def __init__(self, dim: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden.mean(1))
        return logits


def example(batch: int, generator: torch.Generator) -> tuple[tuple[Tensor], Tensor]:
    """Ids, some words far commoner than others, and the class to which every second word points."""
    ids = (WORDS * torch.rand(batch, LENGTH, generator=generator) ** 4).long()
    classes = torch.randint(CLASSES, (batch,), generator=generator)
    ids[:, ::2] += classes[:, None] - ids[:, ::2] % CLASSES
    return (ids,), classes


def build(batch: int, dim: int = 64) -> tuple[nn.Module, tuple[Tensor], nn.Module, Tensor]:
    """The module, what it is called with, its loss of result and targets, and the targets."""
    inputs, targets = example(batch, torch.Generator().manual_seed(0))
    return Classifier(dim), inputs, nn.CrossEntropyLoss(), targets


def batches(
    batch: int, rank: int, world_size: int, seed: int, start: int = 0
) -> Iterator[tuple[tuple[Tensor], Tensor]]:
    """Inputs and targets of every step, other ones on every rank. A run that goes on, on as many
    ranks or on others, has had ``start`` samples already."""
    for number in count(start // batch + rank, world_size):
        yield example(batch, torch.Generator().manual_seed(1_000_000 * seed + number))
