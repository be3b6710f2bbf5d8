"""A recommender of one's own: two towers over embeddings of uneven sizes, as plain PyTorch.

One tower knows who asks and what was seen last, the other what is shown. Nothing here knows of
ranks: the plan says which tables are cut, and where their rows lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor, nn

USERS, ITEMS, SHOPS = 200_000, 60_000, 50
SEEN = 8  # items that a user has seen last
DIM = 32

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class Recommender(nn.Module):
    """Users [B], items that they have seen [B, SEEN], items [B], shops [B] -> logits [B]."""

    def __init__(self, users: int = USERS, items: int = ITEMS, dim: int = DIM) -> None:
        super().__init__()
        self.users = nn.Embedding(users, dim)
        self.seen = nn.EmbeddingBag(items, dim, mode="mean")
        self.items = nn.Embedding(items, dim)
        self.shops = nn.Embedding(SHOPS, 8)
        self.asking = nn.Sequential(nn.Linear(2 * dim, 64), nn.ReLU(), nn.Linear(64, dim))
        self.shown = nn.Sequential(nn.Linear(dim + 8, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, users: Tensor, seen: Tensor, items: Tensor, shops: Tensor) -> Tensor:
        """The product of what the two towers say."""
        asking = self.asking(torch.cat([self.users(users), self.seen(seen)], 1))
        shown = self.shown(torch.cat([self.items(items), self.shops(shops)], 1))
        return (asking * shown).sum(1)


def example(
    batch: int, generator: torch.Generator, users_in_all: int = USERS, items_in_all: int = ITEMS
) -> tuple[Inputs, Tensor]:
    """A batch in which a user likes the items of one half, and the clicks."""
    users = torch.randint(users_in_all, (batch,), generator=generator)
    seen = torch.randint(items_in_all, (batch, SEEN), generator=generator)
    items = torch.randint(items_in_all, (batch,), generator=generator)
    shops = torch.randint(SHOPS, (batch,), generator=generator)
    return (users, seen, items, shops), ((users + items) % 2).float()


def build(
    batch: int, users: int = USERS, items: int = ITEMS, dim: int = DIM
) -> tuple[nn.Module, Inputs, nn.Module, Tensor]:
    """For ``[model] python``."""
    inputs, clicks = example(batch, torch.Generator().manual_seed(0), users, items)
    return Recommender(users, items, dim), inputs, nn.BCEWithLogitsLoss(), clicks


def batches(
    batch: int, rank: int, world_size: int, seed: int, start: int = 0
) -> Iterator[tuple[Inputs, Tensor]]:
    """For ``[data] python``: other rows on every rank. A run that goes on, on as many ranks or on
    others, has had ``start`` of them."""
    for number in count(start // batch + rank, world_size):
        yield example(batch, torch.Generator().manual_seed(1_000_000 * seed + number))
