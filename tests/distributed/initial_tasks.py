"""Tables that start on the meta device: no rank ever has one whole."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from embedding_tasks import Bags, Rows
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from worlds import apart

import shardwright as sw
from shardwright.job.plan import Plan
from shardwright.runtime.embeddings.tables import ShardedTables

MiB = 2**20


class Starting(nn.Module):
    """Collections, one of which says how its tables start, and embeddings of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.rows = Bags(), Rows()
        self.seen = nn.EmbeddingBag(11, 4, mode="mean", padding_idx=2)
        self.user = nn.Embedding(5, 8)


class Hooked(Starting):
    """The same with starting values of its own."""

    def initial_block(
        self, fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        return whole_of(fqn)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


SHAPES = {
    "bags.embedding_bags.t0.weight": (9, 4),
    "bags.embedding_bags.t1.weight": (7, 8),
    "rows.embeddings.s0.weight": (6, 4),
    "seen.weight": (11, 4),
    "user.weight": (5, 8),
}


def whole_of(fqn: str) -> torch.Tensor:
    rows, dim = SHAPES[fqn]
    return torch.arange(rows * dim).float().view(rows, dim) + len(fqn)


def empty(kind: type[Starting] = Starting) -> Starting:
    with torch.device("meta"):
        model = kind()
    configs = model.bags.embedding_bag_configs()
    configs[0].init_fn = partial(nn.init.uniform_, a=5.0, b=6.0)
    vars(model.bags)["embedding_bag_configs"] = lambda: configs
    return model


def started(mesh: DeviceMesh, made: Plan) -> dict[str, torch.Tensor]:
    """What tables start with where ranks were not seeded alike."""
    torch.manual_seed(7 if mesh.get_rank() == 0 else 8)
    return sw.full_state_dict(sw.shard_embeddings(empty(), made, mesh, optimizer="sgd"))


def given(mesh: DeviceMesh, made: Plan, folder: Path) -> dict[str, float]:
    """How far tables are from what the model or the call gives for them."""
    if mesh.get_rank() == 0:
        np.save(folder / "t0.npy", whole_of("bags.embedding_bags.t0.weight").numpy())
        save_file({"user.weight": whole_of("user.weight")}, folder / "some.safetensors")
    torch.distributed.barrier(mesh.get_group())
    first, second, third, fourth, fifth = SHAPES
    files = {
        first: folder / "t0.npy",
        second: whole_of(second),
        third: np.asarray(whole_of(third)),
        fourth: whole_of(fourth).double(),
        fifth: str(folder / "some.safetensors"),
    }
    real = Starting()
    cases: dict[str, tuple[nn.Module, Any]] = {
        "hook": (empty(Hooked), None),
        "function": (empty(), Hooked().initial_block),
        "files": (empty(), files),
        "over weights": (real, files),
    }
    far = {}
    for case, (model, initial) in cases.items():
        sharded = sw.shard_embeddings(model, made, mesh, optimizer="sgd", initial=initial)
        found = sw.full_state_dict(sharded)
        far[case] = max(apart(found[name], whole_of(name)) for name in SHAPES)
    return far


def refused(mesh: DeviceMesh, made: Plan) -> dict[str, str]:
    """What is said to values that are none."""
    own, again = empty(), empty()
    nn.init.uniform_(own.user.weight, -0.1, 0.1)
    vars(again.seen)["reset_parameters"] = lambda: nn.init.eye_(again.seen.weight)
    cases: dict[str, tuple[nn.Module, Any]] = {
        "by hand": (own, None),
        "as a whole": (again, None),
        "name": (empty(), {"users.weight": torch.ones(5, 8)}),
        "shape": (empty(), {"user.weight": np.ones((8, 5))}),
        "file": (empty(), {"user.weight": "nowhere.npy"}),
        "rectangle": (empty(), lambda fqn, offsets, sizes: torch.zeros(1, 1)),
    }
    some = Starting() if mesh.get_rank() else empty()
    return {
        case: _said(model, made, mesh, initial)
        for case, (model, initial) in {**cases, "one rank": (some, None)}.items()
    }


def _said(model: nn.Module, made: Plan, mesh: DeviceMesh, initial: Any) -> str:
    try:
        sw.shard_embeddings(model, made, mesh, optimizer="sgd", initial=initial)
    except sw.ShardwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


class Net(nn.Module):
    """A table and a layer over its bags."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.t0 = nn.EmbeddingBag(rows, dim, mode="sum")
        self.top = nn.Linear(dim, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.t0(ids)).square().mean()  # type: ignore[no-any-return]


def applied(mesh: DeviceMesh, made: Plan) -> dict[str, torch.Tensor]:
    """What a model without numbers starts with under a plan of all of it."""
    with torch.device("meta"):
        model = Net(9, 4)
    torch.manual_seed(mesh.get_rank())
    model.register_buffer("scale", torch.ones(1, device="meta"))
    with pytest.raises(sw.InputError, match="scale: expected a real buffer, got one on the meta"):
        sw.apply(model, made, mesh)
    model.scale = torch.ones(1)
    return sw.full_state_dict(sw.apply(model, made, mesh))


class Four(nn.Module):
    """Four tables alike."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        for number in range(4):
            setattr(self, f"t{number}", nn.EmbeddingBag(rows, dim, mode="sum"))


def resident_growth(mesh: DeviceMesh, plans: list[Plan]) -> list[int]:
    """By how many bytes sharding a module with its weights adds to what the process has at most."""
    grown = []
    for made in plans:  # the first one imports what sharding needs
        model = Four(made.tables[0].rows, made.tables[0].dim)
        gc.collect()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the most that was resident is what is resident now
        before = _status("VmHWM")
        sw.shard_embeddings(model, made, mesh, optimizer="sgd")
        grown.append(_status("VmHWM") - before)
    return grown


def data_bytes() -> int:
    """Of this process's data segment, as RLIMIT_DATA counts it."""
    return _status("VmData")


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[name].split()[0]) * 1024


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """No more than so many bytes of data inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def fits_no_host(
    mesh: DeviceMesh, made: Plan, folder: Path, limit: int | None = None, optimizer: str = "sgd"
) -> dict[str, Any]:
    """Train a table, save it and load it into another one, where data have to be less than the
    table: of ``limit`` bytes, by default what this process has and three quarters of the table."""
    (table,) = made.tables
    whole = table.rows * table.dim * 4
    fits = torch.zeros(())
    with limited(limit or data_bytes() + 3 * whole // 4):
        with suppress(RuntimeError):
            fits += torch.empty(table.rows, table.dim).dim() > 0
        dist.all_reduce(fits, group=mesh.get_group())  # no rank leaves another alone
        if fits:
            return {"whole": "fits"}
        rows = torch.arange(0, table.rows, table.rows // 64)
        ids = rows[mesh.get_rank() :: mesh.size()].view(-1, 1)
        losses = _trained(mesh, made, ids, optimizer, folder)
        gc.collect()
        model = _sharded(mesh, made, optimizer)
        sw.load_checkpoint(folder, model)
        return {"losses": losses, "loaded": model(ids).item()}


def _sharded(mesh: DeviceMesh, made: Plan, optimizer: str) -> nn.Module:
    (table,) = made.tables
    with torch.device("meta"):
        model = Net(table.rows, table.dim)
    torch.manual_seed(0)
    model.top = nn.Linear(table.dim, 1)
    return sw.shard_embeddings(model, made, mesh, optimizer=optimizer, learning_rate=0.1)


def _trained(
    mesh: DeviceMesh, made: Plan, ids: torch.Tensor, optimizer: str, folder: Path
) -> list[float]:
    (table,) = made.tables
    model = _sharded(mesh, made, optimizer)
    losses = []
    for _ in range(3):
        loss = model(ids)
        loss.backward()
        losses.append(loss.item())
    sw.save_checkpoint(folder, model, step=3)
    (tables,) = (m for m in model.modules() if isinstance(m, ShardedTables))
    assert sum(s.block_view(h).numel() for s, h in tables.holdings()) < table.rows * table.dim
    return [*losses, model(ids).item()]
