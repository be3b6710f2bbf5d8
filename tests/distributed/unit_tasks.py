"""What the pool's workers do with single units and with models that do not fit their plan."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from shardwright.core.job import Job
from shardwright.models.dlrm import DLRM
from shardwright.planner import plan
from shardwright.runtime.apply import apply
from shardwright.runtime.dstorage import DStorage, State
from shardwright.runtime.fully_shard import fully_shard_flat, get_dstorage
from shardwright.runtime.optimizer import optimizer_parameters
from shardwright.runtime.state import full_state_dict

WIDTHS = (5, 7, 3)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def flat(module: nn.Module, mesh: DeviceMesh, **options: Any) -> DStorage:
    return fully_shard_flat(module, mesh, shard_strategy="flat", **options)


def inputs(rank: int, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11 + rank)
    return torch.randn(4, 5, generator=generator).requires_grad_(grad)


def raw_gradients(mesh: DeviceMesh, reshard: bool, replicate: bool, grad: bool, steps: int) -> Any:
    """Reduced gradients by name beside the unsharded mean, after ``steps`` backwards."""
    rank, size = mesh.get_local_rank(), mesh.size()
    module, reference = network(), network()
    placements = (TorchReplicate(),) if replicate else (TorchShard(0),)
    storage = flat(module, mesh, reshard_after_forward=reshard, placements=placements)
    for _ in range(steps):
        module(inputs(rank, grad)).square().sum().backward()
        for other in range(size):
            (reference(inputs(other)).square().sum() / size).backward()
    found = {}
    for name, parameter in module.named_parameters():
        piece = storage.layout.pieces(0 if replicate else rank)
        held = next(p for p in piece if p.tensor.fqn == name)
        true = dict(reference.named_parameters())[name].grad
        assert true is not None
        got = torch.zeros(0) if parameter.grad is None else parameter.grad.reshape(-1)
        found[name] = (got.clone(), true.reshape(-1)[held.start : held.stop].clone())
    return found, storage.state is State.SHARDED


def states(mesh: DeviceMesh) -> Any:
    """What the module shows and what memory the full buffer holds, step by step."""
    module = network()
    whole = {name: p.detach().clone() for name, p in module.named_parameters()}
    storage = flat(module, mesh)
    seen = [_look(module, storage)]
    storage.unshard()
    seen.append(_look(module, storage))
    equal = all(torch.equal(storage.get_unsharded_view(n), t) for n, t in whole.items())
    bytes_equal = storage.all_gather().numel() == storage.layout.nbytes
    storage.reshard()
    seen.append(_look(module, storage))
    local = storage.get_local_view("0.weight")
    shares = local.untyped_storage().data_ptr() == storage.byte_storage.untyped_storage().data_ptr()
    gathered = full_state_dict(module)
    whole_again = all(torch.equal(gathered[n], t) for n, t in whole.items())
    return seen, equal, bytes_equal, shares, whole_again


def _look(module: nn.Module, storage: DStorage) -> Any:
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    return storage.state.value, shapes, storage._full.untyped_storage().nbytes()


def refusal(mesh: DeviceMesh, what: str) -> str:
    """The text of what cannot be done."""
    module: nn.Module = network()
    options: dict[str, Any] = {"shard_strategy": "flat"}
    if what == "strategy":
        options = {}
    elif what == "owned":
        options["shard_strategy"] = "param_boundary"
    elif what == "placement function":
        options["shard_placement_fn"] = lambda fqn, parameter: None
    elif what == "shard 1":
        options["placements"] = (TorchShard(1),)
    elif what == "dtype":
        module = module.to(torch.bfloat16)
    elif what == "frozen":
        module[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    elif what == "tied":
        layer = nn.Linear(5, 5)
        module = nn.Sequential(layer, nn.Linear(5, 5))
        module[1].weight = layer.weight
    elif what == "empty":
        module = nn.ReLU()
    elif what == "nested":
        flat(module[0], mesh)  # type: ignore[index]
    elif what == "meta":
        module = nn.Linear(3, 3, device="meta")
    try:
        fully_shard_flat(module, mesh, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def survives(mesh: DeviceMesh) -> Any:
    """An exception in the middle of a forward leaves a module that works."""
    module = nn.Sequential(nn.Linear(5, 5), _Fragile())
    storage = flat(module, mesh)
    module[1].broken = True
    with contextlib.suppress(RuntimeError):
        module(inputs(0))
    after = storage.state.value
    module[1].broken = False
    module(inputs(0)).sum().backward()
    return after, storage.state.value, all(p.grad is not None for p in module.parameters())


class _Fragile(nn.Module):
    broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise RuntimeError("asked to break")
        return x


class _ReturnsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[:2]


def returns_a_view(mesh: DeviceMesh) -> str:
    module = _ReturnsItsWeight()
    flat(module, mesh)
    try:
        module(torch.ones(1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def freed(mesh: DeviceMesh) -> Any:
    """Whether deleting the module frees its buffer without the garbage collector."""
    gc.disable()
    try:
        module = network()
        storage = weakref.ref(flat(module, mesh))
        module(inputs(0)).sum().backward()
        del module
        return storage() is None
    finally:
        gc.enable()


def no_grad_leaves_no_trace(mesh: DeviceMesh) -> Any:
    module = network()
    storage = flat(module, mesh, reshard_after_forward=False)
    with torch.no_grad():
        module(inputs(0))
    return (
        storage.state.value,
        [p.grad for p in module.parameters()],
        get_dstorage(module) is storage,
    )


def flat_parameters(mesh: DeviceMesh) -> Any:
    module = network()
    storage = flat(module, mesh)
    (parameter,) = optimizer_parameters(module)
    module(inputs(0)).sum().backward()
    assert parameter.grad is not None
    same = parameter.untyped_storage().data_ptr() == storage.byte_storage.data_ptr()
    return same, parameter.grad.shape == parameter.shape, copy.copy(parameter.shape).numel()


def disagreement(mesh: DeviceMesh, job: Job, other: Job, what: str) -> str:
    """The text of apply on a rank when something differs."""
    odd = mesh.get_local_rank() == 1
    made = plan(other if odd and what == "plan" else job)
    model = DLRM(job, device="meta")
    if what == "model" and odd:
        model.top.add_module("extra", nn.Linear(1, 1, device="meta"))
    if what == "all models":
        model.top.add_module("extra", nn.Linear(1, 1, device="meta"))
    if what == "world":
        made = plan(other)
    try:
        apply(model, made, mesh)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def look_up(mesh: DeviceMesh, job: Job, ids: torch.Tensor) -> str:
    model = apply(DLRM(job, device="meta"), plan(job), mesh)
    try:
        model(torch.zeros(len(ids), job.model.dense_features), ids)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
