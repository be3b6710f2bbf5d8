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
    elif what == "tied to another unit":
        first, module = nn.Linear(5, 5), nn.Linear(5, 5)
        module.weight = first.weight
        flat(first, mesh)
    elif what == "inside a unit":
        flat(module, mesh)
        module = module[0]  # type: ignore[index, assignment]
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


def by_hand(mesh: DeviceMesh) -> Any:
    """Gradients of a unit that the caller unshards and reshards, beside the reference's."""
    rank, size = mesh.get_local_rank(), mesh.size()
    module, reference = network(), network()
    storage = flat(module, mesh, register_hooks=False)
    storage.unshard()
    module(inputs(rank)).square().sum().backward()
    storage.reshard()
    for other in range(size):
        (reference(inputs(other)).square().sum() / size).backward()
    return _differences(storage, module, reference, rank)


def _differences(
    storage: DStorage, module: nn.Module, reference: nn.Module, rank: int
) -> dict[str, float]:
    """The largest difference of each local gradient from the reference's part."""
    true = dict(reference.named_parameters())
    found = {}
    for piece, (name, parameter) in zip(
        storage.layout.pieces(rank), module.named_parameters(), strict=True
    ):
        assert parameter.grad is not None
        part = true[name].grad.reshape(-1)[piece.start : piece.stop]  # type: ignore[union-attr]
        found[name] = (parameter.grad - part).abs().max().item() if piece.numel else 0.0
    return found


def odd_backward(mesh: DeviceMesh, what: str) -> dict[str, float]:
    """Gradients after a step that follows, or is, something unusual."""
    rank, size = mesh.get_local_rank(), mesh.size()
    module, reference = network(), network()
    storage = flat(module, mesh, reshard_after_forward=what != "kept")
    if what == "failed backward":
        with contextlib.suppress(RuntimeError):
            _breaking(module, inputs(rank)).backward()
        module.zero_grad()
    if what in ("forward only", "kept"):
        module(inputs(rank))
        with torch.no_grad():
            storage.flat.mul_(2.0)
            for parameter in reference.parameters():
                parameter.mul_(2.0)
    loss = module(inputs(rank)).square().sum()
    if what == "two forwards":
        loss = loss + module(inputs(rank)).square().sum()
    if what == "backward twice":
        loss.backward(retain_graph=True)
    if what == "eval between":
        with torch.no_grad():
            module(inputs(rank + 1))
    loss.backward(create_graph=what == "create graph")
    for _ in range(2 if what in ("two forwards", "backward twice") else 1):
        for other in range(size):
            (reference(inputs(other)).square().sum() / size).backward()
    return _differences(storage, module, reference, rank)


def _breaking(module: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """A loss whose backward fails inside the unit, after its gradients have begun."""
    module[1].register_full_backward_hook(_break)
    return module(x).sum()


def _break(module: nn.Module, *_: Any) -> None:
    module._backward_hooks.clear()
    raise RuntimeError("asked to break")


def whole_names(mesh: DeviceMesh) -> list[str]:
    """Names of a model of two units and a plain layer."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(2, 2)})
    flat(model["a"], mesh)
    flat(model["b"], mesh)
    return sorted(full_state_dict(model))


def late_optimizer(mesh: DeviceMesh) -> str:
    module = network()
    flat(module, mesh)
    module(inputs(0)).sum().backward()
    try:
        optimizer_parameters(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def in_place_around(mesh: DeviceMesh) -> float:
    """The largest gradient error where a unit's input and output are changed in place."""
    module, reference = network(), network()
    storage = flat(module, mesh)
    for each in (module, reference):
        hidden = (inputs(0).requires_grad_() * 1.0).relu_()
        out = each(hidden)
        out += 1
        out.square().sum().backward()
    return max(_differences(storage, module, reference, mesh.get_local_rank()).values())


def disagreeing_replicas(mesh: DeviceMesh, job: Job) -> str:
    """The text of apply on models whose replicas start apart."""
    torch.manual_seed(mesh.get_local_rank())
    model = DLRM(job)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand(1).item())
    try:
        apply(model, plan(job), mesh)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def odd_lookups(mesh: DeviceMesh, job: Job, what: str) -> str:
    """Lookups and backwards of tables that cannot be exact, or go wrong on one rank only."""
    model = apply(DLRM(job, device="meta"), plan(job), mesh)
    ids = torch.zeros(4, len(job.tables), dtype=torch.int64)
    dense = torch.zeros(4, job.model.dense_features)
    try:
        if what == "bad id on rank 1":
            ids[1, 1] = -7 if mesh.get_local_rank() == 1 else 0
            model(dense, ids)
        elif what == "two lookups":
            (model(dense, ids).sum() + model(dense, ids).sum()).backward()
        elif what == "backward twice":
            loss = model.tables(ids).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def freed(mesh: DeviceMesh) -> Any:
    """Whether deleting the module frees its buffer without the garbage collector."""
    gc.disable()
    try:
        gone = []
        for make in (network, lambda: nn.Linear(5, 5)):
            module = make()
            storage = weakref.ref(flat(module, mesh))
            module(inputs(0)).sum().backward()
            del module
            gone.append(storage() is None)
        return all(gone)
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
