"""What the pool's workers do with single units and with models that do not fit their plan."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from gradient_tasks import errors, inputs, loss_of, mixture, net, shard
from probe_tasks import said
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from shardwright.core.placement import BlockShard, Owned, Shard
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job
from shardwright.job.plan import Plan, sealed
from shardwright.models.dlrm import DLRM
from shardwright.runtime.apply import apply
from shardwright.runtime.comm import Comm
from shardwright.runtime.fully_shard import check_offload, fully_shard_flat
from shardwright.runtime.state import full_state_dict
from shardwright.runtime.units.buffers import shard_buffer
from shardwright.runtime.units.cutting import MixedPrecision
from shardwright.runtime.units.dstorage import DStorage, get_dstorage, units_in
from shardwright.runtime.units.gradients import SegmentGradient
from shardwright.runtime.units.unit import State, Unit

STRATEGIES = ("flat", "per_param", "param_boundary", "mixture")


def options(strategy: str) -> dict[str, Any]:
    if strategy == "mixture":
        return {"shard_placement_fn": mixture}
    return {"shard_strategy": strategy}


def true_of(
    reference: nn.Module, size: int, loss: Callable[[nn.Module, int], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The mean over ranks of the unsharded gradients, zero where there is none."""
    for rank in range(size):
        (loss(reference, rank) / size).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in reference.named_parameters()
    }


def worst(found: dict[str, tuple[float, bool]]) -> float:
    return max(error for error, _ in found.values())


# ---- states -------------------------------------------------------------------------------------


def states(mesh: DeviceMesh, strategy: str) -> Any:
    """What the module shows and what memory the whole unit holds, step by step."""
    module = net()
    original = {name: p.detach().clone() for name, p in module.named_parameters()}
    storage = fully_shard_flat(module, mesh, **options(strategy))
    seen = [_look(module, storage)]
    storage.unshard()
    seen.append(_look(module, storage))
    views = {n: storage.get_unsharded_view(n) for n in original}
    equal = all(torch.equal(views[n], t) for n, t in original.items())
    storage.reshard()
    seen.append(_look(module, storage))
    late = said(lambda: storage.get_unsharded_view("first.weight"))
    again = full_state_dict(module)
    equal_again = all(torch.equal(again[n], t) for n, t in original.items())
    return seen, equal, late, equal_again


def _look(module: nn.Module, storage: DStorage) -> Any:
    kinds = {type(p.data).__name__ for p in module.parameters()}
    dims = {p.dim() for p in module.parameters()}
    return storage.state.value, kinds, dims, storage.unit.buffers.whole.storage.nbytes()


def views(mesh: DeviceMesh, strategy: str) -> Any:
    """Whether every view lies in the shard, and what ``all_gather`` holds where."""
    module = net(mixed=True)
    original = {name: p.detach().clone() for name, p in module.named_parameters()}
    storage = fully_shard_flat(module, mesh, **options(strategy))
    first = storage.byte_storage.data_ptr()
    inside = True
    for fqn, info in storage.param_infos.items():
        view = storage.get_local_view(fqn)
        assert view.shape == info.local_shape
        assert view.dtype == info.dtype
        if view.numel():
            inside &= view.data_ptr() == first + info.byte_offset
    gathered = storage.all_gather()
    equal = gathered.numel() == storage.layout.nbytes
    for fqn, info in storage.param_infos.items():
        begin = info.unsharded_byte_offset
        end = begin + info.global_shape.numel() * info.dtype.itemsize
        part = gathered[begin:end].view(info.dtype).view(info.global_shape)
        equal &= torch.equal(part, original[fqn])
    with torch.no_grad():
        storage.get_local_view("first.weight").fill_(3.0)
    shown = module.first.weight
    local = shown.to_local() if isinstance(shown, DTensor) else shown
    return inside, equal, bool((local == 3.0).all())


def nothing_new_in_a_step(mesh: DeviceMesh, strategy: str) -> Any:
    """Addresses of everything that is cached, before and after steps, and what moved."""
    model = net()
    units = shard(model, mesh, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(4):
        loss_of(model, inputs(mesh.get_local_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([_cached(unit) for unit in units])
    shared = all(
        _share_storage(unit.buffers.shard, unit.buffers.locals)
        and _share_storage(unit.buffers.whole.tensor, _whole_views(unit))
        and all(_share_storage(g.send.tensor, _sent(g)) for g in unit.gradients.segments)
        for unit in units
    )
    return seen[0] == seen[1] == seen[2] == seen[3], shared


def _whole_views(unit: Unit) -> list[torch.Tensor]:
    rows = zip(unit.buffers.segments, unit.layout.segments, strict=True)
    cut = [views.refill for views, segment in rows if segment.cut != "replicated"]
    return [view for view in cut if view.numel()]


def _share_storage(buffer: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    address = buffer.untyped_storage()._cdata
    return all(part.untyped_storage()._cdata == address for part in parts)


def _cached(unit: Unit) -> Any:
    shown = [(id(m.parameter), m.parameter.data_ptr()) for m in unit.members if unit.members]
    gradients = unit.gradients.segments
    kept = [*unit.buffers.locals, *unit.buffers.parameters]
    kept += [view for gradient in gradients for view in _sent(gradient)]
    kept += [t for together in unit.buffers.assemblies for t in (together.shares, *together.rows)]
    storages = [unit.buffers.shard, unit.buffers.whole.tensor, *(g.send.tensor for g in gradients)]
    return shown, [id(t) for t in kept], [t.untyped_storage()._cdata for t in storages]


def _sent(gradient: SegmentGradient) -> list[torch.Tensor]:
    return [share for strips in gradient.apart.strips for share in strips.shares]


def dropped_on_its_way(mesh: DeviceMesh) -> list[int]:
    """Bytes of what is sent when a reduction that is dropped is waited for, and afterwards."""
    model = nn.Linear(4, 3)
    storage = fully_shard_flat(model, mesh, register_hooks=False)
    storage.unshard()
    unit = storage.unit
    model(torch.ones(2, 4)).sum().backward()
    unit.start_reduce()
    ((gradient, _, _, _, pending),) = unit.gradients.under_way
    assert pending is not None
    seen = []
    pending.then(lambda: seen.append(gradient.send.storage.nbytes()))
    storage.reset()
    return [*seen, gradient.send.storage.nbytes()]


def shards_of_a_buffer(mesh: DeviceMesh) -> Any:
    buffer = torch.arange(12.0)
    parts = shard_buffer(buffer, 4)
    parts[2].fill_(-1)
    return [p.numel() for p in parts], buffer.tolist(), said(lambda: shard_buffer(buffer, 5))


# ---- what is refused ----------------------------------------------------------------------------


def refusals(mesh: DeviceMesh, names: list[str]) -> dict[str, str]:
    """The text of each."""
    found = {}
    for what in names:
        Comm(mesh).forget()
        found[what] = refusal(mesh, what)
    return found


def refusal(mesh: DeviceMesh, what: str) -> str:
    """The text of what cannot be done."""
    module: Any = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    given: dict[str, Any] = {}
    match what:
        case "strategy":
            given["shard_strategy"] = "rows"
        case "offload of nothing":
            given["cpu_offload"] = "states"
        case "offload beside NCCL alone":
            comm = Comm(mesh)
            comm.config = "cuda:nccl"
            return said(lambda: check_offload(comm, True))
        case "two placements":
            given["placements"] = (Shard(0), Shard(1))
        case "no such dim":
            given["placements"] = (TorchShard(2),)
        case "no such owner":
            given["shard_placement_fn"] = lambda fqn, parameter: Owned(mesh.size())
        case "blocks of nothing":
            given["placements"] = (BlockShard(0),)
        case "tied to another unit":
            first, module = nn.Linear(5, 5), nn.Linear(5, 5)
            module.weight = first.weight
            fully_shard_flat(first, mesh)
        case "inside a unit":
            fully_shard_flat(module, mesh, shard_strategy="flat")
            module = module[0]
        case "twice":
            fully_shard_flat(module, mesh)
        case "nothing to shard":
            module = nn.ReLU()
        case "a list of no modules":
            module = []
        case "a container":
            module = nn.ModuleList(module)
        case "a DTensor":
            module[0].weight = nn.Parameter(
                distribute_tensor(module[0].weight.detach(), mesh, [TorchReplicate()])
            )
        case "sparse":
            module[0].weight = nn.Parameter(torch.eye(5).to_sparse())
        case "a dtype":
            module.still = nn.Parameter(torch.zeros(3, dtype=torch.uint16), requires_grad=False)
        case "inference":
            with torch.inference_mode():
                module = nn.Linear(5, 5)
        case "half meta":
            module[2] = nn.Linear(7, 3, device="meta")
        case "meta forward":
            module = nn.Linear(3, 3, device="meta")
            fully_shard_flat(module, mesh)
            return said(lambda: module(torch.ones(1, 3)))
        case "sub-mesh":
            given["reshard_after_forward"] = 3
        case "prefetch":
            given["prefetch"] = -1
        case "precision":
            given["precision"] = "bf16"
        case "precision of integers":
            return said(lambda: MixedPrecision(param_dtype=torch.int32))
        case "hidden output":
            module = _Hides()
            fully_shard_flat(module, mesh)
            return said(lambda: module(torch.ones(1, 3)))
        case "no such name":
            return said(lambda: fully_shard_flat(module, mesh).get_local_view("9.weight"))
        case "pickled":
            fully_shard_flat(module, mesh)
            return said(lambda: pickle.dumps(module))
        case "divide by nothing":
            return said(lambda: fully_shard_flat(module, mesh).set_gradient_divide_factor(0.0))
        case "another strategy on rank 1":
            given["shard_strategy"] = ("flat", "per_param")[mesh.get_local_rank()]
    return said(lambda: fully_shard_flat(module, mesh, **given))


class _Hides(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        return lambda: found


# ---- modules of all kinds -----------------------------------------------------------------------


class Keywords(nn.Module):
    """Tensors by keyword, in a dict and in a list; returns a dict, a number and a text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, more: dict[str, list[torch.Tensor]]) -> Any:
        total = self.layer(x) + self.other(more["parts"][0])
        return {"out": total, "count": 3, "name": "keywords"}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (hidden, _) = self.lstm(x.unsqueeze(0))
        return out.sum() + hidden.square().sum()


class Odd(nn.Module):
    """No rows, no dims, one element, a column, and a parameter that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.randn(1))
        self.column = nn.Parameter(torch.randn(3, 1))
        self.still = nn.Parameter(torch.randn(3), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (x + self.still) @ self.column * self.scalar + self.one
        return torch.cat([out.t() @ (x @ self.transposed)[:, :3], self.none])


class Nothing(nn.Module):
    """A unit that returns no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        return None


def _keywords(model: nn.Module, rank: int) -> torch.Tensor:
    x = inputs(rank).requires_grad_()
    out = model(x, more={"parts": [inputs(rank + 1).requires_grad_()]})
    assert (out["count"], out["name"]) == (3, "keywords")
    return out["out"].square().sum()  # type: ignore[no-any-return]


def _plainly(model: nn.Module, rank: int) -> torch.Tensor:
    return model(inputs(rank)).square().sum()  # type: ignore[no-any-return]


def _in_place(model: nn.Module, rank: int) -> torch.Tensor:
    hidden = (inputs(rank).requires_grad_() * 1.0).relu_()
    out = model(hidden)
    out += 1
    return out.mul_(0.5).square().sum()  # type: ignore[no-any-return]


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "keywords": (Keywords, _keywords),
    "recurrent": (Recurrent, _plainly),
    "odd shapes": (Odd, _plainly),
    "in place": (lambda: nn.Sequential(net(), nn.Softplus()), _in_place),
}


def gradients_of(mesh: DeviceMesh, kind: str) -> list[float]:
    """The largest error of three steps of a module that is one unit, per strategy."""
    make, loss = MODULES[kind]
    rank, size = mesh.get_local_rank(), mesh.size()
    true = true_of(make(), size, loss)
    found = []
    for strategy in STRATEGIES:
        module = make()
        unit = fully_shard_flat(module, mesh, **options(strategy)).unit
        for _ in range(3):
            module.zero_grad()
            loss(module, rank).backward()
        trained = {m.fqn for m in unit.members if m.parameter.requires_grad}
        for member in unit.members:
            if member.fqn not in trained:
                assert member.parameter.grad is None
                member.parameter.grad = torch.zeros_like(member.parameter)
        found.append(worst(errors([unit], module, true)))
    return found


def by_hand(mesh: DeviceMesh, strategy: str) -> Any:
    """Errors of a unit that the caller unshards and reshards, two steps without and with sync."""
    rank, size = mesh.get_local_rank(), mesh.size()
    module = net()
    true = true_of(net(), size, _plainly)
    storage = fully_shard_flat(module, mesh, register_hooks=False, **options(strategy))
    found = []
    for _ in range(2):
        module.zero_grad()
        storage.unshard()
        loss_of(module, inputs(rank)).backward()
        storage.reshard()
        found.append(worst(errors([storage], module, true)))
    return found, storage.state is State.SHARDED


def traced_order(mesh: DeviceMesh) -> Any:
    """Kinds of the actions of a step in which everything was expected."""
    from shardwright.runtime.probe import Probe

    class Notes(Probe):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def did(self, action: Any) -> None:
            if action.verb != "compute":
                self.lines.append(f"{action.verb} {action.target}")

    found = []
    for prefetch in (0, 1):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        for layer in model:
            fully_shard_flat(layer, mesh, prefetch=prefetch)
        fully_shard_flat(model, mesh, prefetch=prefetch)
        notes = Notes()
        for number, unit in enumerate(units_in(model)):
            unit.comm.probe = notes
            unit.name = f"u{number}"
        for _ in range(3):
            notes.lines.clear()
            model(inputs(0)).sum().backward()
        found.append([line for line in notes.lines if "u0" not in line])
    return found


# ---- memory -------------------------------------------------------------------------------------


def freed(mesh: DeviceMesh, strategy: str) -> Any:
    """Whether deleting the model frees its buffers without the garbage collector."""
    rank = mesh.get_local_rank()
    gc.collect()
    gc.disable()
    try:
        model = net()
        units = shard(model, mesh, strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss_of(model, inputs(rank)).backward()
            optimizer.step()
        gone = [weakref.ref(unit) for unit in units]
        gone += [weakref.ref(unit.buffers.shard) for unit in units]  # type: ignore[misc]
        grads = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        without_gradients = [reference() is None for reference in grads]
        del model, units, optimizer
        return [reference() is None for reference in gone], without_gradients
    finally:
        gc.enable()


def no_grad_leaves_no_trace(mesh: DeviceMesh) -> Any:
    module = net()
    storage = fully_shard_flat(module, mesh, reshard_after_forward=False)
    with torch.no_grad():
        module(inputs(0))
    return (
        storage.state.value,
        [p.grad for p in module.parameters()],
        get_dstorage(module) is storage,
    )


def whole_names(mesh: DeviceMesh) -> list[str]:
    """Names of a model of two units and a plain layer."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(2, 2)})
    fully_shard_flat(model["a"], mesh, shard_strategy="flat")
    fully_shard_flat(model["b"], mesh)
    return sorted(full_state_dict(model))


def whole_names_below(mesh: DeviceMesh) -> tuple[list[str], int]:
    """Names of a model whose root has nothing of its own, and the bytes of the root's buffer."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for layer in model:
        fully_shard_flat(layer, mesh, shard_strategy="flat")
    root = fully_shard_flat(model, mesh, shard_strategy="flat")
    return sorted(full_state_dict(model)), root.all_gather().numel()


def table_of(mesh: DeviceMesh) -> str:
    torch.manual_seed(0)
    return repr(fully_shard_flat(nn.Linear(8, 8), mesh, shard_strategy="flat"))


def returns_nothing(mesh: DeviceMesh) -> Any:
    module = Nothing()
    storage = fully_shard_flat(module, mesh)
    return module(inputs(0)), storage.state.value


# ---- models and plans ---------------------------------------------------------------------------


def disagreeing_replicas(mesh: DeviceMesh, made: Plan) -> str:
    """The text of apply on models whose replicas start apart."""
    torch.manual_seed(mesh.get_local_rank())
    model = DLRM(made.job)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand(1).item())
    try:
        apply(model, made, mesh)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def odd_lookups(mesh: DeviceMesh, made: Plan, what: str) -> str:
    """Lookups and backwards of tables that cannot be exact, or go wrong on one rank only."""
    model = apply(DLRM(made.job, device="meta"), made, mesh)
    ids = torch.zeros(4, len(made.model.tables), dtype=torch.int64)
    dense = torch.zeros(4, made.job.model.dense_features)
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


def disagreements(
    mesh: DeviceMesh, made: Plan, others: dict[str, Plan], whats: Sequence[str]
) -> dict[str, str]:
    """The text of apply where something differs on a rank, case by case; ``others`` are the plans
    of another batch and of another world."""
    return {what: _disagreement(mesh, made, others, what) for what in whats}


def _disagreement(mesh: DeviceMesh, made: Plan, others: dict[str, Plan], what: str) -> str:
    odd = mesh.get_local_rank() == 1
    model = DLRM(made.job, device="meta")
    if what == "world" or (odd and what == "plan"):
        made = others[what]
    if what == "model" and odd:
        model.top.add_module("extra", nn.Linear(1, 1, device="meta"))
    if what == "all models":
        model.top.add_module("extra", nn.Linear(1, 1, device="meta"))
    if what == "shape":
        model.top.add_module("0", nn.Linear(3, 4, device="meta"))
    if what in ("fused_uvm", "fused_uvm_caching", "quant"):
        tables = [msgspec.structs.replace(t, compute_kernel=what) for t in made.tables]
        made = sealed(msgspec.structs.replace(made, tables=tuple(tables)))
    if what == "unit":
        units = [msgspec.structs.replace(unit, modules=("middle",)) for unit in made.units]
        made = sealed(msgspec.structs.replace(made, units=tuple(units)))
    version = torch.__version__
    try:
        if what == "torch" and odd:
            torch.__version__ = "1.0"
        apply(model, made, mesh, guard=True if what == "guard" else None)  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.__version__ = version
    return "accepted"


def look_up(mesh: DeviceMesh, job: Job, ids: torch.Tensor, made: Plan | None = None) -> str:
    """What a lookup says; a plan that is given is none that every rank has to make."""
    model = apply(DLRM(job, device="meta"), made or plan(job), mesh)
    try:
        model(torch.zeros(len(ids), job.model.dense_features), ids)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
