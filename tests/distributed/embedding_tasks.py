"""Embeddings of a module under a plan of tables alone, beside the module on one process."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from table_tasks import Given, Keyed, apart
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.job.plan import Plan, sealed

RATE = 0.1


class Bags(nn.Module):
    """A collection as TorchRec has them: two tables, one of two features."""

    def __init__(self) -> None:
        super().__init__()
        rows = {"t0": (9, 4), "t1": (7, 8)}
        bags = {name: nn.EmbeddingBag(*shape, mode="sum") for name, shape in rows.items()}
        self.embedding_bags = nn.ModuleDict(bags)

    def embedding_bag_configs(self) -> list[Any]:
        sums = SimpleNamespace(value="SUM")
        features = {"t0": ["a"], "t1": ["b", "c"]}
        return [SimpleNamespace(name=n, feature_names=f, pooling=sums) for n, f in features.items()]

    def forward(self, given: Keyed) -> dict[str, torch.Tensor]:
        owners = {
            f: config.name for config in self.embedding_bag_configs() for f in config.feature_names
        }
        return {
            name: self.embedding_bags[owners[name]](ids, offsets[:-1])
            for name, (ids, offsets) in given.given.items()
        }


class Rows(nn.Module):
    """A collection of one table that is not pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"s0": nn.Embedding(6, 4)})

    def embedding_configs(self) -> list[Any]:
        return [SimpleNamespace(name="s0", feature_names=["d"])]

    def forward(self, given: Keyed) -> dict[str, torch.Tensor]:
        return {name: self.embeddings["s0"](ids) for name, (ids, _) in given.given.items()}


class Model(nn.Module):
    """Collections, a bag and an embedding of one's own, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.rows = Bags(), Rows()
        self.seen = nn.EmbeddingBag(11, 4, mode="mean", padding_idx=2)
        self.user = nn.Embedding(5, 8)
        self.top = nn.Linear(4, 1)

    def forward(self, batch: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        pooled = self.bags(Keyed({name: batch[name] for name in "abc"}))
        rows = self.rows(Keyed({"d": batch["d"]}))["d"]
        ids, offsets = batch["a"]
        seen = self.seen(ids, offsets[:-1])
        found = pooled["a"] + seen + pooled["b"][:, :4] * pooled["c"][:, 4:]
        found = found + (rows if isinstance(rows, torch.Tensor) else rows.values()).mean(0)
        found = found * self.user(batch["d"][0][:1]).mean()
        return self.top(found).square().mean()  # type: ignore[no-any-return]


def _batch(rank: int, step: int) -> Given:
    torch_rnd = torch.Generator().manual_seed(10 * step + rank)
    given: Given = {}
    for name, rows in {"a": 9, "b": 7, "c": 7, "d": 5}.items():
        lengths = torch.randint(1, 4, (3,), generator=torch_rnd)
        ids = torch.randint(rows, (int(lengths.sum()),), generator=torch_rnd)
        given[name] = (ids, nn.functional.pad(lengths.cumsum(0), (1, 0)))
    return given


def trained(mesh: DeviceMesh, made: Plan) -> dict[str, float]:
    """How far losses and tables are from those of one process with the batches of all ranks."""
    alone, model = Model(), Model()
    sharded = sw.shard_embeddings(model, made, mesh, optimizer="sgd", learning_rate=RATE)
    assert sharded is model
    far = {"loss": 0.0}
    tables = [p for n, p in alone.named_parameters() if not n.startswith("top")]
    optimizer = torch.optim.SGD(tables, RATE)
    for step in range(3):
        own = sharded(_batch(mesh.get_rank(), step))
        own.backward()
        for rank in range(mesh.size()):
            loss = alone(_batch(rank, step))
            (loss / mesh.size()).backward()
            if rank == mesh.get_rank():
                far["loss"] = max(far["loss"], apart(own, loss))
        optimizer.step()
        optimizer.zero_grad()
    found = sw.full_state_dict(sharded)
    assert set(found) == set(alone.state_dict())
    return far | {name: apart(found[name], value) for name, value in alone.state_dict().items()}


class Once(Keyed):
    """Bags that come once for several samples, as in TorchRec."""

    def __init__(self, given: Given, inverse: Any) -> None:
        super().__init__(given)
        self.inverse = inverse

    def stride_per_key(self) -> list[int]:
        return [len(offsets) - 1 for _, offsets in self.given.values()]

    def inverse_indices_or_none(self) -> Any:
        return self.inverse


def bags_once(mesh: DeviceMesh, made: Plan) -> tuple[dict[str, float], list[str]]:
    """How far bags that come once, and their updates, are from the same bags sample by sample; and
    what is said to places that are none, and to none."""
    bags = {"a": [[0, 8], [3]], "b": [[6], [], [1, 1]], "c": [[mesh.get_rank()]]}
    places = {"a": [1, 0, 0, 1], "b": [0, 0, 2, 1], "c": [0, 0, 0, 0]}
    every = {name: [bags[name][place] for place in places[name]] for name in bags}
    order = ["c", "a", "b"]
    inverse = (order, torch.tensor([places[name] for name in order]))
    found = []
    for given in (Once(_given(bags), inverse), Keyed(_given(every))):
        model = sw.shard_embeddings(Model(), made, mesh, optimizer="sgd", learning_rate=RATE)
        values = model.get_submodule("bags")(given).values()
        (values.square() * torch.arange(values.numel()).view_as(values)).sum().backward()
        found.append({"values": values.detach(), **sw.full_state_dict(model)})
    far = {name: apart(value, found[1][name]) for name, value in found[0].items()}
    said = []
    high, flat = torch.full((3, 4), 2), torch.zeros(3, dtype=torch.int64)
    for wrong in ((order, high), (order, flat), (order[:2], high[:2]), None):
        with pytest.raises(sw.ShardwrightError) as error:
            model.get_submodule("bags")(Once(_given(bags), wrong)).values()
        said.append(str(error.value))
    return far, said


def _given(bags: dict[str, list[list[int]]]) -> Given:
    return {
        name: (
            torch.tensor([id_ for bag in own for id_ in bag], dtype=torch.int64),
            nn.functional.pad(torch.tensor([*map(len, own)]).cumsum(0), (1, 0)),
        )
        for name, own in bags.items()
    }


class Pair(nn.Module):
    """A collection of two tables alike, whose rows lie in one group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding_bags = nn.ModuleDict({n: nn.EmbeddingBag(6, 8, mode="sum") for n in "xy"})

    def embedding_bag_configs(self) -> list[Any]:
        sums = SimpleNamespace(value="SUM")
        return [SimpleNamespace(name=n, feature_names=[n], pooling=sums) for n in "xy"]


def moved(mesh: DeviceMesh, made: Plan, optimizer: str) -> list[dict[str, float]]:
    """How far rows of two tables go in steps: both learn, x is frozen, the rate is 0, both learn;
    and in one where x was frozen before."""
    holder, early = nn.Module(), nn.Module()
    holder.pair, early.pair = Pair(), Pair()
    early.pair.embedding_bags["x"].requires_grad_(False)
    given = Keyed(_given({name: [[0, 1], [mesh.get_rank()]] for name in "xy"}))
    found = []

    def step(model: nn.Module) -> None:
        before = sw.full_state_dict(model)
        model.pair(given).values().square().sum().backward()
        after = sw.full_state_dict(model)
        found.append({n[-8]: apart(before[n], after[n]) for n in before})

    options = {"optimizer": optimizer, "learning_rate": RATE}
    model = sw.shard_embeddings(holder, made, mesh, **options)
    step(model)
    model.get_submodule("pair.embedding_bags.x").requires_grad_(False)
    step(model)
    model.pair.learning_rate = 0.0
    step(model)
    model.pair.learning_rate = RATE
    model.pair.embedding_bags.requires_grad_(True)
    step(model)
    step(sw.shard_embeddings(early, made, mesh, **options))
    return found


def set_in_vain(mesh: DeviceMesh, made: Plan) -> dict[str, str]:
    """What is said to settings of what stands for collections and embeddings."""
    model = sw.shard_embeddings(Model(), made, mesh, optimizer="sgd", learning_rate=RATE)
    settings: list[tuple[str, str, Any]] = [
        ("bags", "overlap", True),
        ("bags", "embedding_bags", nn.ModuleDict()),
        ("seen", "mode", "sum"),
        ("user", "weight", nn.Parameter(torch.zeros(5, 8))),
        ("user", "max_norm", 1.0),
        ("user", "padding_idx", 1),
        ("user", "note", "of one's own"),
    ]
    said = {}
    for path, name, value in settings:
        try:
            setattr(model.get_submodule(path), name, value)
            said[name] = ""
        except sw.UnsupportedError as error:
            said[name] = str(error)
    return said


def refused(mesh: DeviceMesh, made: Plan, changes: Sequence[str]) -> dict[str, str]:
    """What is said to modules that the plan is not for."""
    return {change: _refused(mesh, made, change) for change in changes}


def _refused(mesh: DeviceMesh, made: Plan, change: str) -> str:
    model = Model()
    if change == "rows":
        model.user = nn.Embedding(6, 8)
    elif change == "missing":
        del model.user
    elif change == "largest":
        model.seen = nn.EmbeddingBag(11, 4, mode="max")
    elif change.startswith("fused_uvm"):
        tables = [msgspec.structs.replace(t, compute_kernel=change) for t in made.tables]
        made = sealed(msgspec.structs.replace(made, tables=tuple(tables)))
    try:
        sw.shard_embeddings(model, made, mesh, optimizer="" if change == "optimizer" else "sgd")
    except sw.ShardwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
