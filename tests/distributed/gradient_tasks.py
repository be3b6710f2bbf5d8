"""Raw gradients of sharded modules beside those of the unsharded one, many cases in a call."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from probe_tasks import MESHES
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwright.core.placement import BlockShard, Owned, Placement, Replicate, Shard
from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.torch_private import local_of
from shardwright.runtime.units.cut import part_of
from shardwright.runtime.units.cutting import MixedPrecision
from shardwright.runtime.units.dstorage import DStorage, units_in
from shardwright.runtime.units.unit import State, Unit
from shardwright.tracker.memory import MemoryTracker

STRATEGIES = ("flat", "per_param", "param_boundary", "mixture")
ACCUMULATION = ("one backward", "three backwards", "no_sync, then sync")
DTYPES = ("fp32", "bf16 beside fp32", "bf16 computed, fp32 reduced")
RESHARD = ("resharded", "kept", "sub-mesh", "whole")
SHAPES = ("one by one", "merged")


class Block(nn.Module):
    """Odd sizes, a scalar, a matrix with fewer rows than ranks, and a layer that may be bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.gate = nn.Parameter(torch.randn(2, 5) * 0.3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        out = self.down(hidden.to(self.down.weight.dtype)).to(x.dtype)
        return x + out * self.scale * self.gate.sum(0)


class Net(nn.Module):
    """A stack whose ends belong to the root's unit."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def net(mixed: bool = False, seed: int = 5) -> Net:
    torch.manual_seed(seed)
    made = Net()
    if mixed:
        for block in made.blocks:
            block.down.to(torch.bfloat16)
    return made


def mixture(fqn: str, parameter: nn.Parameter) -> Placement | None:
    """Another placement for every kind of parameter."""
    if fqn.endswith("up.weight"):
        return Shard(1)
    if fqn.endswith("down.weight"):
        return BlockShard(3)
    if fqn.endswith("bias"):
        return Owned(0)
    if fqn.endswith("norm.weight"):
        return Replicate()
    return None


def inputs(rank: int, step: int = 0, width: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + 10 * step + rank)
    return torch.randn(4, width, generator=generator)


def shard(
    model: Net, mesh: DeviceMesh, strategy: str, *, merged: bool = False, **options: Any
) -> list[Unit]:
    """Every block a unit, or all of them one, and the root another."""
    if strategy == "mixture":
        options["shard_placement_fn"] = mixture
    else:
        options["shard_strategy"] = strategy
    for modules in [list(model.blocks)] if merged else [[block] for block in model.blocks]:
        fully_shard_flat(modules, mesh, **options)
    fully_shard_flat(model, mesh, **options)
    return list(units_in(model))


def errors(
    units: list[Unit], model: nn.Module, true: dict[str, torch.Tensor]
) -> dict[str, tuple[float, bool]]:
    """Of every local gradient the largest difference from the true one, and whether bits agree."""
    named = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    found = {}
    for unit in units:
        for member, piece in zip(unit.members, unit.layout.pieces(unit.comm.rank), strict=True):
            name = named[id(member.parameter)]
            gradient = member.parameter.grad
            assert gradient is not None, name
            got, wanted = local_of(gradient), part_of(true[name], piece.offsets, piece.sizes)
            assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
            assert got.dtype == wanted.dtype, (name, got.dtype, wanted.dtype)
            difference = (got.double() - wanted.double()).abs().max().item() if got.numel() else 0.0
            scale = max(1.0, wanted.abs().max().item()) if got.numel() else 1.0
            found[name] = (difference / scale, torch.equal(got, wanted))
    return found


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().sum()


def local_gradients(reference: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What one rank computes before anything is reduced."""
    reference.zero_grad()
    loss_of(reference, x).backward()
    found = {}
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
    return found


@functools.cache
def true_gradients(size: int, dtypes: str, accumulation: str) -> dict[str, torch.Tensor]:
    """The mean over ranks, summed in the order in which the runtime sums."""
    reference: nn.Module = net(mixed=dtypes == "bf16 beside fp32")
    wanted = {name: p.dtype for name, p in reference.named_parameters()}
    computed = reference.to(torch.bfloat16) if dtypes.startswith("bf16 computed") else reference
    dtype = torch.bfloat16 if dtypes.startswith("bf16 computed") else torch.float32
    steps = 1 if accumulation == "one backward" else 3
    each = [
        [local_gradients(computed, inputs(rank, step).to(dtype)) for step in range(steps)]
        for rank in range(size)
    ]
    if dtypes.startswith("bf16 computed"):
        each = [[{n: g.float() for n, g in step.items()} for step in rank] for rank in each]
    if accumulation.startswith("no_sync"):
        each = [[_summed(rank)] for rank in each]
    means = []
    for step in range(len(each[0])):
        total = _summed([rank[step] for rank in each])
        means.append({name: g * (1.0 / size) for name, g in total.items()})
    return {name: g.to(wanted[name]) for name, g in _summed(means).items()}


def _summed(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    total = {name: g.clone() for name, g in parts[0].items()}
    for part in parts[1:]:
        for name, g in part.items():
            total[name] += g
    return total


def cases(strategy: str, every: int) -> Iterator[tuple[str, str, str, str, int]]:
    """Of accumulation x dtypes x resharding ``every`` so many, that strategies share between them,
    each with other resharding for all pairs of the rest; prefetch and merging take turns."""
    grid = itertools.product(ACCUMULATION, DTYPES, RESHARD)
    for number, (accumulation, dtypes, reshard) in enumerate(grid):
        shape, prefetch = SHAPES[number // 2 % 2], number % 2
        turn = number + number // 4 + number // 12 * 2 + STRATEGIES.index(strategy)
        if turn % every == 0:
            yield accumulation, dtypes, reshard, shape, prefetch


def raw_gradients(
    mesh: DeviceMesh, strategy: str, every: int, replicas: int = 0
) -> dict[str, dict[str, tuple[float, bool]]]:
    """The errors of the cases of a strategy; with ``replicas`` of those that cut gradients once
    more."""
    grid = MESHES[replicas, mesh.size() // replicas] if replicas else None
    found = {}
    rank, size = mesh.get_local_rank(), mesh.size()
    for case in cases(strategy, every):
        accumulation, dtypes, reshard, shape, prefetch = case
        model = net(mixed=dtypes == "bf16 beside fp32")
        precision = None
        if dtypes.startswith("bf16 computed"):
            precision = MixedPrecision(torch.bfloat16, torch.float32)
        columns = size if grid is None else grid.size(1)
        sub_mesh = columns // 2 if columns % 2 == 0 else 1
        kinds: dict[str, bool | int | None]
        kinds = {"resharded": True, "kept": False, "sub-mesh": sub_mesh, "whole": None}
        units = shard(
            model,
            mesh if grid is None else grid,
            strategy,
            merged=shape == "merged",
            reshard_after_forward=kinds[reshard],
            precision=precision,
            prefetch=prefetch,
            zero=(2, 3) if grid else 2 if reshard == "whole" else 3,
        )
        steps = 1 if accumulation == "one backward" else 3
        for step in range(steps):
            held = accumulation.startswith("no_sync") and step < steps - 1
            with DStorage(units[0]).no_sync() if held else contextlib.nullcontext():
                loss_of(model, inputs(rank, step)).backward()
        assert all(unit.state is State.SHARDED or unit.keeps_whole for unit in units), case
        label = ", ".join((accumulation, dtypes, reshard, shape, f"prefetch {prefetch}"))
        found[label] = errors(units, model, true_gradients(size, dtypes, accumulation))
    return found


def summed_in_halves(mesh: DeviceMesh) -> float:
    """The largest error of gradients that travel in fp16, relative to the largest of a tensor."""
    model = net()
    units = shard(model, mesh, "flat", precision=MixedPrecision(reduce_dtype=torch.float16))
    loss_of(model, inputs(mesh.get_local_rank())).backward()
    true = true_gradients(mesh.size(), "fp32", "one backward")
    return max(error for error, _ in errors(units, model, true).values())


class _Steps(nn.Module):
    """Layers in units of their own, the last of which only the first microbatch uses, and numbers
    that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        for layer in self.layers if whole else self.layers[:2]:
            x = layer(x).tanh() * self.scale
        return x


def summed_over_replicas_at_last(mesh: DeviceMesh, way: Any, all_used: bool) -> tuple[float, int]:
    """How far gradients are from those that every microbatch sums over all ranks, as a share of
    the largest, and the most bytes that they took beside the shards."""
    found, peak = [], 0
    for postpones in (False, True):
        model = _Steps()
        for part in (*model.layers, model):
            if way == "fsdp2":
                fully_shard(part, mesh=MESHES[2, 2], ignored_params={model.scale})
            else:
                fully_shard_flat(part, MESHES[2, 2], **way)
        with MemoryTracker(model) as tracker:
            before = tracker.total
            for number in range(3):
                if postpones:
                    model.set_requires_all_reduce(number == 2)  # type: ignore[operator]
                whole = all_used or number == 0
                model(inputs(dist.get_rank(), number, 64), whole).square().sum().backward()
            peak = tracker.peak.bytes - before
        grads = [p.grad for p in model.parameters() if p is not model.scale or way != "fsdp2"]
        found.append([g.full_tensor() if isinstance(g, DTensor) else g for g in grads])
    largest = max(grad.abs().max() for grad in found[0])
    apart = max((one - two).abs().max() for one, two in zip(*found, strict=True))
    return (apart / largest).item(), peak
