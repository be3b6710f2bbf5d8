"""Small models as libraries build them, made up from a number: parts in lists, shared, called again
and again in orders of their own, skipped around, frozen, tied."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

TOKENS, CLASSES = 37, 5


class Norm(nn.Module):
    """A norm with a parameter of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


class Attention(nn.Module):
    """Of which several heads share keys and values."""

    def __init__(self, dim: int, heads: int, shared: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.kv, self.fused = heads, heads // shared, fused
        self.q = nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, dim // shared, bias=False) for _ in range(2))
        self.o = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.kv, -1)).transpose(1, 2) for f in (self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        if self.fused:
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            found = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        return self.o(found.transpose(1, 2).flatten(2))


class Convolved(nn.Module):
    """A convolution along the sequence."""

    def __init__(self, dim: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, 3, padding=1, groups=groups, bias=False)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x.mT))).mT


class Experts(nn.Module):
    """Experts that all run, weighted by a router."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, count, bias=False)
        self.experts = nn.ModuleList(mlp(dim, 2) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.router(x), -1)
        top = weights.topk(2, -1).values[..., -1:]
        weights = weights * (weights >= top)
        parts = zip(self.experts, weights.unbind(-1), strict=True)
        return sum((weight[..., None] * expert(x) for expert, weight in parts), start=x * 0)


class Adapted(nn.Module):
    """A frozen product with a small trained one beside it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.down, self.up = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def mlp(dim: int, wide: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, wide * dim), nn.GELU(), nn.Linear(wide * dim, dim))


def part(g: random.Random, dim: int) -> Callable[[], nn.Module]:
    """What makes one kind of part, which keeps the shape of what it is given."""
    wide, count, shared, fused = g.choice([1, 2, 4]), g.choice([2, 3]), g.choice([1, 2]), g.random()
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(dim, dim),
        lambda: mlp(dim, wide),
        lambda: Attention(dim, 4, shared, fused < 0.5),
        lambda: Convolved(dim, g.choice([1, 4])),
        lambda: Experts(dim, count),
        lambda: Adapted(dim),
        lambda: nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Tanh()),
        lambda: nn.Linear(dim, dim).requires_grad_(False),
    ]
    return g.choice(kinds)


class Block(nn.Module):
    """Parts behind norms, perhaps one that all blocks share, which may run several times."""

    def __init__(self, parts: list[nn.Module], dim: int, times: int, shared: nn.Module | None):
        super().__init__()
        self.norms = nn.ModuleList(Norm(dim) for _ in parts)
        self.parts, self.times = nn.ModuleList(parts), times
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            for norm, run in zip(self.norms, self.parts, strict=True):
                x = x + run(norm(x))
        return x if self.shared is None else x + torch.tanh(self.shared(x))


Order = list[tuple[int, int]]  # which part of which layer, call by call; -1: the whole layer


class Made(nn.Module):
    """Tokens in, numbers out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = random.Random(seed)
        self.dim = dim = g.choice([8, 12, 16, 24])
        self.depth = depth = g.randint(2, 7)
        self.embed = nn.Embedding(TOKENS, dim)
        if g.random() < 0.3:
            self.embed.requires_grad_(False)
        self.place = nn.Parameter(0.02 * torch.randn(64, dim)) if g.random() < 0.5 else None
        makes = [part(g, dim) for _ in range(g.randint(1, 3))]
        style = g.choice(["blocks", "blocks", "lists", "dicts", "sequence", "two kinds", "sizes"])
        shared = part(g, dim)() if g.random() < 0.2 and style == "blocks" else None
        times = g.choice([1, 1, 1, 2])
        others = [part(g, dim) for _ in range(2)]
        self.listed = style in ("lists", "dicts")
        layers: list[nn.Module] = []
        for k in range(depth):
            if style == "lists":
                layers.append(nn.ModuleList(make() for make in makes))
            elif style == "dicts":
                layers.append(nn.ModuleDict({f"p{n}": make() for n, make in enumerate(makes)}))
            elif style == "two kinds" and k % 2:
                layers.append(Block([make() for make in others], dim, 1, None))
            elif style == "sizes":
                layers.append(mlp(dim, k + 1))
            else:
                layers.append(Block([make() for make in makes], dim, times, shared))
        self.layers = nn.Sequential(*layers) if style == "sequence" else nn.ModuleList(layers)
        self.order = self._order(g, len(makes) if self.listed else 0)
        self.skips = g.random() < 0.25  # as in a U-net
        self.twins = g.random() < 0.2  # two inputs, one encoder
        self.norm = nn.LayerNorm(dim)
        self.tied = g.random() < 0.3
        self.heads = nn.ModuleList(nn.Linear(dim, CLASSES) for _ in range(g.choice([1, 1, 2])))
        self.idle = nn.Linear(dim, 3) if g.random() < 0.2 else None  # runs in evaluation alone
        self.eased = g.random() < 0.2  # a loss of what is inside

    def _order(self, g: random.Random, parts: int) -> Order:
        def whole(layers: Any) -> Order:
            return [(k, p) for k in layers for p in (range(parts) if parts else (-1,))]

        plain, kind = whole(range(self.depth)), g.random()
        if kind < 0.4:
            return plain
        if kind < 0.5:
            return plain * g.choice([2, 3])
        if kind < 0.6:
            return plain + whole(reversed(range(self.depth)))
        if kind < 0.7:
            return [call for call in plain for _ in range(2)]
        if kind < 0.8 and parts:
            return [(k, p) for k in range(self.depth) for p in [*range(parts), 0]] + [
                (k, parts - 1) for k in range(self.depth)
            ]
        if kind < 0.9:
            return [*plain, *g.choices(plain, k=len(plain))]
        return g.sample(plain, len(plain))

    def _encode(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        if self.place is not None:
            x = x + self.place[: ids.shape[1]]
        kept: list[torch.Tensor] = []
        inside = x.new_zeros(())
        for number, (k, p) in enumerate(self.order):
            layer = self.layers[k]
            if p < 0:
                x = layer(x)
            else:
                one = layer[p] if isinstance(layer, nn.ModuleList) else layer[f"p{p}"]
                x = torch.tanh(one(x)) + x
            if self.skips:
                if number < len(self.order) // 2:
                    kept.append(x)
                elif kept:
                    x = x + kept.pop()
            if self.eased:
                inside = inside + x.square().mean()
        return self.norm(x), inside

    def forward(self, ids: torch.Tensor, others: torch.Tensor | None = None) -> dict[str, Any]:
        x, inside = self._encode(ids)
        if others is not None:
            y, more = self._encode(others)
            x, inside = x * torch.cos(y), inside + more
        found = {str(n): head(x) for n, head in enumerate(self.heads)}
        if self.tied:
            found["tokens"] = functional.linear(x, self.embed.weight)
        if self.idle is not None and not self.training:
            found["idle"] = self.idle(x)
        return {"inside": inside, **found}


def build(seed: int, batch: int = 2) -> Any:
    """Model, inputs and loss."""
    torch.manual_seed(seed)
    model = Made(seed).double()
    return model, batch_of(seed, model.twins, batch, torch.default_generator), loss_of


def loss_of(found: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of everything that there is."""
    parts = [t.square().mean() for name, t in found.items() if name != "inside"]
    return sum(parts, start=0.1 * found["inside"])


def batch_of(seed: int, twins: bool, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Tokens, those of twins twice."""
    length = random.Random(~seed).choice([3, 6, 10])
    names = ("ids", "others") if twins else ("ids",)
    return {name: torch.randint(TOKENS, (batch, length), generator=generator) for name in names}


def _batches(rank: int, seed: int, model: int) -> Iterator[Any]:
    torch.manual_seed(model)
    twins = Made(model).twins
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        yield batch_of(model, twins, 2, generator)


def __getattr__(name: str) -> Any:
    """``batches_7`` are those of model 7."""
    kind, _, number = name.partition("_")
    if kind != "batches" or not number.isdigit():
        raise AttributeError(name)
    return partial(_batches, model=int(number))


def policy_of(seed: int, world_size: int) -> dict[str, Any]:
    """Sections of a job: how a model is to be cut, at random."""
    g = random.Random(seed * 7 + world_size)
    dense: dict[str, Any] = {"prefetch": g.choice([0, 1])}
    if g.random() < 0.6:
        dense["layers_per_unit"] = g.choice([1, 1, 2, 3])
    dense["checkpointing"] = [g.choice(["none", "none", "full", "selective"])]
    memory: dict[str, Any] = {}
    writes = any(isinstance(m, nn.BatchNorm1d) for m in Made(seed).modules())
    if g.random() < 0.3 and not writes:
        memory["zero"] = g.choice([1, 2])
    else:
        dense["reshard"] = g.random() < 0.7
    if g.random() < 0.15 and not writes:  # in fp32, which statistics in fp64 do not go with
        memory["offload"] = "all"
    memory |= {"param_dtype": "fp32"} if memory else {}
    return {
        "planner": {"dense": dense},
        "train": {
            "steps": 3,
            "optimizer": g.choice(["sgd", "adam", "adagrad"]),
            "learning_rate": 0.01,
        },
        "cluster": {"preset": "local", "world_size": world_size},
        "batch": {"size": 2},
        **({"memory": memory} if memory else {}),
    }


def ways(seed: int, names: list[str]) -> dict[str, str]:
    """A placement for every unit, mostly one for all of them."""
    g = random.Random(seed * 13)
    if g.random() < 0.3:
        return {}
    one = g.choice(["shard", "replicate"])
    mixed = g.random() < 0.4
    return {name: g.choice(["shard", "replicate"]) if mixed else one for name in names}
