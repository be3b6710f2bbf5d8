"""Small models that are tracked, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shardwright.tracker.memory import MemoryTracker

FLOAT = 4
WORDS, WIDTH, ROWS, LENGTH = 11, 8, 3, 5


class Block(nn.Module):
    """``x + down(relu(up(x)))``, computed again in the backward if ``checkpointed``."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.reentrant = checkpointed  # None: not checkpointed at all

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Net(nn.Module):
    """An embedding, blocks, a head that may share its weight, a buffer and a module nobody uses."""

    def __init__(self, reentrant: bool | None = None, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(reentrant), Block(reentrant))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.idle = nn.Linear(2, 3)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(words)) * self.scale)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def words() -> torch.Tensor:
    return torch.zeros(ROWS, LENGTH, dtype=torch.long)


def train(
    make: Callable[[], nn.Module] = Net,
    *,
    steps: int = 1,
    microbatches: int = 1,
    fake: bool = False,
    warm: bool = False,
    **options: Any,
) -> MemoryTracker:
    """The tracker of some steps; ``warm``: after an untracked one."""
    with FakeTensorMode() if fake else nullcontext():
        torch.manual_seed(0)
        model = make()
        optimizer, batch = adam(model), words()

        def step() -> None:
            for _ in range(microbatches):
                model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        if warm:
            step()
        with MemoryTracker(model, optimizer, inputs=batch, **options) as tracker:
            for _ in range(steps):
                step()
    return tracker


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
