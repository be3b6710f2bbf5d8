"""A small recommender of one's own, with embeddings of all sorts, for ``[model] python``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

USERS, ITEMS, TAGS, SHOPS, SEEN = 6101, 3701, 11, 5, 4
FEW = 2003
SIZES = (100_000, 50_000, 20_000, 5_000, 2_000, 1_000, 10)


class Shown(nn.Module):
    """Items [B, L] and their weights -> one vector each; padding counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, 8, padding_idx=0)
        self.tags = nn.EmbeddingBag(TAGS, 8, mode="sum", padding_idx=1)
        self.out = nn.Linear(16, 8)

    def forward(self, items: Tensor, weights: Tensor) -> Tensor:
        tags = self.tags(items % TAGS, per_sample_weights=weights)
        return torch.relu(self.out(torch.cat([self.items(items).sum(1), tags], 1)))


class Recommender(nn.Module):
    """Users [B], items seen [B, SEEN], their weights, shops [B] -> logits [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, 16)
        self.seen = nn.EmbeddingBag(ITEMS, 16, mode="mean", padding_idx=0)
        self.shops = nn.Embedding(SHOPS, 4)
        self.old = nn.Embedding(9, 16).requires_grad_(False)
        self.first = nn.Sequential(nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 8))
        self.shown = Shown()

    def forward(self, users: Tensor, seen: Tensor, weights: Tensor, shops: Tensor) -> Tensor:
        asking = self.users(users) + self.old(users % 9)
        asking = torch.cat([asking, self.seen(input=seen), self.shops(shops.int())], 1)
        return (self.first(asking) * self.shown(seen, weights)).sum(1)


def build(batch: int) -> Any:
    """With the loss of clicks."""
    inputs, clicks = next(build_batches(batch, 0, 0))
    return Recommender(), inputs, nn.BCEWithLogitsLoss(), clicks


def build_batches(batch: int, rank: int, seed: int) -> Iterator[Any]:
    """Other rows on every rank, of few ids that come often and lie everywhere."""
    generator = torch.Generator().manual_seed(100 * seed + rank)

    def ids(most: int, *more: int) -> Tensor:
        stride = 1 + most // 75
        return torch.randint(most, (batch, *more), generator=generator) // stride * stride

    while True:
        weights = torch.rand(batch, SEEN, generator=generator)
        inputs = ids(USERS), ids(ITEMS, SEEN), weights, ids(SHOPS)
        yield inputs, ids(2).float()


class Halved(nn.Module):
    """Embeddings in bf16, and the rest in fp32 -> logits [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(FEW, 16, dtype=torch.bfloat16)
        self.seen = nn.EmbeddingBag(FEW, 8, mode="sum", dtype=torch.bfloat16)
        self.first = nn.Linear(24, 1)

    def forward(self, users: Tensor, seen: Tensor) -> Tensor:
        found = torch.cat([self.users(users), self.seen(seen)], 1)
        return self.first(found.float()).squeeze(1)


def halved(batch: int) -> Any:
    """With the loss of clicks."""
    inputs, clicks = next(halved_batches(batch, 0, 0))
    return Halved(), inputs, nn.BCEWithLogitsLoss(), clicks


def halved_batches(batch: int, rank: int, seed: int) -> Iterator[Any]:
    """Other rows on every rank, all as often, so that some come twice."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    while True:
        users = torch.randint(FEW, (batch,), generator=generator)
        seen = torch.randint(FEW, (batch, SEEN), generator=generator)
        yield (users, seen), torch.randint(2, (batch,), generator=generator).float()


class Factors(nn.Module):
    """A product of two embeddings, and nothing else that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users(users) * self.items(items)).sum(1)


def factors(batch: int) -> Any:
    """All of it tables."""
    inputs, likes = next(factors_batches(batch, 0, 0))
    return Factors(), inputs, nn.MSELoss(), likes


def penalised(batch: int) -> Any:
    """With a loss that goes through all parameters."""
    model, inputs, fit, likes = factors(batch)

    def loss(result: Tensor, likes: Tensor) -> Tensor:
        return fit(result, likes) + sum(p.square().sum() for p in model.parameters())

    return model, inputs, loss, likes


def factors_batches(batch: int, rank: int, seed: int) -> Iterator[Any]:
    """Other pairs on every rank."""
    for (users, items, _, _), likes in build_batches(batch, rank, seed):
        yield (users, items[:, 0]), likes


class Uses(nn.Module):
    """Embeddings that are used as no table can be, and one that can."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tied = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.tied.weight
        self.read = nn.Embedding(20, 8)
        self.twice = nn.Embedding(20, 8)
        self.normed = nn.Embedding(20, 8, max_norm=1.0)
        self.scaled = nn.Embedding(20, 8, scale_grad_by_freq=True)
        self.precise = nn.Embedding(20, 8, dtype=torch.float64)
        self.offsets = nn.EmbeddingBag(20, 8)
        self.largest = nn.EmbeddingBag(20, 8, mode="max")
        self.fine = nn.Embedding(20, 8, sparse=sparse)
        self.held = nn.Embedding(20, 8)
        self.holder = nn.ModuleDict({"also": self.held})
        self.layers = nn.ModuleList(
            nn.ModuleDict({"place": nn.Embedding(20, 8), "out": nn.Linear(8, 8)}) for _ in range(5)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tied(ids) + self.twice(ids) + self.twice(ids) + self.precise(ids).float()
        x = x + self.read(ids) + self.read.weight.mean(0) + self.fine(ids) + self.normed(ids)
        each = torch.arange(len(ids))
        x = x + self.scaled(ids)
        x = x + self.offsets(ids, each) + self.largest(ids.unsqueeze(1))
        x = x + self.held(ids) + self.holder["also"](ids)
        for layer in self.layers:
            x = layer["out"](x + layer["place"](ids))
        return self.head(x)


def uses(batch: int, sparse: bool = False) -> Any:
    """Of the mean of the result."""
    return Uses(sparse), torch.randint(20, (batch,))


class Wide(nn.Module):
    """A table that is most of a model."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.users = nn.Embedding(rows, dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, users: Tensor) -> Tensor:
        return self.out(self.users(users))


def wide(batch: int, rows: int = 40_000, dim: int = 64) -> Any:
    """The mean of its result."""
    return Wide(rows, dim), torch.randint(rows, (batch,))


class WideTwice(Wide):
    """One whose table is looked up twice."""

    def forward(self, users: Tensor) -> Tensor:
        return super().forward(users) + super().forward(users)


def wide_twice(batch: int, rows: int, dim: int) -> Any:
    """The mean of its result."""
    return WideTwice(rows, dim), torch.randint(rows, (batch,))


class Uneven(nn.Module):
    """A large table and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.shops = nn.Embedding(400_000, 32), nn.Embedding(9, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, users: Tensor, shops: Tensor) -> Tensor:
        return self.out(self.users(users) + self.shops(shops))


def uneven(batch: int) -> Any:
    """The mean of its result."""
    return Uneven(), (torch.randint(400_000, (batch,)), torch.randint(9, (batch,)))


class Several(nn.Module):
    """Tables from large to small, each looked up on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 32) for rows in SIZES)
        self.out = nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = [table(ids[:, n]) for n, table in enumerate(self.tables)]
        return self.out(torch.stack(found).sum(0))


def several(batch: int) -> Any:
    """The mean of its result."""
    return Several(), torch.stack([torch.randint(rows, (batch,)) for rows in SIZES], 1)


def bare(batch: int) -> Any:
    """Without an embedding."""
    return nn.Linear(4, 2), torch.randn(batch, 4)


class Keyed:
    """Ids of features as a KeyedJaggedTensor has them."""

    def __init__(self, keys: list[str], values: Tensor, lengths: Tensor) -> None:
        self._keys, self._values, self._lengths = keys, values, lengths

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths


register_pytree_node(
    Keyed,
    lambda keyed: ([keyed.values(), keyed.lengths()], keyed.keys()),
    lambda tensors, keys: Keyed(keys, *tensors),
)
PAIR = 2  # ids of every bag
BAGS = {"users": (USERS, 16, ["user"]), "goods": (ITEMS, 16, ["seen", "bought"])}
ROWS = {"words": (997, 8, ["said"])}


class Bags(nn.Module):
    """Tables of bags as TorchRec's EmbeddingBagCollection has them."""

    def __init__(self, pooling: str) -> None:
        super().__init__()
        self.pooling = pooling
        self.embedding_bags = nn.ModuleDict(
            {
                name: nn.EmbeddingBag(rows, dim, mode=pooling)
                for name, (rows, dim, _) in BAGS.items()
            }
        )

    def embedding_bag_configs(self) -> list[Any]:
        pooling = SimpleNamespace(value=self.pooling.upper())
        return [
            SimpleNamespace(name=name, feature_names=features, pooling=pooling)
            for name, (_, _, features) in BAGS.items()
        ]

    def forward(self, given: Keyed) -> Any:
        ids = dict(zip(given.keys(), given.values().view(len(given.keys()), -1, PAIR), strict=True))
        found = {
            feature: self.embedding_bags[name](ids[feature])
            for name, (_, _, features) in BAGS.items()
            for feature in features
        }
        return SimpleNamespace(to_dict=lambda: found)


class Words(nn.Module):
    """Tables of sequences as TorchRec's EmbeddingCollection has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {name: nn.Embedding(rows, dim) for name, (rows, dim, _) in ROWS.items()}
        )

    def embedding_configs(self) -> list[Any]:
        return [SimpleNamespace(name=n, feature_names=f) for n, (_, _, f) in ROWS.items()]

    def forward(self, given: Keyed) -> Any:
        rows = self.embeddings["words"](given.values())
        return {"said": SimpleNamespace(values=lambda: rows)}


class Collections(nn.Module):
    """Bags and sequences of collections, and an embedding beside them -> logits [B]."""

    def __init__(self, pooling: str) -> None:
        super().__init__()
        self.bags, self.words = Bags(pooling), Words()
        self.shops = nn.Embedding(SHOPS, 4)
        self.first = nn.Sequential(nn.Linear(60, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, bags: Keyed, words: Keyed, shops: Tensor) -> Tensor:
        pooled = self.bags(bags).to_dict()
        said = self.words(words)["said"].values().view(len(shops), PAIR, -1).sum(1)
        found = [pooled[name] for name in ("user", "seen", "bought")]
        return self.first(torch.cat([*found, said, self.shops(shops)], 1)).squeeze(1)


def collections(batch: int, pooling: str = "sum") -> Any:
    """With the loss of clicks."""
    inputs, clicks = next(collections_batches(batch, 0, 0))
    return Collections(pooling), inputs, nn.BCEWithLogitsLoss(), clicks


def halved_collections(batch: int) -> Any:
    """All of it made in bf16."""
    model, *others = collections(batch)
    return model.bfloat16(), *others


def collections_batches(batch: int, rank: int, seed: int) -> Iterator[Any]:
    """Other ids on every rank; two in each bag."""
    generator = torch.Generator().manual_seed(100 * seed + rank)

    def keyed(sizes: dict[str, int]) -> Keyed:
        ids = [torch.randint(most, (PAIR * batch,), generator=generator) for most in sizes.values()]
        lengths = torch.full((len(sizes) * batch,), PAIR)
        return Keyed(list(sizes), torch.cat(ids), lengths)

    while True:
        bags = keyed({"user": USERS, "seen": ITEMS, "bought": ITEMS})
        words, shops = keyed({"said": 997}), torch.randint(SHOPS, (batch,), generator=generator)
        yield (bags, words, shops), torch.randint(2, (batch,), generator=generator).float()


class Odd(Keyed):
    """With weights that learn, or another number of bags of its last feature."""

    weighted = uneven = False

    def weights_or_none(self) -> Tensor | None:
        return torch.ones(len(self.values()), requires_grad=True) if self.weighted else None

    def stride_per_key(self) -> list[int]:
        bags = len(self.lengths()) // len(self.keys())
        return [bags] * (len(self.keys()) - 1) + [2 if self.uneven else bags]


def odd_collections(batch: int, change: str) -> Any:
    """Collections with something that a plan cannot have."""
    model, inputs, loss, clicks = collections(batch)
    bags, *others = inputs
    weight = model.bags.embedding_bags["users"].weight
    if change == "frozen":
        weight.requires_grad_(False)
    elif change == "half":
        model.bags.embedding_bags["users"].half()
    elif change in ("weighted", "uneven"):
        bags = Odd(bags.keys(), bags.values(), bags.lengths())
        bags.weighted, bags.uneven = change == "weighted", change == "uneven"
    elif change == "unknown":
        bags = Keyed(bags.keys()[:2], bags.values(), bags.lengths())
    elif change == "twice":
        vars(model)["forward"] = partial(_looking_up_twice, model, model.forward)
    else:
        bags = {"user": bags.values()}
    return model, (bags, *others), loss, clicks


def _looking_up_twice(model: Any, forward: Any, bags: Keyed, *others: Tensor) -> Tensor:
    model.bags(bags)
    return forward(bags, *others)


def wrong_keyed(right: Keyed) -> dict[str, Any]:
    """What is no KeyedJaggedTensor of the bags of ``right``, by what is wrong with it."""
    keys, values, lengths = right.keys(), right.values(), right.lengths()
    high, low = values.clone(), values.clone()
    high[-1], low[0] = 10**6, -1
    less = torch.cat([lengths[:-1], lengths[-1:] - 1])
    fewer = torch.cat([lengths[:1] - 2 * PAIR, lengths[1:-1], lengths[-1:] + 2 * PAIR])
    uneven, unfit = Odd(keys, values, lengths[:-1]), Odd(keys, values, lengths)
    unfit.stride_per_key = lambda: [len(lengths)]  # type: ignore[method-assign]
    short, text, complex_ = (Odd(keys, values, lengths) for _ in range(3))
    short.weights_or_none = lambda: torch.ones(1)  # type: ignore[method-assign]
    text.weights_or_none = lambda: "heavy"  # type: ignore[method-assign,assign,return-value]
    complex_.weights_or_none = lambda: torch.ones(len(values), dtype=torch.complex64)  # type: ignore[method-assign]
    whatever: Any = Keyed
    return {
        "high": Keyed(keys, high, lengths),
        "low": Keyed(keys, low, lengths),
        "float values": Keyed(keys, values.float(), lengths),
        "square values": Keyed(keys, values.view(-1, PAIR), lengths),
        "list of values": whatever(keys, values.tolist(), lengths),
        "no values": whatever(keys, None, lengths),
        "float lengths": Keyed(keys, values, lengths.float()),
        "list of lengths": whatever(keys, values, lengths.tolist()),
        "too few": Keyed(keys, values, less),
        "negative": Keyed(keys, values, fewer),
        "odd lengths": Keyed(keys, values, lengths[:-1]),
        "unknown": Keyed(["user", "seen", "sold"], values, lengths),
        "uneven": uneven,
        "stride": unfit,
        "weights": short,
        "text": text,
        "complex": complex_,
        "meta": Keyed(keys, values.to("meta"), lengths),
        "none": None,
        "mapping": {"user": values},
    }
