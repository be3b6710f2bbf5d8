"""What the pool's workers do with models whose parameters lie in buckets."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import torch
from gradient_tasks import inputs, loss_of, net
from mode_tasks import BACKWARDS, STEPS, Calls
from probe_tasks import said
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.core.placement import Replicate
from shardwright.runtime.units.dstorage import DStorage, units_in
from shardwright.runtime.units.unit import State, Unit

SIZE = 60  # elements of a bucket, about a layer
RATES = {"matrices": 0.05, "vectors": 0.02}
WAYS: dict[str, dict[str, Any]] = {
    "zero1": {"zero": 1, "shard_strategy": "flat"},
    "zero1 ahead": {"zero": 1, "shard_strategy": "flat", "prefetch": 1},
    "zero2": {"zero": 2, "shard_strategy": "flat"},
    "zero2 ahead": {"zero": 2, "shard_strategy": "flat", "prefetch": 1},
    "zero2 rows ahead": {"zero": 2, "prefetch": 1},
    "zero2 owned": {"zero": 2, "shard_strategy": "param_boundary"},
    "ddp": {"placements": (Replicate(),)},
    "ddp ahead": {"placements": (Replicate(),), "prefetch": 1},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "one sum": {"use_distributed_optimizer": True, "bucket_size": SIZE},
    "gradients": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "both": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": SIZE,
        "average_in_collective": True,
    },
    "all-reduce": {"overlap_grad_reduce": True, "bucket_size": SIZE},
}


class Odd(nn.Module):
    """Parameters that others than their owner use: attention's, a tied one, one of the model."""

    def __init__(self, saves: str = "") -> None:
        super().__init__()
        self.saves = saves
        self.shift = nn.Parameter(torch.randn(8) * 0.1)
        self.embed = nn.Embedding(11, 8)
        first, other = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in "ab")
        self.attend = nn.ModuleList([first, other, first])
        self.idle = nn.Linear(8, 3)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, idles: bool = True) -> torch.Tensor:
        x = self.embed(tokens) + self.shift
        for attend in self.attend:
            if self.saves:
                x = checkpoint(self._attended, attend, x, use_reentrant=self.saves == "reentrant")
            else:
                x = self._attended(attend, x)
        out = self.head(x).sum(-1)
        return out if idles else out + self.idle(x).sum(-1)

    def _attended(self, attend: Any, x: torch.Tensor) -> torch.Tensor:
        return x + attend(x, x, x, need_weights=False)[0]


def odd(saves: str = "") -> Odd:
    torch.manual_seed(3)
    return Odd(saves)


def tokens_of(rank: int, step: int) -> torch.Tensor:
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def two_optimizers(model: nn.Module, *, flat: bool) -> list[torch.optim.Optimizer]:
    """One for matrices, one for the rest, of other rates."""
    named = list(model.named_parameters())
    groups = {
        "matrices": [name for name, p in named if p.ndim > 1],
        "vectors": [name for name, p in named if p.ndim <= 1],
    }
    found: list[torch.optim.Optimizer] = []
    for kind, names in groups.items():
        given: Any = [{"params": [p for n, p in named if n in names]}]
        if flat:
            given = sw.optimizer_parameters(model, [{"params": names}])
        found.append(torch.optim.SGD(given, lr=RATES[kind], momentum=0.9))
    return found


@functools.cache
def weights_alone(size: int) -> dict[str, torch.Tensor]:
    """What one process makes of the batches of all ranks."""
    model = net()
    optimizers = two_optimizers(model, flat=False)
    for step in range(STEPS):
        model.zero_grad()
        for number in range(BACKWARDS):
            for rank in range(size):
                (loss_of(model, inputs(rank, step * BACKWARDS + number)) / size).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model.state_dict()


def apart(model: nn.Module, true: dict[str, torch.Tensor]) -> float:
    found = sw.full_state_dict(model)
    assert found.keys() == true.keys()
    return max((found[name] - true[name]).abs().max().item() for name in true)


def counted(model: nn.Module) -> tuple[list[Unit], Calls]:
    units, calls = list(units_in(model)), Calls()
    for peers in (units[0].comm, units[0].comm.twins):
        if peers is not None:
            peers.probe = calls
    return units, calls


def train(mesh: DeviceMesh, way: str, size: int, *, holds: bool, flat: bool) -> Any:
    """Weights beside those of one process, buckets, and the collectives of each step."""
    model = net()
    sw.fully_shard_flat(model, mesh, bucket_size=size, **WAYS[way])
    units, calls = counted(model)
    optimizers, by_step = two_optimizers(model, flat=flat), []
    for step in range(STEPS):
        calls.found.clear()
        model.zero_grad()
        for number in range(BACKWARDS):
            waits = holds and number < BACKWARDS - 1
            with DStorage(units[0]).no_sync() if waits else contextlib.nullcontext():
                x = inputs(mesh.get_local_rank(), step * BACKWARDS + number)
                loss_of(model, x).backward()
        for optimizer in optimizers:
            optimizer.step()
        by_step.append(dict(calls.found))
    return apart(model, weights_alone(mesh.size())), len(units), by_step


def train_as_megatron(mesh: DeviceMesh, config: str) -> Any:
    """The same through ``Buckets``; and whether gradients waited for ``finish_grad_sync``."""
    model, waited = net(), []
    buckets = sw.Buckets(model, mesh, **CONFIGS[config])
    units, calls = counted(model)
    optimizers, by_step = two_optimizers(model, flat=True), []
    for step in range(STEPS):
        calls.found.clear()
        buckets.zero_grad_buffer()
        for number in range(BACKWARDS):
            x = inputs(mesh.get_local_rank(), step * BACKWARDS + number)
            with buckets.no_sync() if number < BACKWARDS - 1 else contextlib.nullcontext():
                loss_of(model, x).backward()
        waited.append(all(p.grad is None for p in model.parameters()))
        if step == 1:
            buckets.start_grad_sync()
        buckets.finish_grad_sync()
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:
            buckets.start_param_sync()
        if step == 2:
            buckets.start_param_sync(force_sync=True)
        by_step.append(dict(calls.found))
    rested = all(unit.state is State.SHARDED for unit in units)
    return apart(model, weights_alone(mesh.size())), len(units), by_step, waited, rested


class _Log(Calls):
    """Gathers and sums in one list with whatever else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def collective(self, label: str, nbytes: int) -> None:
        self.events.append(label.removeprefix("Net "))


def order(mesh: DeviceMesh, way: str) -> Any:
    """What happens in a step, and the parameters of every bucket."""
    model = net()
    sw.fully_shard_flat(model, mesh, bucket_size=SIZE, **WAYS[way])
    units, log = list(units_in(model)), _Log()
    optimizer = torch.optim.SGD(sw.optimizer_parameters(model), lr=0.1)

    def follow(name: str) -> Any:
        def after(module: nn.Module, given: Any, out: torch.Tensor) -> None:
            log.events.append(f"{name} ran")
            out.register_hook(lambda _: log.events.append(f"{name} backward"))

        return after

    for index, block in enumerate(model.blocks):
        block.register_forward_hook(follow(f"block {index}"))
    for step in range(3):
        units[0].comm.probe = log
        log.events.clear()
        loss_of(model, inputs(mesh.get_local_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return log.events, [list(unit.param_infos) for unit in units]


def odd_model(mesh: DeviceMesh, way: str, saves: str) -> float:
    """Gradients of parameters that are used elsewhere than in their own module's forward."""
    model, true = odd(saves), odd()
    sw.fully_shard_flat(model, mesh, bucket_size=100, **WAYS[way])
    rank, worst = mesh.get_local_rank(), 0.0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.002) for m in (model, true)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(tokens_of(rank, step), idles=rank > 0).square().mean().backward()
        for each in range(mesh.size()):
            loss = true(tokens_of(each, step), idles=each > 0).square().mean()
            (loss / mesh.size()).backward()
        for optimizer in optimizers:
            optimizer.step()
        worst = max(worst, apart(model, true.state_dict()))
    return worst


class Branches(nn.Module):
    """Layers that a forward runs in the order it is told, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(5, 5) for name in "abc"})
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        for name in order:
            x = self.layers[name](x).tanh()
        return self.head(x)


@functools.cache
def branches() -> Branches:
    torch.manual_seed(4)
    return Branches()


ORDERS: dict[str, tuple[tuple[str, ...], ...]] = {  # of every step, those of the ranks in turn
    "all skip": (("abc",), ("ac",), ("abc",)),
    "one skips later": (("abc",), ("abc", "ac"), ("abc",)),
    "one skips at first": (("abc", "ac"), ("abc", "c"), ("abc",)),
    "another order": (("abc",), ("abc", "cba", "b"), ("abc",)),
}


def branching(mesh: DeviceMesh, way: str, orders: str, size: int = 1) -> float:
    """Weights where steps run other modules, on some ranks or all; looks in between do as well."""
    rank, worst = mesh.get_local_rank(), 0.0
    model, true = copy.deepcopy(branches()), copy.deepcopy(branches())
    sw.fully_shard_flat(model, mesh, bucket_size=size, **WAYS[way])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, true)]
    for step, ranks in enumerate(ORDERS[orders]):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for each in range(mesh.size()):
            x, order = five(each, step), ranks[each % len(ranks)]
            (true(x, order).square().mean() / mesh.size()).backward()
            if each == rank:
                model(x, order).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            x, order = five(9, step), ("abc", "a", "b")[rank % 3]
            worst = max(worst, (model(x, order) - true(x, order)).abs().max().item())
        worst = max(worst, apart(model, true.state_dict()))
    return worst


def five(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=generator, requires_grad=True)


def saved_as_a_whole(mesh: DeviceMesh, way: str) -> float:
    """Weights where a checkpoint runs the whole model again."""
    model, true = copy.deepcopy(branches()), copy.deepcopy(branches())
    sw.fully_shard_flat(model, mesh, bucket_size=1, **WAYS[way])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, true)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for each in range(mesh.size()):
            (true(five(each, step), "abc").square().mean() / mesh.size()).backward()
        x = five(mesh.get_local_rank(), step)
        checkpoint(model, x, "abc", use_reentrant=True).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return apart(model, true.state_dict())


def updated_before_its_backward(mesh: DeviceMesh, way: str, unshards: bool) -> str:
    """What is said where an optimizer steps between a forward and its backward."""
    model = copy.deepcopy(branches())
    sw.fully_shard_flat(model, mesh, bucket_size=1, **WAYS[way])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for unit in units_in(model):
        unit.unshard_in_backward = unshards
    model(five(0, 0), "abc").sum().backward()
    loss = model(five(0, 1), "abc").sum()
    optimizer.step()
    return said(loss.backward)


def copies(mesh: DeviceMesh) -> Any:
    """A copy trains alone; a state goes into a model without buckets; moved, it trains on."""
    model = net()
    sw.fully_shard_flat(model, mesh, bucket_size=SIZE, **WAYS["zero2 ahead"])
    made = copy.deepcopy(model)
    start = {name: value.clone() for name, value in sw.full_state_dict(model).items()}
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(made, inputs(0, step)).backward()
        optimizer.step()
    kept = all(torch.equal(sw.full_state_dict(model)[n], value) for n, value in start.items())
    moved = any(not torch.equal(sw.full_state_dict(made)[n], v) for n, v in start.items())
    plain = net(seed=9)
    plain.load_state_dict(start)
    model.to(torch.float64)
    plain.to(torch.float64)
    x = inputs(0).double()
    equal = torch.equal(model(x), plain(x))
    views = [DStorage(unit).views() for unit in units_in(model)]
    outside = [name for seen in views for name in seen.outside]
    return kept, moved, equal, {v.invalidations for v in views}, outside


_GRIDS: list[DeviceMesh] = []


def on_grid(mesh: DeviceMesh) -> float:
    """Instances of the distributed optimizer: two of two ranks."""
    if not _GRIDS:
        _GRIDS.append(init_device_mesh("cpu", (2, 2)))
    model, rank = net(), mesh.get_local_rank()
    config = {**CONFIGS["both"], "num_distributed_optimizer_instances": 1}
    buckets = sw.Buckets(model, _GRIDS[0], **config)
    optimizers = two_optimizers(model, flat=True)
    for step in range(STEPS):
        buckets.zero_grad_buffer()
        for number in range(BACKWARDS):
            with buckets.no_sync() if number < BACKWARDS - 1 else contextlib.nullcontext():
                loss_of(model, inputs(rank, step * BACKWARDS + number)).backward()
        buckets.finish_grad_sync()
        for optimizer in optimizers:
            optimizer.step()
    return apart(model, weights_alone(4))


def dropped(mesh: DeviceMesh) -> float:
    """A step that is dropped before its sums are taken, and then those that count."""
    model, rank = net(), mesh.get_local_rank()
    buckets = sw.Buckets(model, mesh, **CONFIGS["one sum"])
    optimizers = two_optimizers(model, flat=True)
    loss_of(model, inputs(rank, 100)).backward()
    for step in range(STEPS):
        buckets.zero_grad_buffer()
        for number in range(BACKWARDS):
            loss_of(model, inputs(rank, step * BACKWARDS + number)).backward()
        buckets.finish_grad_sync()
        for optimizer in optimizers:
            optimizer.step()
    return apart(model, weights_alone(mesh.size()))


def in_another_dtype(mesh: DeviceMesh) -> Any:
    """bf16 parameters whose gradients are summed in fp32, and their dtypes."""
    model = net().bfloat16()
    sw.Buckets(model, mesh, grad_reduce_in_fp32=True, **CONFIGS["both"])
    loss_of(model, inputs(mesh.get_local_rank()).bfloat16()).backward()
    reduced = {views.reduced for unit in units_in(model) for views in unit.buffers.segments}
    return reduced, {p.grad.dtype for p in model.parameters() if p.grad is not None}


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    shard, megatron = sw.fully_shard_flat, sw.Buckets
    return {
        "zero 3": said(lambda: shard(net(), mesh, bucket_size=5)),
        "no size": said(lambda: shard(net(), mesh, bucket_size=0, zero=2)),
        "by hand": said(lambda: shard(net(), mesh, bucket_size=5, zero=2, register_hooks=False)),
        "unknown": said(lambda: megatron(net(), mesh, bucketsize=5)),
        "instances": said(lambda: megatron(net(), mesh, num_distributed_optimizer_instances=2)),
        "nans": said(lambda: megatron(net(), mesh, check_for_nan_in_grad=True)),
        "gather alone": said(lambda: megatron(net(), mesh, overlap_param_gather=True)),
    }
