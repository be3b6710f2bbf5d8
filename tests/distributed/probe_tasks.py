"""The 27 behaviour probes: small modules in situations that sharded runtimes get wrong."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.utils.checkpoint import checkpoint

from shardwright.core.placement import Owned, Replicate, Shard
from shardwright.runtime.clip import clip_grad_norm_
from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.units.cut import part_of
from shardwright.runtime.units.dstorage import DStorage, get_dstorage, units_in
from shardwright.runtime.units.unit import State

ROWS = 4


def mlp(layers: int = 3, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


class Tied(nn.Module):
    """Token ids to logits through one matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def nested(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    """Every layer a unit, and the model, which has nothing of its own, their root."""
    for layer in model:
        fully_shard_flat(layer, mesh, **options)
    fully_shard_flat(model, mesh, **options)
    return model


def inputs(rank: int, width: int = 8) -> torch.Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(rank))


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def summed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().sum()


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().sum()


def mean_gradients(
    reference: nn.Module, size: int, loss: Loss, make: Callable[[int], torch.Tensor] = inputs
) -> dict[str, torch.Tensor]:
    """The mean over ranks of the unsharded gradients."""
    reference.zero_grad()
    for rank in range(size):
        (loss(reference, make(rank)) / size).backward()
    return {n: p.grad.clone() for n, p in reference.named_parameters() if p.grad is not None}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(model: nn.Module, true: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of every whole gradient (collective)."""
    found = {}
    for name, parameter in model.named_parameters():
        if name in true:
            assert parameter.grad is not None, name
            found[name] = (whole(parameter.grad).double() - true[name]).abs().max().item()
    assert set(found) == set(true)
    return found


def resting(model: nn.Module) -> bool:
    """Whether every unit shows its shards."""
    return all(unit.state is State.SHARDED for unit in units_in(model) if not unit.keeps_whole)


def said(call: Callable[[], object]) -> str:
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


# ---- 1 to 9: what a unit may contain ------------------------------------------------------------


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(8, 8))
        self.b = nn.Parameter(torch.randn(8, 8).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.a).sum() + (x.bfloat16() @ self.b).float().sum()


def mixed_dtype_one_group(mesh: DeviceMesh) -> Any:
    module, reference = TwoDtypes(), TwoDtypes()
    storage = fully_shard_flat(module, mesh)
    module(inputs(mesh.get_local_rank())).backward()
    true = mean_gradients(reference, mesh.size(), lambda m, x: m(x))
    dtypes = [str(p.grad.dtype) for p in module.parameters() if p.grad is not None]
    return differences(module, true), dtypes, storage.byte_storage.dtype is torch.uint8


class Scaled(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8, 8)
        self.s = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.s


def scalar_param(mesh: DeviceMesh) -> Any:
    found = []
    for strategy in ("per_param", "param_boundary", "flat"):
        module = Scaled()
        storage = fully_shard_flat(module, mesh, shard_strategy=strategy)
        squared(module, inputs(mesh.get_local_rank())).backward()
        true = mean_gradients(Scaled(), mesh.size(), squared)
        with storage.unsharded():
            kept = storage.get_unsharded_view("s").item()
        held = module.s.grad
        assert held is not None
        scalar = whole(held)  # under flat only one rank has it
        error = abs(scalar.item() - true["s"].item()) if scalar.numel() else 0.0
        found.append((error / abs(true["s"].item()), kept))
    return found


def uneven_dim0(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    module = nn.Linear(8, 5)
    reference = copy.deepcopy(module)
    fully_shard_flat(module, mesh)
    squared(module, inputs(mesh.get_local_rank())).backward()
    grad = module.weight.grad
    assert isinstance(grad, DTensor)
    local = tuple(module.weight.to_local().shape)  # type: ignore[operator]
    true = mean_gradients(reference, mesh.size(), squared)
    return differences(module, true), local, tuple(grad.full_tensor().shape)


def uneven_dim1(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    module = nn.Linear(5, 8)
    reference = copy.deepcopy(module)
    fully_shard_flat(
        module, mesh, shard_placement_fn=lambda n, p: Shard(1) if p.ndim == 2 else None
    )
    rank, size = mesh.get_local_rank(), mesh.size()
    squared(module, inputs(rank, 5)).backward()
    true = mean_gradients(reference, size, squared, functools.partial(inputs, width=5))
    local = tuple(module.weight.to_local().shape)  # type: ignore[operator]
    same = torch.equal(whole(module.weight.detach()), reference.weight)
    return differences(module, true), local, same


def tied_across_groups(mesh: DeviceMesh) -> Any:
    module = Tied()
    fully_shard_flat(module.embed, mesh)
    return said(lambda: fully_shard_flat(module.head, mesh))


def tied_same_group(mesh: DeviceMesh) -> Any:
    module, reference = Tied(), Tied()
    storage = fully_shard_flat(module, mesh)

    def ids(rank: int) -> torch.Tensor:
        return torch.arange(4) + rank

    squared(module, ids(mesh.get_local_rank())).backward()
    true = mean_gradients(reference, mesh.size(), squared, ids)
    same = module.head.weight is module.embed.weight
    return differences(module, true), same, storage.layout.payload_bytes, list(storage.param_infos)


def frozen_weight_in_group(mesh: DeviceMesh) -> Any:
    model, reference = mlp(), mlp()
    for each in (model, reference):
        each[1].weight.requires_grad_(False)
    fully_shard_flat(model, mesh)
    squared(model, inputs(mesh.get_local_rank())).backward()
    true = mean_gradients(reference, mesh.size(), squared)
    return differences(model, true), model[1].weight.grad is None, len(true)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.use_b = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x) if self.use_b else x


def unused_param_in_group(mesh: DeviceMesh) -> Any:
    """The last rank alone uses the second layer, then nobody does."""
    rank, size = mesh.get_local_rank(), mesh.size()
    module, reference = HalfUsed(), HalfUsed()
    fully_shard_flat(module, mesh)
    module.use_b = rank == size - 1
    squared(module, inputs(rank)).backward()
    for other in range(size):
        reference.use_b = other == size - 1
        (squared(reference, inputs(other)) / size).backward()
    true = {n: p.grad.clone() for n, p in reference.named_parameters() if p.grad is not None}
    found = differences(module, true)
    module.zero_grad()
    module.use_b = False
    squared(module, inputs(rank)).backward()
    return found, [n for n, p in module.named_parameters() if p.grad is None]


def ignored_params(mesh: DeviceMesh) -> Any:
    model, reference = mlp(), mlp()
    plain = model[0].weight
    storage = fully_shard_flat(model, mesh, ignored_params={plain})
    squared(model, inputs(mesh.get_local_rank())).backward()
    true = mean_gradients(reference, mesh.size(), squared)
    own = mean_gradients(reference, 1, squared, lambda _: inputs(mesh.get_local_rank()))
    assert plain.grad is not None
    local = (plain.grad - own["0.weight"]).abs().max().item()
    del true["0.weight"]
    found = differences_of(model, true)
    return found, local, model[0].weight is plain, repr(storage)


def differences_of(model: nn.Module, true: dict[str, torch.Tensor]) -> dict[str, float]:
    """As ``differences``, for some of the parameters."""
    named = dict(model.named_parameters())
    return {
        name: (whole(named[name].grad) - wanted).abs().max().item()  # type: ignore[arg-type]
        for name, wanted in true.items()
    }


# ---- 10 to 14: unusual steps --------------------------------------------------------------------


def both_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum() + model(2 * x).square().sum()


def two_forwards_one_backward(mesh: DeviceMesh) -> Any:
    model, reference = nested(mlp(), mesh), mlp()
    both_forwards(model, inputs(mesh.get_local_rank())).backward()
    return differences(model, mean_gradients(reference, mesh.size(), both_forwards))


def backward_twice_retain(mesh: DeviceMesh) -> Any:
    model, reference = nested(mlp(), mesh), mlp()
    loss = squared(model, inputs(mesh.get_local_rank()))
    loss.backward(retain_graph=True)
    once = mean_gradients(reference, mesh.size(), squared)
    first = differences(model, once)
    loss.backward()
    second = differences(model, {name: 2 * g for name, g in once.items()})
    return first, second


def no_sync_accumulate(mesh: DeviceMesh) -> Any:
    model, reference = nested(mlp(), mesh), mlp()
    storages = list(units_in(model))
    rank, size = mesh.get_local_rank(), mesh.size()
    for storage in storages:
        DStorage(storage).set_requires_gradient_sync(False)
    squared(model, inputs(rank)).backward()
    nothing = all(p.grad is None for p in model.parameters())
    for storage in storages:
        DStorage(storage).set_requires_gradient_sync(True)
    squared(model, inputs(rank + 7)).backward()
    true = mean_gradients(reference, size, squared)
    for name, g in mean_gradients(reference, size, squared, lambda r: inputs(r + 7)).items():
        true[name] += g
    return differences(model, true), nothing


class Fragile(nn.Linear):
    broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise ValueError("asked to break")
        return super().forward(x)


def fragile() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Fragile(8, 8), nn.Linear(8, 8))


def exception_mid_forward(mesh: DeviceMesh, reset: bool) -> Any:
    model, reference = nested(fragile(), mesh), fragile()
    top = get_dstorage(model)
    assert top is not None
    rank, size = mesh.get_local_rank(), mesh.size()
    model[1].broken = True
    broke = said(lambda: model(inputs(rank)))
    model[1].broken = False
    if reset:
        top.reset()
        top.reset()
    states = resting(model)
    squared(model, inputs(rank)).backward()
    after = resting(model)
    return differences(model, mean_gradients(reference, size, squared)), broke, states, after


# ---- 15 to 21: options --------------------------------------------------------------------------


def clip_grad_norm(mesh: DeviceMesh) -> Any:
    model, reference = nested(mlp(), mesh), mlp()
    squared(model, inputs(mesh.get_local_rank())).backward()
    mean_gradients(reference, mesh.size(), squared)
    true = nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
    twin = nested(mlp(), mesh)
    squared(twin, inputs(mesh.get_local_rank())).backward()
    ours = clip_grad_norm_(twin, 1.0).item()
    theirs = whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item()
    clipped = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    return ours, theirs, true, differences(twin, clipped), differences(model, clipped)


def meta_init(mesh: DeviceMesh) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    nested(model, mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for layer in model:
        layer.reset_parameters()
    rank, size = mesh.get_local_rank(), mesh.size()
    values = {name: whole(p.detach()) for name, p in model.named_parameters()}
    reference = mlp()
    reference.load_state_dict(values)
    squared(model, inputs(rank)).backward()
    within = all(
        DStorage(unit).byte_storage.data_ptr()
        <= DStorage(unit).get_local_view(fqn).data_ptr()
        < DStorage(unit).byte_storage.data_ptr() + DStorage(unit).byte_storage.numel()
        for unit in units_in(model)
        for fqn, info in unit.param_infos.items()
        if info.local_shape.numel()
    )
    spread = min(v.std().item() for n, v in values.items() if n.endswith("weight"))
    return differences(model, mean_gradients(reference, size, squared)), within, spread


def mixed_precision_bf16_reduce_fp32(mesh: DeviceMesh) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nested(mlp(), mesh, precision=policy)
    out = model(inputs(mesh.get_local_rank()))
    out.float().square().sum().backward()
    reference = mlp().bfloat16()
    true: dict[str, torch.Tensor] = {}
    for rank in range(mesh.size()):
        one = mean_gradients(reference, 1, squared, lambda _, rank=rank: inputs(rank).bfloat16())  # type: ignore[misc]
        for name, g in one.items():
            true[name] = true.get(name, 0) + g.float() / mesh.size()
    grads = [str(p.grad.dtype) for p in model.parameters() if p.grad is not None]
    return str(out.dtype), grads, differences(model, true)


def gradient_divide_factor(mesh: DeviceMesh, on_root_only: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    reference = copy.deepcopy(model)
    fully_shard_flat(model[0], mesh)
    fully_shard_flat(model[1], mesh)
    root = fully_shard_flat(model, mesh)
    for storage in [root] if on_root_only else units_in(model):
        DStorage(storage).set_gradient_divide_factor(3.0)
    size = mesh.size()
    squared(model, inputs(mesh.get_local_rank())).backward()
    true = mean_gradients(reference, size, squared)
    return differences(model, {name: g * size / 3 for name, g in true.items()})


def cpu_offload_on_cpu(mesh: DeviceMesh) -> Any:
    model = mlp()
    storage = fully_shard_flat(model, mesh, cpu_offload=True)
    squared(model, inputs(mesh.get_local_rank())).backward()
    return differences(model, mean_gradients(mlp(), mesh.size(), squared)), repr(storage)


MESHES: dict[tuple[int, int], DeviceMesh] = {}


def make_grids(mesh: DeviceMesh) -> None:
    """Meshes of (replicate, shard), which every rank of the job must make; done once."""
    for rows, columns in ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)):
        if (rows, columns) not in MESHES:
            ranks = torch.arange(rows * columns).view(rows, columns)
            names = ("replicate", "shard")
            MESHES[rows, columns] = DeviceMesh("cpu", ranks, mesh_dim_names=names)


def hsdp(mesh: DeviceMesh, rows: int, strategy: str) -> Any:
    two = MESHES[rows, mesh.size() // rows]
    model = nested(mlp(), two, shard_strategy=strategy)
    storages = [get_dstorage(layer) for layer in model]
    squared(model, inputs(mesh.get_local_rank())).backward()
    true = mean_gradients(mlp(), mesh.size(), squared)
    found = {}
    for name, parameter in model.named_parameters():
        layer, fqn = name.split(".")
        storage = storages[int(layer)]
        assert storage is not None
        piece = next(p for p in storage.layout.pieces(two.get_local_rank(1)) if p.tensor.fqn == fqn)
        assert parameter.grad is not None
        got = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        wanted = part_of(true[name], piece.offsets, piece.sizes)
        assert got.shape == wanted.shape
        found[name] = (got - wanted).abs().max().item() if got.numel() else 0.0
    shown = model[0].weight
    return found, str(shown.placements) if isinstance(shown, DTensor) else "1-D"


# ---- 22 to 27: around the unit ------------------------------------------------------------------


def checkpoint_nonreentrant(mesh: DeviceMesh) -> Any:
    model, reference = nested(mlp(), mesh), mlp()
    y = inputs(mesh.get_local_rank()).requires_grad_()
    for layer in model:
        y = checkpoint(layer, y, use_reentrant=False)
    y.square().sum().backward()
    states = resting(model)
    return differences(model, mean_gradients(reference, mesh.size(), squared)), states


def owned_or_replicate_placement(mesh: DeviceMesh) -> Any:
    rank, size = mesh.get_local_rank(), mesh.size()
    found: list[Any] = []
    kinds = (Owned(size - 1), Replicate(), TorchReplicate())
    for placement in kinds:
        torch.manual_seed(0)
        module = nn.Linear(8, 5)
        reference = copy.deepcopy(module)
        storage = fully_shard_flat(module, mesh, shard_placement_fn=lambda n, p: placement)  # noqa: B023
        squared(module, inputs(rank)).backward()
        local = storage.get_local_view("weight")
        owner = storage.param_infos["weight"].owner_rank
        true = mean_gradients(reference, size, squared)
        found.append((differences(module, true), tuple(local.shape), owner))
    wrong = said(
        lambda: fully_shard_flat(nn.Linear(8, 8), mesh, shard_placement_fn=lambda n, p: "rows")  # type: ignore[arg-type,return-value]
    )
    return found, wrong


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(-1)


def in_place_on_output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    out += 1
    out.mul_(2)
    return out.square().sum()


def view_output_inplace(mesh: DeviceMesh) -> Any:
    module, reference = Viewing(), Viewing()
    fully_shard_flat(module, mesh)
    in_place_on_output(module, inputs(mesh.get_local_rank())).backward()
    return differences(module, mean_gradients(reference, mesh.size(), in_place_on_output))


def state_dict_dcp(mesh: DeviceMesh) -> Any:
    model, reference = nested(mlp(), mesh), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    other = torch.optim.AdamW(reference.parameters(), fused=True)
    squared(model, inputs(mesh.get_local_rank())).backward()
    optimizer.step()
    mean_gradients(reference, mesh.size(), squared)
    other.step()
    options = dcp_state.StateDictOptions(full_state_dict=True)
    full = dcp_state.get_model_state_dict(model, options=options)
    moments = dcp_state.get_optimizer_state_dict(model, optimizer)["state"]
    state = model.state_dict()
    error = 0.0
    if mesh.get_rank() == 0 and full:
        wanted = reference.state_dict()
        error = max((full[name] - wanted[name]).abs().max().item() for name in wanted)
    first = other.state[reference[0].weight]["exp_avg"]
    moment = whole(moments["0.weight"]["exp_avg"])  # type: ignore[index,call-overload]
    return (
        list(state),
        {type(value).__name__ for value in state.values()},
        sorted(moments),  # type: ignore[type-var]
        error,
        (moment - first).abs().max().item(),
    )


def deepcopy(mesh: DeviceMesh) -> Any:
    """A copy trains on its own, and the model as if there were none."""
    model = nested(mlp(), mesh)
    twin = copy.deepcopy(model)
    true = mean_gradients(mlp(), mesh.size(), squared)
    found = []
    for each in (twin, model, copy.deepcopy(model)):
        each.zero_grad()
        squared(each, inputs(mesh.get_local_rank())).backward()
        found.append(differences(each, true))
        torch.optim.SGD(twin.parameters(), lr=1.0).step()
    return found


def compile_explain(mesh: DeviceMesh, what: str) -> Any:
    torch._dynamo.reset()
    counters.clear()
    model = nested(mlp(), mesh)
    called: nn.Module = model
    if what == "model":
        called = torch.compile(model, backend="eager")  # type: ignore[assignment]
    else:
        for layer in model:
            layer.forward = torch.compile(layer.forward, backend="eager")
    rank, size = mesh.get_local_rank(), mesh.size()
    true = mean_gradients(mlp(), size, squared)
    found = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        squared(called, inputs(rank)).backward()
        found.append(differences(model, true))
    return found, resting(model), sum(counters["graph_break"].values())
