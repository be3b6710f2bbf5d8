"""Models of many kinds, as users write them: functions for ``[model] python``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.job.job import parse_job
from shardwright.models.llama import Llama

Made = Any


def encoder(batch: int, sequence: int, depth: int = 7) -> Made:
    """torch's own encoder between an embedding and a head."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(100, 32), nn.TransformerEncoder(layer, depth), nn.Linear(32, 100)
    )
    targets = torch.zeros(batch * sequence, dtype=torch.int64)
    return (
        model,
        torch.zeros(batch, sequence, dtype=torch.int64),
        lambda logits: functional.cross_entropy(logits.flatten(0, 1), targets),
    )


class Residual(nn.Module):
    """Two convolutions with norms around a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(2))
        self.shortcut = nn.Conv2d(inner, outer, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.second(y))
        return functional.relu(y.add_(self.shortcut(x)))


def convolutions(batch: int, depths: tuple[int, ...] = (2, 6, 5)) -> Made:
    """Stages of blocks, the first of each narrower and wider."""
    widths = [8 * 2**k for k in range(len(depths))]
    stages = []
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        inner = widths[stage - 1] if stage else width
        blocks = [Residual(inner, width, 2 if stage else 1)]
        blocks += [Residual(width, width) for _ in range(depth - 1)]
        stages.append(nn.Sequential(*blocks))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Sequential(*stages),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], 10),
    )
    return model, torch.zeros(batch, 3, 16, 16)


class Translator(nn.Module):
    """torch's encoder and decoder, of different depth."""

    def __init__(self, above: int, below: int) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.both = nn.Transformer(16, 2, above, below, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.both(self.words(source), self.words(target)))


def translator(batch: int, sequence: int, above: int = 5, below: int = 4) -> Made:
    inputs = {
        "source": torch.zeros(batch, sequence, dtype=torch.int64),
        "target": torch.zeros(batch, sequence // 2, dtype=torch.int64),
    }
    return Translator(above, below), inputs


class Recurrent(nn.Module):
    """Cells over time, stacked, and torch's own LSTM beside them."""

    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(40, width)
        self.layers = nn.ModuleList(nn.GRUCell(width, width) for _ in range(depth))
        self.rest = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            state, states = torch.zeros_like(x[:, 0]), []
            for step in x[:, :3].unbind(1):
                state = layer(step, state)
                states.append(state)
            x = torch.stack(states, 1)
        return self.head(self.rest(x)[0])


def recurrent(depth: int = 5) -> Made:
    return Recurrent(depth)


class Experts(nn.Module):
    """Experts with a capacity, so that shapes are fixed."""

    def __init__(self, width: int, experts: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.down = nn.Parameter(torch.empty(experts, 2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        scores = self.router(flat).softmax(-1).t()
        weights, tokens = scores.topk(flat.shape[0] // 2, -1)
        hidden = torch.bmm(functional.silu(torch.bmm(flat[tokens], self.up)), self.down)
        found = torch.zeros_like(flat).index_add(
            0, tokens.flatten(), (hidden * weights[..., None]).flatten(0, 1)
        )
        return x + found.view_as(x)


class Grouped(nn.Module):
    """Experts that leave no token out: rows in the order of their experts, one grouped product."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.rand(experts, width, 2 * width))
        self.down = nn.Parameter(torch.rand(experts, width, 2 * width))  # transposed where used

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        chosen, order = chosen.sort()
        counts = torch.histc(chosen.float(), len(self.up), 0, len(self.up) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = functional.silu(torch._grouped_mm(flat[order], self.up, offs=ends))
        found = torch._grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)
        found = found * weights[order, None]
        return x + torch.zeros_like(flat).index_add(0, order, found).view_as(x)


def grouped(batch: int, sequence: int, depth: int = 4) -> Made:
    model = nn.Sequential(nn.Embedding(50, 32), *(Grouped(32, 4) for _ in range(depth)))
    return model, torch.zeros(batch, sequence, dtype=torch.int64)


class Stacked(nn.Module):
    """Experts [experts, ...] alone, given places [experts, places, width]."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.down = nn.Parameter(torch.empty(experts, 2 * width, width))

    def forward(self, places: Tensor) -> Tensor:
        return torch.bmm(functional.silu(torch.bmm(places, self.up)), self.down)


class Placed(nn.Module):
    """A router beside its experts, each of which takes the tokens that score highest."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = Stacked(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, tokens = self.router(flat).softmax(-1).t().topk(flat.shape[0] // 4, -1)
        found = self.experts(flat[tokens]) * weights[..., None]
        empty = torch.zeros_like(flat)
        return x + empty.index_add(0, tokens.flatten(), found.flatten(0, 1)).view_as(x)


def placed(batch: int, sequence: int, depth: int = 6, experts: int = 8) -> Made:
    """Layers of experts with a capacity between an embedding and a head."""
    layers = [Placed(32, experts) for _ in range(depth)]
    model = nn.Sequential(nn.Embedding(50, 32), nn.Sequential(*layers), nn.Linear(32, 50))
    return model, torch.zeros(batch, sequence, dtype=torch.int64)


class Listed(nn.Module):
    """A list of experts, each of which sees every token."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(expert(x) for expert in self.experts)


def listed(batch: int, sequence: int) -> Made:
    model = nn.Sequential(nn.Embedding(50, 32), *(Listed(32, 4) for _ in range(3)))
    return model, torch.zeros(batch, sequence, dtype=torch.int64)


class Dense(nn.Module):
    """An MLP around which the stream goes."""

    def __init__(self, width: int, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Alternating(nn.Module):
    """Dense layers and layers of experts in turn, by name; the head is the embedding."""

    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(60, width)
        self.layers = nn.ModuleDict(
            {f"layer{k}": Experts(width, 4, k) if k % 2 else Dense(width, k) for k in range(depth)}
        )
        self.head = nn.Linear(width, 60, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def alternating(depth: int = 11) -> Made:
    return Alternating(depth)


class Skipping(nn.Module):
    """As many layers up as down; each way up sees what its way down made."""

    def __init__(self, depth: int, more: int = 0, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(Dense(width) for _ in range(depth + more))
        self.middle = Dense(width)
        self.up = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), Dense(width)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat((x, kept.pop()), -1))
        return x


def skipping(batch: int, sequence: int, depth: int = 7, more: int = 0) -> Made:
    return Skipping(depth, more), torch.zeros(batch, sequence, 16)


class Backwards(nn.Module):
    """Blocks that run from the last to the first."""

    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Dense(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        return x


def backwards(batch: int, sequence: int, depth: int = 6) -> Made:
    return Backwards(depth), torch.zeros(batch, sequence, 16)


class TakingTurns(nn.Module):
    """Two lists whose parts take turns."""

    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(30, width)
        self.mixers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.mlps = nn.ModuleList(Dense(width) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            x = mlp(x + mixer(x))
        return x


def taking_turns(depth: int = 8) -> Made:
    return TakingTurns(depth)


class Numbered(nn.Module):
    """Layers that are called by number."""

    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.depth = depth
        self.words = nn.Embedding(30, width)
        self.layers = nn.ModuleList(Dense(width, k) for k in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for number in range(self.depth):
            x = self.layers[number](x)
        return x


def numbered(depth: int = 6) -> Made:
    return Numbered(depth)


class Growing(nn.Module):
    """Layers that see all layers before them, so that each keeps more than the last."""

    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(30, width)
        self.layers = nn.ModuleList(Dense(width) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        seen = [self.words(tokens)]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, 1))[:, : tokens.shape[1]])
        return seen[-1]


def growing(depth: int = 6) -> Made:
    return Growing(depth)


class Looping(nn.Module):
    """The same layers several times; one of them stands twice in the list."""

    def __init__(self, depth: int, rounds: int, twice: bool, width: int = 16) -> None:
        super().__init__()
        self.rounds = rounds
        self.words = nn.Embedding(30, width)
        layers = [Dense(width) for _ in range(depth)]
        self.layers = nn.ModuleList([*layers, layers[0]] if twice else layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for _ in range(self.rounds):
            for layer in self.layers:
                x = layer(x)
        return x


def looping(depth: int = 6, rounds: int = 2, twice: bool = False) -> Made:
    return Looping(depth, rounds, twice)


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, 4 * width).requires_grad_(False)
        self.back = nn.Linear(4 * width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, 4 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(functional.gelu(self.base(x) + self.up(self.down(x))))


def adapted(depth: int = 7, width: int = 16) -> Made:
    words = nn.Embedding(30, width).requires_grad_(False)
    return nn.Sequential(words, *(Adapted(width) for _ in range(depth)), nn.Linear(width, 30))


class InPlace(nn.Module):
    """Layers that add to the stream where it is."""

    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(30, width)
        self.layers = nn.ModuleList(Adding(width) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) * 2
        for layer in self.layers:
            x = layer(x)
        return x


class Adding(nn.Module):
    """Changes what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x += self.inner(x.clone())
        return x


def in_place(depth: int = 6) -> Made:
    return InPlace(depth)


def started(batch: int, sequence: int, weights: str) -> Made:
    """Built as users do: numbers are read, layers cast, weights loaded."""
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in rates]
    for layer in layers:
        nn.init.trunc_normal_(layer[0].weight, std=0.02)
    layers[1][0].load_state_dict(torch.load(weights))
    model = nn.Sequential(nn.Embedding(10, 8), *(layer[0] for layer in layers))
    model[1].to(torch.bfloat16)
    return model, torch.zeros(batch, sequence, dtype=torch.int64)


def aimed(batch: int, sequence: int, targets: bool) -> Made:
    """A loss with targets of its own, or with those that it is given."""
    model, tokens = nn.Embedding(10, 8), torch.zeros(batch, sequence, dtype=torch.int64)

    def loss(logits: Tensor, aims: Tensor = tokens) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), aims.flatten())

    given = (torch.zeros(batch, sequence, dtype=torch.int64),) if targets else ()
    return model, tokens, loss, *given


class Attending(nn.Module):
    """Attention and a gated product, which take their widths from what their layers give."""

    def __init__(self, dim: int, head: int, bias: bool) -> None:
        super().__init__()
        self.head = head
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.queries, self.keys, self.values = (nn.Linear(dim, dim, bias) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias)
        self.gate, self.up = (nn.Linear(dim, 3 * dim, bias) for _ in range(2))
        self.down = nn.Linear(3 * dim, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        heads = (
            part(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Attended(nn.Module):
    """Blocks that attend, between an embedding and a head."""

    def __init__(self, depth: int, dim: int, head: int, bias: bool, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(96, dim)
        self.layers = nn.ModuleList(Attending(dim, head, bias) for _ in range(depth))
        self.output = nn.Linear(dim, 96, bias=False)
        if tied:
            self.output.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def attended(
    batch: int,
    sequence: int,
    depth: int = 6,
    bias: bool = True,
    tied: bool = False,
) -> Made:
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    return Attended(depth, 32, 4, bias, tied), tokens


class Keyed(Attending):
    """Takes and gives a dictionary."""

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {"x": super().forward(given["x"])}


class Carried(Attended):
    """Blocks that hand each other a dictionary."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth, 32, 4, bias=True, tied=False)
        self.layers = nn.ModuleList(Keyed(32, 4, bias=True) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        given = {"x": self.words(tokens)}
        for layer in self.layers:
            given = layer(given)
        return self.output(given["x"])


def carried(batch: int, sequence: int, depth: int = 6) -> Made:
    return Carried(depth), torch.zeros(batch, sequence, dtype=torch.int64)


class Remembering(Attended):
    """A head that reads the embedding once more, past all blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x + first)


def remembering(batch: int, sequence: int, depth: int = 6) -> Made:
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    return Remembering(depth, 32, 4, bias=True, tied=False), tokens


class Gated(Attended):
    """Behind all blocks a gate made before them from a parameter of the whole module."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth, 32, 4, bias=True, tied=False)
        self.gate = nn.Parameter(torch.zeros(32))

    def forward(self, tokens: Tensor) -> Tensor:
        gate = self.gate.sigmoid()
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x * gate)


def gated(batch: int, sequence: int, depth: int = 6) -> Made:
    return Gated(depth), torch.zeros(batch, sequence, dtype=torch.int64)


def a_llama(batch: int, sequence: int, model: dict[str, int]) -> Made:
    """The built-in llama as a module of a user's own."""
    job = parse_job({"model": {"kind": "llama", **model}, "cluster": {"world_size": 1}})
    assert isinstance(job.model.shape, LlamaShape)
    module = Llama(job.model.shape, LocalShape(), sequence=sequence)
    tokens, targets = (torch.zeros(batch, sequence, dtype=torch.int64) for _ in range(2))
    return module, tokens, lambda logits: module.loss(logits, targets)


class Halfway(Attended):
    """The first of its layers alone, by their number."""

    def __init__(self, depth: int, run: int) -> None:
        super().__init__(depth, 32, 4, bias=True, tied=False)
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers[: self.run]:
            x = layer(x)
        return self.output(x)


def halfway(batch: int, sequence: int, depth: int = 9, run: int = 5) -> Made:
    return Halfway(depth, run), torch.zeros(batch, sequence, dtype=torch.int64)
