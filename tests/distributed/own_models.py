"""Functions for ``[model] python`` and ``[data] python``: public architectures, as users write
them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from public_models import MODELS


def build(name: str) -> Any:
    """A model with its own kind of inputs and the loss that it gives itself."""
    model = MODELS[name]().double()
    return model, MODELS[name].batch(torch.default_generator), _loss


def deep(width: int = 96, depth: int = 12) -> Any:
    """Many layers, of which a unit is one."""
    layers = [torch.nn.Linear(width, width) for _ in range(depth)]
    for layer in layers:
        torch.nn.init.trunc_normal_(layer.weight, std=0.02)
    return torch.nn.Sequential(*layers), torch.randn(2, width)


class Recommender(torch.nn.Module):
    """A dense part that runs before an embedding is looked up, which gets what the model got."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = torch.nn.Sequential(
            torch.nn.Linear(3, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)
        )
        self.user = torch.nn.Embedding(40_000, 16)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (self.bottom(dense) * self.user(ids)).sum(1).square().mean()


def recommender(batch: int = 256) -> Any:
    """One embedding that is worth a table."""
    inputs = (torch.randn(batch, 3), torch.randint(40_000, (batch,)))
    return Recommender(), inputs


class Adapted(torch.nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = torch.nn.Linear(width, width).requires_grad_(False)
        self.down = torch.nn.Linear(width, rank, bias=False)
        self.up = torch.nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted(width: int = 13, depth: int = 4) -> Any:
    """Layers that are frozen but for an adapter, between a frozen one and one that learns."""
    first = torch.nn.Linear(width, width).requires_grad_(False)
    layers = [Adapted(width, 3) for _ in range(depth)]
    model = torch.nn.Sequential(first, torch.nn.Sequential(*layers), torch.nn.Linear(width, 1))
    return model.double(), torch.randn(4, width, dtype=torch.float64)


class Spared(torch.nn.Module):
    """Layers with a parameter each that nothing uses, the last ``idle`` of them not used at all,
    and a layer beside them."""

    def __init__(self, width: int, depth: int, idle: int) -> None:
        super().__init__()
        self.idle = idle
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        for layer in self.layers:
            layer.spare = torch.nn.Parameter(torch.ones(3))
        self.head = torch.nn.Linear(width, 1)
        self.other = torch.nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: len(self.layers) - self.idle]:
            x = torch.tanh(layer(x))
        return self.head(x)


def spared(width: int = 13, depth: int = 5, idle: int = 1, single: bool = False) -> Any:
    """A model of which much gets no gradient, in fp64, or in fp32."""
    dtype = torch.float32 if single else torch.float64
    return Spared(width, depth, idle).to(dtype), torch.randn(4, width, dtype=dtype)


class Dropping(torch.nn.Module):
    """A block that draws random numbers between two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 3 * width), torch.nn.Linear(3 * width, width)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


def dropping(width: int = 13, depth: int = 4) -> Any:
    """Blocks with dropout, as many as are worth a series, and a layer that reads them."""
    blocks = torch.nn.Sequential(*(Dropping(width) for _ in range(depth)))
    model = torch.nn.Sequential(blocks, torch.nn.Linear(width, 1))
    return model.double(), torch.randn(4, width, dtype=torch.float64)


class Paired(torch.nn.Module):
    """Layers that are lists of two parts, which the whole model calls, each its own way round."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = (
            torch.nn.ModuleList([torch.nn.Linear(width, width), Dropping(width)])
            for _ in range(depth)
        )
        self.layers = torch.nn.ModuleList(layers)
        self.out = torch.nn.Linear(width, 1)
        for part in self.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in self.layers:
            x = torch.tanh(first(x)) + x
            x = second(x) + x
        return self.out(x)


def paired(width: int = 13, depth: int = 6) -> Any:
    """Of the mean of the result."""
    return Paired(width, depth).double(), torch.randn(4, width, dtype=torch.float64)


class Scaled(Paired):
    """Whose lists have a parameter, too, which the model reads."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        for layer in self.layers:
            layer.append(torch.nn.ParameterList([torch.nn.Parameter(torch.ones(width))]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second, (scale,) in self.layers:
            x = second(x) * scale + x
            x = torch.tanh(first(x)) + x
        return self.out(x)


def scaled(width: int = 13, depth: int = 6) -> Any:
    """Of the mean of the result."""
    return Scaled(width, depth).double(), torch.randn(4, width, dtype=torch.float64)


Calls = list[tuple[int, int]]  # a layer, and which of its parts


def calls_of(order: str, depth: int) -> Calls:
    """Orders in which a step may call the two parts of every layer."""
    plain = [(k, p) for k in range(depth) for p in (0, 1)]
    orders = {
        "a b a": [*((k, p) for k in range(depth) for p in (0, 1, 0)), *plain[1::2]],
        "a a b b": [call for call in plain for _ in range(2)],
        "loop": 3 * plain,
        "there and back": plain + plain[::-1],
        "back to front": plain[::-1],
        "few twice": [*plain, *plain[1:4], plain[0]],
    }
    return orders[order]


class Called(Paired):
    """Which calls parts in an order of its own, some of them several times."""

    def __init__(self, width: int, depth: int, order: str) -> None:
        super().__init__(width, depth)
        self.calls = calls_of(order, depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, part in self.calls:
            x = torch.tanh(self.layers[layer][part](x)) + x
        return self.out(x)


def called(order: str, width: int = 13, depth: int = 5) -> Any:
    """Of the mean of the result."""
    return Called(width, depth, order).double(), torch.randn(4, width, dtype=torch.float64)


class Twins(torch.nn.Module):
    """Two branches through the same blocks, to heads that have one layer between them; and a layer
    that runs in evaluation alone."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Dropping(width) for _ in range(depth))
        for block in self.blocks:
            block.drop.p = 0.0
        both = torch.nn.Linear(width, width)
        heads = (torch.nn.Sequential(both, torch.nn.Linear(width, 3)) for _ in range(2))
        self.near, self.far = heads
        self.shown = torch.nn.Linear(width, width)

    def _branch(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.training else self.shown(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self._branch(x), self._branch(x.flip(1))
        return self.near(one) * self.far(other - one)


def twins(width: int = 13, depth: int = 5) -> Any:
    """Of the mean of the result."""
    return Twins(width, depth).double(), torch.randn(4, width, dtype=torch.float64)


def batches_of_adapted(rank: int, seed: int) -> Iterator[Any]:
    """Inputs that differ from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        yield torch.randn(4, 13, dtype=torch.float64, generator=generator)


def _loss(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result["loss"] if isinstance(result, dict) else result.loss
    return loss


def _batches(rank: int, seed: int, name: str) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        yield MODELS[name].batch(generator)


for _name in MODELS:
    globals()[f"batches_of_{_name}"] = partial(_batches, name=_name)
