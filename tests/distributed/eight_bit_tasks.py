"""AdamW in 8 bits over sharded modules beside the same in one process, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from probe_tasks import MESHES, said
from torch import nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import shardwright as sw
from shardwright.core.placement import BlockShard, Owned, Placement, Replicate, Shard
from shardwright.runtime.torch_private import local_of
from shardwright.runtime.units.dstorage import units_in

STEPS = 3
SHAPES = {  # of each block; sizes that neither blocks nor ranks divide, large ones and small ones
    "up": (80, 64),
    "gate": (17, 257),
    "table": (4099,),
    "cube": (300, 2, 9),
    "bias": (13,),
    "norm": (4095,),
    "scale": (),
}
Found = dict[str, torch.Tensor]


class Sum(nn.Module):
    """Parameters whose gradients are numbers of a step, the same on every rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.seed = seed

    def forward(self, step: int) -> torch.Tensor:
        named = dict(self.named_parameters())
        parts = [
            named[name] * gradient_of(name, shape, step, self.seed)
            for name, shape in SHAPES.items()
        ]
        return torch.stack([part.sum() for part in parts]).sum()


@functools.cache
def gradient_of(name: str, shape: tuple[int, ...], step: int, seed: int = 0) -> torch.Tensor:
    """Whole numbers of very different sizes, which any number of ranks can add up and share out."""
    number = 1000 * seed + 10 * step + len(name)
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randn(shape, generator=generator)
    return (drawn * torch.rand(shape, generator=generator).mul(9).exp()).round()


class Two(nn.Module):
    """Two units, and a root that has nothing of its own; parameters by name are ``frozen``."""

    def __init__(self, frozen: Collection[str] = ()) -> None:
        super().__init__()
        self.first, self.second = Sum(1), Sum(2)
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, step: int) -> torch.Tensor:
        return self.first(step) + self.second(step)


def _mixture(name: str, parameter: nn.Parameter) -> Placement:
    """Whole blocks of rows, owned ones, replicas, and rows of what is small."""
    if name.endswith("up"):
        return BlockShard(4)
    if name.endswith("cube"):
        return BlockShard(128)
    if name.endswith("norm"):
        return Shard(0)
    return Replicate() if name.endswith("table") else Owned(0)


WAYS: dict[str, dict[str, Any]] = {
    "flat": {"shard_strategy": "flat", "block_size": 256},
    "blocks of 512": {"shard_strategy": "flat", "block_size": 512},
    "owned": {"shard_strategy": "param_boundary", "block_size": 256},
    "replicated": {"placements": (Replicate(),), "block_size": 256},
    "mixture": {"shard_placement_fn": _mixture, "block_size": 256},
    "zero 1": {"shard_strategy": "flat", "block_size": 256, "zero": 1},
    "zero 2": {"shard_strategy": "flat", "block_size": 256, "zero": 2},
    "buckets": {"shard_strategy": "flat", "block_size": 256, "zero": 2, "bucket_size": 5000},
    "offloaded": {"shard_strategy": "flat", "block_size": 256, "cpu_offload": True},
    "merged": {"shard_strategy": "flat", "block_size": 256, "reshard_after_forward": False},
    "alone": {"shard_strategy": "param_boundary"},
}
GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "flat tensors": sw.optimizer_parameters,
    "one flat tensor": lambda model: sw.optimizer_parameters(model, per_unit=False),
    "groups": lambda model: sw.optimizer_parameters(model, _group_of),
    "parameters": lambda model: [p for p in model.parameters() if p.requires_grad],
}


def _group_of(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.1 if parameter.ndim > 1 else 0.0}


def sharded(mesh: DeviceMesh, way: str, frozen: Collection[str] = ()) -> Two:
    model = Two(frozen)
    for each in (model.first, model.second):
        sw.fully_shard_flat(each, mesh, **WAYS[way])
    return model


def train(model: nn.Module, optimizer: Any, steps: range, *, accumulate: bool = False) -> int:
    """Take steps; the collectives of the optimizer's own."""
    sent = 0
    for step in steps:
        optimizer.zero_grad()
        for part in (10, 20) if accumulate else (0,):
            model(step + part).backward()
        units = list(units_in(model))
        before = [unit.comm.sequence for unit in units]
        optimizer.step()
        sent += sum(u.comm.sequence - b for u, b in zip(units, before, strict=True))
    return sent


@functools.cache
def alone(
    given: str = "parameters", *, accumulate: bool = False, frozen: tuple[str, ...] = ()
) -> Found:
    """What one process has after all steps."""
    model = Two(frozen)
    parameters: Any = GIVEN["parameters"](model)
    if given == "groups":
        named = dict(model.named_parameters())
        parameters = [{"params": [p], **_group_of(n, p)} for n, p in named.items()]
    optimizer = sw.AdamW8bit(parameters, lr=0.01, weight_decay=0.1)
    train(model, optimizer, range(STEPS), accumulate=accumulate)
    found = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[p].items()}
    return found


def held(model: nn.Module, optimizer: Any) -> Found:
    """Whole weights and states by name (collective)."""
    found = sw.full_state_dict(model)
    for name, states in sw.optimizer_state_dict(model, optimizer)["state"].items():
        for key, value in states.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name}/{key}"] = whole
    return found


def differences(found: Found, wanted: Found) -> list[str]:
    """What is not equal bit for bit."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return [
        name
        for name, value in wanted.items()
        if value.dtype != found[name].dtype or not torch.equal(value, found[name])
    ]


def trained(
    mesh: DeviceMesh, way: str, given: str, accumulate: bool = False, grid: Any = None
) -> tuple[list[str], int]:
    """What is not that of one process, and how many collectives optimizers' steps had."""
    model = sharded(mesh if grid is None else MESHES[grid], way)
    optimizer = sw.AdamW8bit(GIVEN[given](model), lr=0.01, weight_decay=0.1)
    sent = train(model, optimizer, range(STEPS), accumulate=accumulate)
    return differences(held(model, optimizer), alone(given, accumulate=accumulate)), sent


def on_a_grid(mesh: DeviceMesh, zero: Any, given: str) -> tuple[list[str], int]:
    """The same on two replicas of two shards."""
    model = Two()
    for each in (model.first, model.second):
        sw.fully_shard_flat(each, MESHES[2, 2], shard_strategy="flat", block_size=256, zero=zero)
    optimizer = sw.AdamW8bit(GIVEN[given](model), lr=0.01, weight_decay=0.1)
    sent = train(model, optimizer, range(STEPS))
    return differences(held(model, optimizer), alone(given)), sent


# ---- beside tensor parallelism -------------------------------------------------------------------

GRIDS: dict[tuple[int, ...], DeviceMesh] = {}
JOINT = {  # of which tensor-parallel ranks have rows of some, so that parts are whole blocks
    "up": (128, 64),
    "gate": (256, 32),
    "table": (16384,),
    "cube": (64, 8, 32),
    "bias": (64,),
    "norm": (4095,),
    "scale": (),
}


class Joint(nn.Module):
    """Parameters of ``shapes`` of which tensor-parallel ranks have parts along the ``dims``."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def parallelize(self, mesh: DeviceMesh, dims: dict[str, int | None]) -> None:
        for name, dim in dims.items():
            words: list[Any] = [TorchReplicate() if dim is None else TorchShard(dim)]
            whole = getattr(self, name)
            cut = distribute_tensor(whole.detach(), mesh, words)
            setattr(self, name, nn.Parameter(cut, requires_grad=whole.requires_grad))

    def forward(self, step: int) -> torch.Tensor:
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            factor = gradient_of(name, tuple(parameter.shape), step)
            if isinstance(parameter, DTensor):
                factor = distribute_tensor(factor, parameter.device_mesh, parameter.placements)
                total = total + (parameter * factor).sum().full_tensor()
            else:
                total = total + (parameter * factor).sum()
        return total


def grid(*sizes: int) -> DeviceMesh:
    """(shard, tensor), or (replicate, shard, tensor); made once."""
    if sizes not in GRIDS:
        names = ("replicate", "shard", "tensor")[-len(sizes) :]
        GRIDS[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return GRIDS[sizes]


def jointly(
    mesh: DeviceMesh,
    sizes: tuple[int, ...],
    options: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    dims: dict[str, int | None],
    frozen: tuple[str, ...] = (),
    folder: Path | None = None,
) -> list[str]:
    """What is not that of one process after all steps, of units on the shards of a grid whose other
    ranks have parts along ``dims``; with a ``folder`` half of the steps come from a checkpoint."""

    def made() -> tuple[Joint, Any]:
        model = Joint(shapes)
        for name in frozen:
            getattr(model, name).requires_grad_(False)
        whole = grid(*sizes)
        model.parallelize(whole["tensor"], dims)
        own = whole["replicate", "shard"] if whole.ndim == 3 else whole["shard"]
        sw.fully_shard_flat(model, own, **options)
        learning = [p for p in model.parameters() if p.requires_grad]
        return model, sw.AdamW8bit(learning, lr=0.01, weight_decay=0.1)

    model, optimizer = made()
    first = 2 if folder else STEPS
    train(model, optimizer, range(first))
    if folder:
        sw.save_checkpoint(folder, model, optimizer, step=first)
        model, optimizer = made()
        sw.load_checkpoint(folder, model, optimizer)
        train(model, optimizer, range(first, STEPS))
    wanted = _alone_jointly(tuple(shapes.items()), tuple(frozen))
    return differences(held(model, optimizer), wanted)


@functools.cache
def _alone_jointly(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], frozen: tuple[str, ...]
) -> Found:
    """What one process has after all steps of such parameters."""
    reference = Joint(dict(shapes))
    for name in frozen:
        getattr(reference, name).requires_grad_(False)
    learning = {n: p for n, p in reference.named_parameters() if p.requires_grad}
    other = sw.AdamW8bit(learning.values(), lr=0.01, weight_decay=0.1)
    train(reference, other, range(STEPS))
    wanted = {name: p.detach() for name, p in reference.named_parameters()}
    for name, p in learning.items():
        wanted |= {f"{name}/{key}": value for key, value in other.state[p].items()}
    return wanted


def joint_refusal(mesh: DeviceMesh, options: Any, shape: tuple[int, ...], dim: int) -> str:
    """What is said of a part that divides blocks, on two shards of two parts."""
    shapes: dict[str, tuple[int, ...]] = {"up": shape}
    return said(lambda: jointly(mesh, (2, 2), options, shapes, {"up": dim}))


# ---- states that move ----------------------------------------------------------------------------


def saved(
    mesh: DeviceMesh, way: str, given: str, folder: Path, frozen: Collection[str] = ()
) -> None:
    """Half of the steps, and a checkpoint."""
    model = sharded(mesh, way, frozen)
    optimizer = sw.AdamW8bit(GIVEN[given](model), lr=0.01, weight_decay=0.1)
    train(model, optimizer, range(2))
    sw.save_checkpoint(folder, model, optimizer, step=2)


def resumed(
    mesh: DeviceMesh, way: str, given: str, folder: Path, frozen: Collection[str] = ()
) -> list[str]:
    """The other half from there, on other ranks."""
    model = sharded(mesh, way, frozen)
    optimizer = sw.AdamW8bit(GIVEN[given](model), lr=0.5, weight_decay=0.0)
    sw.load_checkpoint(folder, model, optimizer)
    train(model, optimizer, range(2, STEPS))
    return differences(held(model, optimizer), alone(frozen=tuple(frozen)))


def handed_on(mesh: DeviceMesh, way: str, given: str, fresh: bool) -> list[str]:
    """By ``optimizer_state_dict`` to another optimizer, which has taken a step or none."""
    model = sharded(mesh, way)
    optimizer = sw.AdamW8bit(GIVEN[given](model), lr=0.01, weight_decay=0.1)
    train(model, optimizer, range(2))
    state, weights = sw.optimizer_state_dict(model, optimizer), sw.full_state_dict(model)
    other = sharded(mesh, "flat")
    second = sw.AdamW8bit(GIVEN["flat tensors"](other), lr=0.7)
    if not fresh:
        train(other, second, range(1))
    other.load_state_dict(weights)
    sw.load_optimizer_state_dict(other, second, state)
    train(other, second, range(2, STEPS))
    return differences(held(other, second), alone())


def local_states(mesh: DeviceMesh, given: str) -> list[str]:
    """By ``optimizer.state_dict()`` of torch, rank by rank."""
    model = sharded(mesh, "flat")
    optimizer = sw.AdamW8bit(GIVEN[given](model), lr=0.01, weight_decay=0.1)
    train(model, optimizer, range(2))
    second = sw.AdamW8bit(GIVEN[given](model), lr=0.5)
    second.load_state_dict(optimizer.state_dict())
    train(model, second, range(2, STEPS))
    return differences(held(model, second), alone())


# ---- what is refused -----------------------------------------------------------------------------


def _refused(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], Any]]]:
    def unit(**options: Any) -> Sum:
        model = Sum(1)
        sw.fully_shard_flat(model, mesh, **options)
        return model

    flat = unit(shard_strategy="flat")
    yield "cuts anywhere", lambda: sw.AdamW8bit(sw.optimizer_parameters(flat))
    yield "parameters", lambda: sw.AdamW8bit(flat.parameters())
    fine = unit(shard_strategy="flat", block_size=256)
    flats = sw.optimizer_parameters(fine)
    yield "another block", lambda: sw.AdamW8bit(flats, block_size=512)
    yield "rows", lambda: unit(block_size=256)
    yield (
        "columns",
        lambda: unit(
            block_size=256, shard_placement_fn=lambda n, _: Shard(1) if n == "up" else Owned(0)
        ),
    )
    yield "no size", lambda: unit(block_size=0)
    theirs = nn.Linear(64, 64)
    fully_shard(theirs, mesh=mesh)
    yield "FSDP2", lambda: sw.AdamW8bit(theirs.parameters())


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """What every refusal says."""
    return {name: said(act) for name, act in _refused(mesh)}


def other_states(mesh: DeviceMesh, folder: Path) -> str:
    """AdamW's checkpoint is not one of 8 bits."""
    model = sharded(mesh, "flat")
    optimizer = torch.optim.AdamW(sw.optimizer_parameters(model), lr=0.01)
    train(model, optimizer, range(1))
    sw.save_checkpoint(folder, model, optimizer, step=1)
    model = sharded(mesh, "flat")
    second = sw.AdamW8bit(sw.optimizer_parameters(model))
    return said(lambda: sw.load_checkpoint(folder, model, second))


def kept_bytes(mesh: DeviceMesh) -> tuple[int, int]:
    """Bytes of states on this rank, and of its elements in 8 bits, padding included."""
    model = sharded(mesh, "flat")
    flats = sw.optimizer_parameters(model)
    optimizer = sw.AdamW8bit(flats)
    train(model, optimizer, range(1))
    states = [t for p in flats for t in optimizer.state[p].values()]
    codes = [local_of(t).numel() for t in states if t.dtype == torch.uint8]
    return sum(local_of(t).nbytes for t in states), sum(codes) // 2
