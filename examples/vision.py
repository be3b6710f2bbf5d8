"""A vision model of your own; the job is vision.toml.

A small ResNet tells stripes by their direction. Its BatchNorms have buffers: every rank keeps the
statistics of its own images, as in DistributedDataParallel without synchronised norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor, nn

CLASSES = 8
SIDE = 24


class Block(nn.Module):
    """Two convolutions around a shortcut; with a stride half as large and twice as wide."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inner != outer:
            conv = nn.Conv2d(inner, outer, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H', W']."""
        found = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(found)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """Images [B, 1, H, W] -> logits [B, classes]."""

    def __init__(self, width: int, depths: list[int]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            inner, outer = width * 2 ** max(0, stage - 1), width * 2**stage
            blocks = [Block(inner, outer, 2 if stage else 1)]
            blocks += [Block(outer, outer, 1) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(outer, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """One logit for each direction."""
        x = self.stages(self.norm(self.stem(images)).relu())
        return self.head(x.mean((2, 3)))


def build(batch: int, width: int = 16, depths: list[int] | None = None) -> tuple[object, ...]:
    """The module, images, the loss of logits and directions, and the directions."""
    images, directions = stripes(batch, torch.Generator().manual_seed(0))
    model = ResNet(width, depths or [2, 2])
    return model, images, nn.functional.cross_entropy, directions


def batches(
    batch: int, rank: int, world_size: int, seed: int, start: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and their directions without end, others on every rank. A run that goes on, on as many
    ranks or on others, has had ``start`` of them."""
    for number in count(start // batch + rank, world_size):
        yield stripes(batch, torch.Generator().manual_seed(1_000_000 * seed + number))


def stripes(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stripes in noise [B, 1, H, W], and in which of the directions they run [B]."""
    directions = torch.randint(CLASSES, (batch,), generator=generator)
    angles = directions * (math.pi / CLASSES)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    along = x * angles.cos()[:, None, None] + y * angles.sin()[:, None, None]
    phases = torch.rand(batch, 1, 1, generator=generator) * 2 * math.pi
    noise = torch.randn(batch, SIDE, SIDE, generator=generator)
    return ((along + phases).sin() + noise)[:, None], directions
