"""Embedding tables with fused updates beside ``nn.EmbeddingBag`` with an optimizer of torch's, and
a whole DLRM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from peer_tables import build
from side_by_side import Given, Shape
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwright as sw
from gpu.rows import Row, Setting, group_of_one, timed
from gpu.runtime_units import apart, memory, whole
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.models.dlrm import DLRM
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters

DENSE = 13
BOTTOM, TOP = (512, 256, 64, 16), (512, 256, 1)


class Bags(nn.Module):
    """An ``nn.EmbeddingBag`` for each table."""

    def __init__(self, weights: dict[str, torch.Tensor], *, sparse: bool) -> None:
        super().__init__()
        self.bags = nn.ModuleDict()
        for name, weight in weights.items():
            made = nn.EmbeddingBag.from_pretrained(weight, mode="sum", freeze=False, sparse=sparse)
            self.bags[name] = made

    def forward(self, given: Given) -> dict[str, torch.Tensor]:
        """As ours: rows [B, dim] of every feature."""
        pairs = zip(self.bags.values(), given.items(), strict=True)
        return {feature: bag(ids, offsets[:-1]) for bag, (feature, (ids, offsets)) in pairs}


@dataclass(frozen=True)
class Tables:
    """So many tables of one size, and a batch of bags of so many ids."""

    count: int
    rows: int
    dim: int
    batch: int
    length: float = 3
    rate: float = 0.05

    def weights(self, setting: Setting) -> dict[str, torch.Tensor]:
        """Where everyone starts."""
        random = torch.Generator().manual_seed(1)
        shape = (self.rows, self.dim)
        made = (torch.empty(shape).uniform_(-0.1, 0.1, generator=random) for _ in range(self.count))
        return {f"t{number}": each.to(setting.device) for number, each in enumerate(made)}

    def ours(
        self, setting: Setting, mesh: DeviceMesh, optimizer: str, kind: str = "table_wise"
    ) -> nn.Module:
        """A module of all of them, cut as ``kind`` says."""
        specs = [
            {
                "name": f"t{number}",
                "rows": self.rows,
                "dim": self.dim,
                "pooling": "sum",
                "features": [f"f{number}"],
            }
            for number in range(self.count)
        ]
        types = {f"t{number}": kind for number in range(self.count)}
        return build(specs, types, mesh, optimizer, self.rate, self.weights(setting))

    def bags(self, setting: Setting, *, sparse: bool = False) -> Bags:
        """The same as plain modules."""
        return Bags(self.weights(setting), sparse=sparse)

    def asked(self, setting: Setting, seed: int) -> Given:
        """A batch of Zipf's ids."""
        shape = Shape(self.count, self.rows, self.dim, self.batch, self.length)
        given = shape.ids("zipf", np.random.default_rng(seed))
        return {name: tuple(p.to(setting.device) for p in pair) for name, pair in given.items()}  # type: ignore[misc]

    def passes(self, module: nn.Module, given: Given, share: float = 1.0) -> torch.Tensor:
        """Forward and backward of half the squares of all rows, times ``share``; the loss."""
        found = module(given)
        loss: torch.Tensor = (
            0.5 * share * sum(part.square().mean(0).sum() for part in found.values())
        )
        loss.backward()
        return loss

    def weights_of(self, bags: Bags) -> dict[str, torch.Tensor]:
        """Of plain modules, by the names of ours."""
        return {name: whole(bag.weight) for name, bag in bags.bags.items()}


def size_of(setting: Setting) -> Tables:
    """Of rows that measure."""
    return Tables(4, 200, 16, 32) if setting.small else Tables(26, 100_000, 16, 4096)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=Tables.rate, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=Tables.rate, eps=1e-8),
}


def compared(setting: Setting, optimizer: str, kind: str) -> dict[str, Any]:
    """Rows after three steps beside those of plain modules, and seconds a step of each."""
    tables = size_of(setting)
    true = tables.bags(setting)
    usual = OPTIMIZERS[optimizer](true.parameters())
    with group_of_one(setting):
        mesh = init_device_mesh(setting.device, (1,))
        mine = tables.ours(setting, mesh, optimizer, kind)
        losses = []
        for number in range(3):
            given = tables.asked(setting, number)
            usual.zero_grad()
            wanted = tables.passes(true, given)
            usual.step()
            losses.append((tables.passes(mine, given).item(), wanted.item()))
        found = {name: whole(value) for name, value in sw.full_state_dict(mine).items()}
        figures: dict[str, Any] = {
            "loss_apart": max(abs(a - b) / max(abs(b), 1e-30) for a, b in losses),
            "weight_apart": apart(found, tables.weights_of(true)),
        }
        given = tables.asked(setting, 3)

        def plainly() -> None:
            usual.zero_grad()
            tables.passes(true, given)
            usual.step()

        run = partial(tables.passes, mine, given)
        figures["ours"] = {**timed(setting, run), **memory(setting, run)}
        figures["embedding_bag"] = {**timed(setting, plainly), **memory(setting, plainly)}
        if optimizer == "sgd":
            figures["embedding_bag sparse"] = _sparse(setting, tables)
    return figures


def _sparse(setting: Setting, tables: Tables) -> dict[str, Any]:
    """Plain modules whose gradients are sparse, which torch's SGD takes."""
    bags, given = tables.bags(setting, sparse=True), tables.asked(setting, 3)
    optimizer = torch.optim.SGD(bags.parameters(), lr=tables.rate, foreach=False)

    def run() -> None:
        optimizer.zero_grad()
        tables.passes(bags, given)
        optimizer.step()

    return {**timed(setting, run), **memory(setting, run)}


# ---- a whole DLRM --------------------------------------------------------------------------------


def job_of(setting: Setting, overlap: str) -> Any:
    """Tables of one id each, on one rank."""
    tables = size_of(setting)
    names = [f"t{number}" for number in range(tables.count)]
    each = {"rows": tables.rows, "dim": tables.dim, "sharding_types": ["table_wise"]}
    return parse_job(
        {
            "model": {"dense_features": DENSE, "bottom": list(BOTTOM), "top": list(TOP)},
            "tables": [{"name": name, **each} for name in names],
            "cluster": {"preset": "local", "world_size": 1},
            "batch": {"size": tables.batch},
            "planner": {"units": {"bottom": "replicate", "top": "replicate"}},
            "data": {"kind": "synthetic", "zipf": 1.05},
            "train": {"optimizer": "sgd", "learning_rate": tables.rate, "overlap": overlap},
        }
    )


def batches(setting: Setting, count: int) -> list[tuple[torch.Tensor, ...]]:
    """Dense features [B, 13], ids [B, F], clicks [B]."""
    tables = size_of(setting)
    shape = Shape(tables.count, tables.rows, tables.dim, tables.batch, 1)
    found = []
    for number in range(count):
        random = np.random.default_rng(number)
        ids = torch.stack([ids for ids, _ in shape.ids("zipf", random).values()], 1)
        dense = torch.from_numpy(random.standard_normal((tables.batch, DENSE), dtype=np.float32))
        clicks = torch.from_numpy(random.integers(0, 2, tables.batch).astype(np.float32))
        found.append(tuple(part.to(setting.device) for part in (dense, ids, clicks)))
    return found


def dlrm(setting: Setting, overlap: str) -> dict[str, Any]:
    """``apply`` of a planned DLRM beside the same module as it is, all with SGD."""
    job = job_of(setting, overlap)
    made = plan(job)
    true = DLRM(job).to(setting.device)
    usual = torch.optim.SGD(true.parameters(), lr=size_of(setting).rate, foreach=True)
    with group_of_one(setting):
        mesh = init_device_mesh(setting.device, (1,))
        mine: Any = sw.apply(DLRM(made.job, device="meta"), made, mesh)
        rate = size_of(setting).rate
        optimizer = make_optimizer("sgd", optimizer_parameters(mine, per_unit=True), rate)
        losses = []
        for batch in batches(setting, 3):
            losses.append((_step(mine, optimizer, batch).item(), _step(true, usual, batch).item()))
        found = {name: whole(value) for name, value in sw.full_state_dict(mine).items()}
        wanted = {name: whole(value) for name, value in true.named_parameters()}
        (batch,) = batches(setting, 1)
        own, plain = partial(_step, mine, optimizer, batch), partial(_step, true, usual, batch)
        return {
            "loss_apart": max(abs(a - b) / max(abs(b), 1e-30) for a, b in losses),
            "weight_apart": apart({name: found[name] for name in wanted}, wanted),
            "ours": {**timed(setting, own), **memory(setting, own)},
            "plain": {**timed(setting, plain), **memory(setting, plain)},
        }


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[torch.Tensor]
) -> torch.Tensor:
    dense, ids, clicks = batch
    logits = model(dense, ids).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def rows(setting: Setting) -> list[Row]:
    """Tables alone, then with what is around them."""
    found = [
        Row(f"tables {optimizer} {kind}", partial(compared, setting, optimizer, kind), 6)
        for optimizer in OPTIMIZERS
        for kind in ("table_wise", "data_parallel")
    ]
    for overlap in ("none", "rows"):
        found.append(Row(f"dlrm overlap {overlap}", partial(dlrm, setting, overlap), 10))
    return found
