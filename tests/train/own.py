"""Functions of a user's own for ``[model] python`` and ``[data] python``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Made = Any


class Scorer(nn.Module):
    """Numbers [B, 4] and a weight for each -> one number for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.layers(x).squeeze(1) * weight


def build(batch: int) -> Made:
    """With targets."""
    inputs = {"x": torch.randn(batch, 4), "weight": torch.rand(batch)}
    return Scorer(), inputs, nn.functional.mse_loss, torch.randn(batch)


def bare(batch: int) -> Made:
    """A module and its input alone."""
    return nn.Linear(4, 2), torch.randn(batch, 4)


def closed(batch: int) -> Made:
    """The loss has the targets itself."""
    targets = torch.randn(batch)
    return nn.Linear(4, 1), torch.randn(batch, 4), lambda y: (y.squeeze(1) - targets).square().sum()


def from_numpy() -> Made:
    """Reads memory while it builds, which nothing can note."""
    model = nn.Linear(4, 2)
    model.scale = float(torch.randn(3).numpy().sum())
    return model, torch.randn(2, 4)


class Own:
    """A task of its own: sums of windows of numbers, the last of which are held out."""

    bad_rows = 0

    def __init__(self, width: int) -> None:
        self.width = width

    def model(self, device: torch.device) -> nn.Module:
        return nn.Linear(self.width, 1).to(device)

    def batches(self, rank: int, world_size: int) -> Iterator[Made]:
        generator = np.random.default_rng(rank)
        while True:
            x = generator.standard_normal((3, self.width), dtype=np.float32)
            yield {"x": x, "y": x.sum(1, keepdims=True)}

    def loss(self, model: nn.Module, batch: Made) -> Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    def held_out(self, rank: int, world_size: int) -> Iterator[Made]:
        yield next(self.batches(1000 + rank, world_size)), np.arange(3) * world_size + rank

    def scores(self, model: nn.Module, batch: Made, numbers: np.ndarray) -> np.ndarray:
        losses = (model(batch["x"]) - batch["y"]).square().squeeze(1).numpy()
        return np.stack([numbers, np.ones(3), losses], 1)


def task(width: int = 5) -> Own:
    return Own(width)


# ---- data ----------------------------------------------------------------------------------------


def good(batch: int, rank: int, seed: int) -> Iterator[Made]:
    """Arrays and tensors."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    while True:
        x = torch.randn(batch, 4, generator=generator)
        yield {"x": x.numpy(), "weight": torch.ones(batch)}, x.sum(1)


def ends(batch: int) -> list[Made]:
    return [next(good(batch, 0, 0))] * 2


def raises(batch: int, rank: int) -> Iterator[Made]:
    yield next(good(batch, rank, 0))
    if rank == 1:
        raise OSError("the disk is gone")
    yield from good(batch, rank, 0)


def without_targets(batch: int) -> Iterator[Made]:
    yield next(good(batch, 0, 0))[0]


def another_dtype(batch: int) -> Iterator[Made]:
    inputs, targets = next(good(batch, 0, 0))
    yield {**inputs, "x": inputs["x"].astype(np.float64)}, targets


def another_name(batch: int) -> Iterator[Made]:
    inputs, targets = next(good(batch, 0, 0))
    yield {"x": inputs["x"], "weights": inputs["weight"]}, targets


def odd_targets(batch: int) -> Iterator[Made]:
    yield next(good(batch, 0, 0))[0], torch.ones(batch, 1)


def nothing() -> None:
    return None


def wants_width(width: int) -> Iterator[Made]:
    yield width
