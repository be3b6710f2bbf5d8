"""What goes wrong in silence where nobody looks: ranks that differ, memory that is shared, writes
that are lost; and the odd things that are refused by name."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from probe_tasks import MESHES, make_grids, said
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worlds import World, net, step, weights, whole

import shardwright as sw
from shardwright.core.errors import PeerError
from shardwright.core.placement import Placement, Replicate
from shardwright.runtime.comm import Comm, desync
from shardwright.runtime.comm.torch_groups import default_store, sub_group

Model = nn.Module


class Branches(nn.Module):
    """Three parts of one shape, of which each rank may run its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.parts[index](x).tanh()
        return x


def branches(mesh: DeviceMesh, strategy: str, orders: dict[int, list[int]]) -> tuple[str, bool]:
    """What a step raises on ranks that run ``orders[rank]``, and whether weights stayed."""
    world = World(mesh, strategy)
    model = Branches()
    for part in model.parts:
        world.unit(part)
    world.unit(model)
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.order = orders[world.rank]

    def steps() -> None:
        for number in range(2):
            step(world, model, number)
            optimizer.step()

    error = said(steps)
    now = {name: p.to_local() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return error, all(torch.equal(now[name], before[name]) for name in before)


def left_out(mesh: DeviceMesh, what: str, ranks: list[int]) -> str:
    """What is said where ``ranks`` go on without the second backward, or after an error in the
    forward before it."""
    name = f"a second apart, {what} {ranks}"
    group = sub_group(mesh.get_group(), [0, 1], name, timedelta(seconds=1))
    world = World(DeviceMesh.from_group(group, "cpu"), "flat")
    model = world.shard(net())

    def steps() -> None:
        for number in range(3):
            away = number == 1 and world.rank in ranks
            if away and what == "forward":
                handle = model[1].register_forward_hook(lambda *_: 1 / 0)
                assert said(lambda: model(world.inputs())).startswith("ZeroDivisionError")
                handle.remove()
                continue
            loss = model(world.inputs(number)).square().mean()
            if not away:
                loss.backward()

    return said(steps)


class _Turning(nn.Module):
    """Turns by angles that no state has, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("angles", torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * self.angles.cos()
        return found


def buffers_from_meta(mesh: DeviceMesh, way: str) -> None:
    """A forward after to_empty, of buffers that got values in a ``way`` or not."""
    with torch.device("meta"):
        model = nn.Sequential(_Turning(), nn.BatchNorm1d(8), _Turning())
    for part in model:
        sw.fully_shard_flat(part, mesh)
    sw.fully_shard_flat(model, mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model[1].reset_running_stats()
    for part in (model[0], model[2]):
        if way == "written":
            part.angles.copy_(torch.arange(8.0))
        elif way == "replaced":
            part.angles = torch.arange(8.0)
    for _ in range(2):
        model(torch.ones(3, 8))


def looked_in_another_order(mesh: DeviceMesh) -> str:
    """What a step says after a forward without gradients whose units rank 1 ran in another order,
    the last of them alike."""
    world = World(mesh, "flat")
    model = Branches()
    for part in model.parts:
        world.unit(part)
    world.unit(model)
    model.order = [1, 0, 2] if world.rank else [0, 1, 2]
    with torch.no_grad():
        model(torch.ones(2, 8, dtype=torch.float64))
    model.order = [0, 1, 2]
    return said(lambda: step(world, model, 0))


def seeded_apart(mesh: DeviceMesh, grid: bool) -> float:
    """How far the whole weights are from those of the first replica's seed."""
    if grid:
        make_grids(mesh)
        mesh = MESHES[2, 2]
    torch.manual_seed(torch.distributed.get_rank())
    model = nn.Linear(8, 4).double()
    placement: Placement | None = None if grid else Replicate()
    sw.fully_shard_flat(model, mesh, shard_placement_fn=lambda *_: placement)
    torch.manual_seed(0)
    first = nn.Linear(8, 4).double()
    if grid:  # rank 0 and the ranks beside it each drew their own
        mine = model.weight.full_tensor()
        every = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(every, mine)
        return max((one - every[0]).abs().max().item() for one in every)
    return (whole(model.weight) - first.weight).abs().max().item()


def begun_apart(mesh: DeviceMesh, *, grid: bool) -> None:
    """Shard two models that begin with other values on every rank, or on every replica."""
    if grid:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for _ in range(2):
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        nn.init.constant_(model[1].weight, float(mesh.get_local_rank(0)))
        nn.init.zeros_(model[1].bias)
        sw.fully_shard_flat(model, mesh)


def replicas_diverge(mesh: DeviceMesh) -> str:
    """What a forward says of replicas that were initialised apart, from the meta device."""
    with torch.device("meta"):
        model = nn.Linear(8, 4)
    sw.fully_shard_flat(model, mesh, shard_placement_fn=lambda *_: Replicate())
    model.to_empty(device="cpu")
    torch.manual_seed(mesh.get_local_rank())
    model.reset_parameters()
    return said(lambda: model(torch.ones(2, 8)))


class _Book(nn.Module):
    """A codebook that moves while it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.ones(4, 8).double(), requires_grad=False)
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.words.lerp_(x[:1].expand(4, 8), 0.5)
        found: torch.Tensor = self.linear(x) + self.words[0]
        return found


def refusals(mesh: DeviceMesh, strategy: str) -> dict[str, str]:
    """What is said of each thing that cannot be."""
    world, found = World(mesh, strategy), {}
    for what, do in _REFUSED.items():
        Comm(mesh).forget()
        found[what] = said(lambda: do(world))  # noqa: B023
    return found


def _overlapping(world: World) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(model[0].weight.data)
    world.unit(model)


class Coded(nn.Parameter):
    """As quantized parameters are, with a class and attributes of their own."""


def _of_a_class(world: World) -> None:
    model = nn.Linear(8, 8)
    model.weight = Coded(model.weight.data)
    world.unit(model)


def _expanded(world: World) -> None:
    model = nn.Linear(8, 8)
    model.bias = nn.Parameter(torch.zeros(1).expand(8))
    world.unit(model)


def seen_in_a_forward(mesh: DeviceMesh, strategy: str) -> list[str]:
    """What a module sees in its forward of what was set on its weight, before and after it was
    sharded."""

    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend((self.weight.scale_of, self.weight.set_later))
            assert not hasattr(self.weight, "other")
            return super().forward(x)

    seen: list[str] = []
    world, model = World(mesh, strategy), Reads(8, 8).double()
    model.weight.scale_of = "before"
    world.unit(model)
    model.weight.set_later = "after"
    model(world.inputs()).sum().backward()
    return seen


def _largest_norm(world: World) -> None:
    model = nn.Embedding(16, 8, max_norm=0.1)
    world.unit(model)
    model(torch.arange(4))


def _codebook(world: World) -> None:
    model = _Book()
    world.unit(model)
    model(world.inputs())


def _lazy(world: World) -> None:
    world.unit(nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4)))


def _pickled(world: World) -> None:
    pickle.dumps(world.shard(net()))


def _parallel_first(world: World) -> None:
    model = nn.Linear(8, 8)
    part = distribute_tensor(model.weight.data, world.mesh, [Shard(0)])
    model.weight = nn.Parameter(part)
    world.unit(model)


def _trained_outside(world: World) -> None:
    model = world.shard(net())
    loss = model(world.inputs()).square().mean() + 0.1 * (model[0].weight @ model[0].weight).sum()
    loss.backward()


def _flat_adafactor(world: World) -> None:
    model = world.shard(net())
    optimizer = torch.optim.Adafactor(sw.optimizer_parameters(model), lr=0.1)
    step(world, model)
    optimizer.step()


def _replicated_adafactor(world: World) -> None:
    model = net()
    sw.fully_shard_flat(model, world.mesh, (Replicate(),))
    optimizer = torch.optim.Adafactor(sw.optimizer_parameters(model), lr=0.1)
    step(world, model)
    optimizer.step()


def _flat_muon(world: World) -> None:
    torch.optim.Muon(sw.optimizer_parameters(world.shard(net())), lr=0.1)


def _half_frozen(world: World) -> None:
    model = world.shard(net())
    optimizer = torch.optim.SGD(sw.optimizer_parameters(model), lr=0.1)
    model[0].weight.requires_grad_(False)
    step(world, model)
    optimizer.step()


def _taken_twice(world: World) -> None:
    model = world.shard(net())
    sw.optimizer_parameters(model)
    sw.optimizer_parameters(model, [{"params": ["0.weight"]}])


_REFUSED: dict[str, Callable[[World], None]] = {
    "a lazy module": _lazy,
    "two parameters over one memory": _overlapping,
    "a parameter of another class": _of_a_class,
    "an expanded parameter": _expanded,
    "an embedding with max_norm": _largest_norm,
    "a codebook": _codebook,
    "a module pickled": _pickled,
    "tensor parallel first": _parallel_first,
    "training outside of the forward": _trained_outside,
    "Adafactor over flat tensors": _flat_adafactor,
    "Adafactor over replicated ones": _replicated_adafactor,
    "Muon over flat tensors": _flat_muon,
    "half of a flat tensor frozen": _half_frozen,
    "a parameter in two flat tensors": _taken_twice,
}


def saved_by_torch(mesh: DeviceMesh, strategy: str) -> tuple[bool, bool]:
    """Whether ``torch.save`` of a state gives each rank its part again, and a whole one all."""
    world = World(mesh, strategy)
    model, other = world.shard(net()), world.shard(net(1))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    mine, found = weights(model), weights(other)
    file = io.BytesIO()
    torch.save(sw.full_state_dict(model), file)
    file.seek(0)
    plain = net(2)
    plain.load_state_dict(torch.load(file))
    return (
        all(torch.equal(found[name], mine[name]) for name in mine),
        all(torch.equal(value, mine[name]) for name, value in plain.named_parameters()),
    )


def clipped_over_two_meshes(mesh: DeviceMesh) -> tuple[float, float]:
    """The norm of two units on different meshes without a root, and the true one."""
    make_grids(mesh)
    model, reference = net(), net()
    sw.fully_shard_flat(model[0], MESHES[2, 2]["shard"])
    sw.fully_shard_flat(model[2], mesh)
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for each in (model, reference):
        each(x).square().mean().backward()
    true = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    found = sw.clip_grad_norm_(model, 0.01)
    return float(found), float(true)


def frozen_by_the_group(mesh: DeviceMesh, strategy: str) -> dict[str, float]:
    """How far parameters move in groups of a function: one frozen for a while, one left out."""
    world = World(mesh, strategy)
    model = world.shard(net())

    def group_of(name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
        if name == "2.bias":
            return None
        return {"weight_decay": 0.5 if parameter.ndim > 1 else 0.0, "lr": 0.1}

    groups = sw.optimizer_parameters(model, group_of)
    optimizer = torch.optim.AdamW(groups)
    moved = {name: 0.0 for name, _ in model.named_parameters()}
    before = weights(model)
    for flat in groups[0]["params"]:
        flat.requires_grad_(False)
    for number in range(4):
        if number == 2:
            for flat in groups[0]["params"]:
                flat.requires_grad_(True)
        optimizer.zero_grad()
        step(world, model, number)
        optimizer.step()
        if number == 1:
            still = weights(model)
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    moved[f"{name} while frozen"] = _largest(still[name], before[name])
    after = weights(model)
    moved.update({name: _largest(after[name], before[name]) for name in before})
    return moved


def _largest(one: torch.Tensor, two: torch.Tensor) -> float:
    return (one - two).abs().max().item()


def torchs_tensors(mesh: DeviceMesh) -> bool:
    """Whether parameters are DTensors of the whole shape under every strategy."""
    found = []
    for strategy in ("flat", "per_param", "param_boundary"):
        model = World(mesh, strategy).shard(net())
        found += [
            isinstance(p, DTensor) and isinstance(p, sw.ShardTensor) for p in model.parameters()
        ]
        found += [tuple(model[0].weight.shape) == (8, 8), model[0].weight.numel() == 64]
    return all(found)


class _Heard(logging.Handler):
    """Keeps what was said, and lets the rank come that is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        default_store().set("a test heard of it", "")


def whole_state_of_tied(mesh: DeviceMesh) -> tuple[list[str], list[str], list[set[str]]]:
    """Names of the whole state and of the unsharded model's, and which of them share a tensor."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=number == 1) for number in range(5)))
    names = list(model.state_dict())
    model[3].weight, model[4].weight = model[0].weight, model[2].weight
    sw.fully_shard_flat(model[1], mesh)
    sw.fully_shard_flat(model, mesh, ignored_params={model[2].weight})
    found = sw.full_state_dict(model)
    shared: dict[int, set[str]] = {}
    for name, tensor in found.items():
        shared.setdefault(tensor.data_ptr(), set()).add(name)
    return list(found), names, list(shared.values())


def called_late(mesh: DeviceMesh, call: str) -> tuple[list[str], bool]:
    """What rank 0 says while it waits for the other one in a ``call``, and whether both get what
    they asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sw.fully_shard_flat(model, mesh)
    heard, log = _Heard(), logging.getLogger("shardwright")
    log.addHandler(heard)
    kept = desync.HERE_SECONDS, desync.SAID_SECONDS
    desync.HERE_SECONDS = desync.SAID_SECONDS = 0.0  # type: ignore[misc]
    if mesh.get_local_rank() == 1:
        default_store().wait(["a test heard of it"])
        desync.HERE_SECONDS, desync.SAID_SECONDS = kept  # type: ignore[misc]
    try:
        if call == "sw.full_state_dict":
            found = sw.full_state_dict(model)
        else:
            plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
            plain.load_state_dict(model.state_dict())
            found = plain.state_dict()
    finally:
        desync.HERE_SECONDS, desync.SAID_SECONDS = kept  # type: ignore[misc]
        log.removeHandler(heard)
    same = all(found[name].equal(tensor) for name, tensor in start.items())
    dist.barrier(mesh.get_group())
    default_store().delete_key("a test heard of it")
    return heard.said, same


def lost_in_a_call(mesh: DeviceMesh) -> str:
    """What is said where another rank is lost while whole tensors are made."""
    try:
        with Comm(mesh).asked_of_all("whole weight"):
            raise PeerError("whole weight: expected all 2 ranks, got no sign of rank 1.")
    except PeerError as error:
        return str(error)
