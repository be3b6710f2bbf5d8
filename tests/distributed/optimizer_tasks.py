"""Optimizers and clipping over sharded modules beside the same over unsharded ones."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from gradient_tasks import Net, inputs, loss_of, net, shard
from own_models import spared
from probe_tasks import MESHES, said, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwright.core.placement import BlockShard, Owned, Placement, Replicate, Shard
from shardwright.runtime import muon
from shardwright.runtime.clip import clip_grad_norm_
from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.muon import Muon
from shardwright.runtime.optimizer import optimizer_parameters
from shardwright.runtime.optimizer_dict import load_optimizer_state_dict, optimizer_state_dict
from shardwright.runtime.state import full_state_dict
from shardwright.runtime.torch_private import local_of
from shardwright.runtime.units.dstorage import DStorage

STEPS = 3
Groups = list[dict[str, Any]]
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def by_dims(model: nn.Module) -> Groups:
    """No weight decay for vectors and scalars."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if _decays(n)], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if not _decays(n)], "weight_decay": 0.0},
    ]


def by_layer(model: nn.Module) -> Groups:
    """Three rates, cut through every unit; by name."""
    names = [name for name, _ in model.named_parameters()]
    parts = (names[::3], names[1::3], names[2::3])
    return [{"params": part, "lr": 0.01 * (i + 1)} for i, part in enumerate(parts)]


def _decays(name: str) -> bool:
    return (name.endswith("weight") and "norm" not in name) or name.endswith("gate")


def _by_names(model: nn.Module, groups: Groups) -> Groups:
    named = dict(model.named_parameters())
    return [{**g, "params": [named.get(p, p) for p in g["params"]]} for g in groups]


GROUPS: dict[str, Callable[[nn.Module], Groups] | None] = {
    "no groups": None,
    "by dims": by_dims,
    "by layer": by_layer,
}


@functools.cache
def unsharded(size: int, make: Make, groups: str = "no groups", clip: float = 0.0) -> Net:
    """The weights of one process after all steps."""
    model = net()
    chosen = GROUPS[groups]
    given: Any = model.parameters() if chosen is None else _by_names(model, chosen(model))
    optimizer = make(given)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(model, inputs(rank, step)) / size).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def furthest(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of any whole weight (collective)."""
    found = full_state_dict(model)
    true = dict(reference.named_parameters())
    assert set(found) == set(true)
    return max((found[n] - true[n]).abs().max().item() for n in true)


def over_model_parameters(mesh: DeviceMesh, strategy: str) -> dict[str, float]:
    """The largest difference of any weight after all steps, per optimizer."""
    rank, size = mesh.get_local_rank(), mesh.size()
    found = {}
    for name, make in OPTIMIZERS.items():
        model = net()
        shard(model, mesh, strategy)
        optimizer = make(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, inputs(rank, step)).backward()
            optimizer.step()
        found[name] = furthest(model, unsharded(size, make))
    return found


def over_flat_parameters(mesh: DeviceMesh, strategy: str) -> dict[str, tuple[float, int]]:
    """The same over ``optimizer_parameters``, and how many flat tensors there are."""
    rank, size = mesh.get_local_rank(), mesh.size()
    found = {}
    for name in ("SGD", "AdamW fused"):
        make = OPTIMIZERS[name]
        for kind, groups in GROUPS.items():
            for per_unit in (False, True) if name != "SGD" else (False,):
                model = net()
                shard(model, mesh, strategy)
                given: Any = (
                    optimizer_parameters(model, per_unit=per_unit)
                    if groups is None
                    else optimizer_parameters(model, groups(model), per_unit=per_unit)
                )
                optimizer = make(given)
                tensors = sum(len(group["params"]) for group in optimizer.param_groups)
                for step in range(STEPS):
                    optimizer.zero_grad(set_to_none=step != 1)
                    loss_of(model, inputs(rank, step)).backward()
                    optimizer.step()
                error = furthest(model, unsharded(size, make, kind))
                found[f"{name}, {kind}, per unit {per_unit}"] = (error, tensors)
    return found


class Wide(nn.Module):
    """Matrices of several shapes, one with heads and one of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)])
            for _ in range(3)
        )
        self.few = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in self.blocks:
            x = x + down(torch.tanh(up(x)))
        return x * self.few.sum(0)


MATRICES: dict[str, Callable[[str, nn.Parameter], Placement | None]] = {
    "flat": lambda fqn, p: None,
    "rows": lambda fqn, p: Shard(0),
    "columns": lambda fqn, p: Shard(1),
    "heads": lambda fqn, p: BlockShard(4) if len(p) == 12 else Owned(0),
    "owned": lambda fqn, p: Owned(int(len(p) == 8)),
    "replicated": lambda fqn, p: Replicate(),
    "mixed": lambda fqn, p: (Shard(1), BlockShard(4), Owned(0), Shard(0), Replicate())[
        len(fqn) % 5
    ],
}


def muon_over_fsdp2(mesh: DeviceMesh) -> str:
    """What Muon says to the parameters of another runtime."""
    model = nn.Linear(4, 6, bias=False)
    fully_shard(model, mesh=mesh)
    return said(lambda: Muon(model.parameters()))


def orthogonalized(
    mesh: DeviceMesh, kind: str, head_rows: int, grid: bool = False, zero: Any = 3
) -> tuple[float, int]:
    """The largest difference of any weight from torch's Muon over one process, and the collectives
    of a step of the optimizer."""
    rank, size = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(3)
    model = Wide()
    reference = copy.deepcopy(model)
    unit = fully_shard_flat(
        model,
        MESHES[2, 2] if grid else mesh,
        shard_strategy="flat" if kind == "flat" else "per_param",
        shard_placement_fn=MATRICES[kind],
        zero=zero,
    )
    options: Any = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
    first, rest = _halves(model)
    optimizer = Muon([{"params": first, "lr": 0.02, "head_rows": head_rows}, *rest], **options)
    whole, others = _halves(reference)
    heads = [list(p.detach().clone().split(head_rows or len(p))) for p in whole]
    other = torch.optim.Muon(
        [{"params": [h for parts in heads for h in parts], "lr": 0.02}, *others], **options
    )
    counts = set()
    for step in range(STEPS):
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of(model, inputs(rank, step, 8)).backward()
        for r in range(size):
            (loss_of(reference, inputs(r, step, 8)) / size).backward()
        start = unit.comm.sequence
        optimizer.step()
        counts.add(unit.comm.sequence - start)
        for parameter, parts in zip(whole, heads, strict=True):
            assert parameter.grad is not None
            for head, gradient in zip(parts, parameter.grad.split(len(parts[0])), strict=True):
                head.grad = gradient
        other.step()
        for parameter, parts in zip(whole, heads, strict=True):
            parameter.data.copy_(torch.cat(parts))
    (count,) = counts
    return furthest(model, reference), count


def in_buckets(mesh: DeviceMesh) -> tuple[float, int]:
    """The same with room for two matrices of 12 x 8 in a bucket, of seven."""
    with patch.object(muon, "BUCKET_BYTES", 2 * 12 * 8 * 4):
        return orthogonalized(mesh, "rows", 0)


def _halves(model: nn.Module) -> tuple[list[nn.Parameter], Groups]:
    """The matrices of 12 rows, and the rest as a group."""
    every = list(model.parameters())
    return [p for p in every if len(p) == 12], [{"params": [p for p in every if len(p) != 12]}]


def accumulated(mesh: DeviceMesh, strategy: str) -> float:
    """Flat gradients after two backwards, one of them held back, beside one process."""
    rank, size = mesh.get_local_rank(), mesh.size()
    model, reference = net(), net()
    units = shard(model, mesh, strategy)
    optimizer = torch.optim.SGD(optimizer_parameters(model), lr=0.05)
    other = torch.optim.SGD(reference.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        other.zero_grad()
        with DStorage(units[0]).no_sync():
            loss_of(model, inputs(rank, 0)).backward()
        for step in (1, 2):
            loss_of(model, inputs(rank, step)).backward()
        for step in (0, 1, 2):
            for r in range(size):
                (loss_of(reference, inputs(r, step)) / size).backward()
        optimizer.step()
        other.step()
    return furthest(model, reference)


# ---- clipping -----------------------------------------------------------------------------------


def clipped(mesh: DeviceMesh, strategy: str) -> list[tuple[float, float, float]]:
    """(ours, true norm, largest difference of any weight after clipped steps)."""
    rank, size = mesh.get_local_rank(), mesh.size()
    found = []
    for flat in (False, True):
        for norm_type in (2.0, 1.0, float("inf")):
            model, reference = net(), net()
            shard(model, mesh, strategy)
            given = optimizer_parameters(model) if flat else list(model.parameters())
            optimizer = torch.optim.SGD(given, lr=0.1)
            other = torch.optim.SGD(reference.parameters(), lr=0.1)
            loss_of(model, inputs(rank)).backward()
            for r in range(size):
                (loss_of(reference, inputs(r)) / size).backward()
            true = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type).item()
            ours = clip_grad_norm_(model, 0.5, norm_type).item()
            optimizer.step()
            other.step()
            found.append((ours, true, furthest(model, reference)))
    return found


def clipped_by_torch(mesh: DeviceMesh, strategy: str) -> tuple[float, float]:
    rank, size = mesh.get_local_rank(), mesh.size()
    model, reference = net(), net()
    shard(model, mesh, strategy)
    loss_of(model, inputs(rank)).backward()
    for r in range(size):
        (loss_of(reference, inputs(r)) / size).backward()
    true = nn.utils.clip_grad_norm_(reference.parameters(), 0.5).item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item(), true


def clipped_on_a_grid(
    mesh: DeviceMesh, strategy: str, flat: bool, zero: Any = 3
) -> tuple[float, float]:
    """On two replicas of two shards."""
    model, reference = net(), net()
    shard(model, MESHES[2, 2], strategy, zero=zero)
    if flat:
        optimizer_parameters(model)
    loss_of(model, inputs(mesh.get_local_rank())).backward()
    for r in range(4):
        (loss_of(reference, inputs(r)) / 4).backward()
    true = nn.utils.clip_grad_norm_(reference.parameters(), 0.5).item()
    return clip_grad_norm_(model, 0.5).item(), true


def not_finite(mesh: DeviceMesh, strategy: str, flat: bool) -> tuple[str, list[float]]:
    """What is said where one element of one gradient is not a number, and norms without error."""
    model = net()
    units = shard(model, mesh, strategy)
    if flat:
        optimizer_parameters(model)
    loss_of(model, inputs(mesh.get_local_rank())).backward()
    if mesh.get_local_rank() == mesh.size() - 1:
        block = units[2]
        pieces = block.layout.pieces(block.comm.rank)
        index = next(i for i, piece in enumerate(pieces) if piece.numel)
        gradient = block.members[index].parameter.grad
        assert gradient is not None
        local_of(gradient).view(-1)[0] = float("nan")
    text = said(lambda: clip_grad_norm_(model, 1.0, error_if_nonfinite=True))
    largest = clip_grad_norm_(model, 1.0, torch.inf).item()  # the first, for it makes all nan
    return text, [largest, clip_grad_norm_(model, 1.0).item()]


def not_finite_on_a_grid(mesh: DeviceMesh, bad: int) -> dict[str, str]:
    """What is said of a gradient that rank ``bad`` has, the last one of its shard, of two replicas
    of two shards, to those who hear of it."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {}
    for where, part, zero in (
        ("shards", grid["shard"], 3),
        ("replicas", grid, 3),
        ("replicas cut again", grid, (2, 3)),
    ):
        model = nn.Linear(4, 4, bias=False)
        fully_shard_flat(model, part, zero=zero)
        model.weight.grad = torch.zeros_like(model.weight)
        alike = where == "replicas" and grid.get_local_rank(1) == bad % 2
        if alike or grid.get_rank() == bad:
            local_of(model.weight.grad).fill_(torch.nan)
        if part is grid or grid.get_local_rank(0) == bad // 2:
            found[where] = said(lambda m=model: clip_grad_norm_(m, 1.0, error_if_nonfinite=True))
    return found


def refusals(mesh: DeviceMesh, what: str) -> str:
    model = net()
    if what == "not sharded":
        return said(lambda: optimizer_parameters(model))
    shard(model, mesh, "flat")
    named = list(model.parameters())
    if what == "taken":
        optimizer_parameters(model, [{"params": ["blocks.0.up.weight"]}])
        return said(lambda: optimizer_parameters(model))
    if what == "partly frozen":
        optimizer_parameters(model)
        named[0].requires_grad_(False)
        return said(lambda: model(inputs(0)))
    if what == "twice in groups":
        return said(lambda: optimizer_parameters(model, [{"params": [named[0], named[0]]}]))
    if what == "a stranger":
        other = nn.Parameter(torch.ones(3))
        return said(lambda: optimizer_parameters(model, [{"params": [other]}]))
    if what == "no such name":
        return said(lambda: optimizer_parameters(model, [{"params": ["first.wait"]}]))
    if what == "max_norm":
        return said(lambda: clip_grad_norm_(model, -1.0))
    if what == "no number":
        return said(lambda: clip_grad_norm_(model, "1"))  # type: ignore[arg-type]
    optimizer_parameters(model)
    model.to(torch.bfloat16)
    return said(lambda: model(inputs(0).bfloat16()))


def flat_tensor(mesh: DeviceMesh) -> Any:
    """Whether the one flat tensor is the memory of all units, its gradient that of the parameters,
    and what was there before is in it."""
    model = net()
    units = shard(model, mesh, "flat")
    loss_of(model, inputs(mesh.get_local_rank())).backward()
    before = [whole(p.grad) for p in model.parameters()]
    (flat,) = optimizer_parameters(model, per_unit=False)
    local = local_of(flat)
    same = all(
        unit.buffers.shard.untyped_storage()._cdata == local.untyped_storage()._cdata
        for unit in units
    )
    after = [whole(p.grad) for p in model.parameters()]
    moved = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert flat.grad is not None
    memory = local_of(flat.grad).untyped_storage()._cdata
    views = all(local_of(p.grad).untyped_storage()._cdata == memory for p in model.parameters())
    norm = torch.stack([g.norm() for g in before]).norm()
    return same, moved, views, flat.grad.shape == flat.shape, (flat.grad.norm() - norm).abs() < 1e-5


def muon_goes_on(mesh: DeviceMesh) -> float:
    """The largest difference of any weight between steps at a stretch and with states of Muon
    loaded into another one in between."""
    models = []
    for stops in (False, True):
        torch.manual_seed(3)
        model = Wide()
        fully_shard_flat(model, mesh, shard_strategy="flat")
        optimizer = Muon(model.parameters(), lr=0.1)
        for step in range(STEPS):
            if stops and step == 1:
                state = optimizer_state_dict(model, optimizer)
                optimizer = Muon(model.parameters(), lr=0.5)
                load_optimizer_state_dict(model, optimizer, state)
            optimizer.zero_grad()
            loss_of(model, inputs(mesh.get_local_rank(), step, 8)).backward()
            optimizer.step()
        models.append(full_state_dict(model))
    one, other = models
    return max((one[name] - other[name]).abs().max().item() for name in one)


def muon_without_some(mesh: DeviceMesh) -> float:
    """The largest difference of any weight from one process, of matrices of which another one gets
    no gradient in every step."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(n, n - 1, bias=False) for n in (8, 7, 6)))
    true = copy.deepcopy(model)
    fully_shard_flat(model, mesh, shard_strategy="flat")
    for each, ranks in ((model, [mesh.get_local_rank()]), (true, range(mesh.size()))):
        optimizer = Muon(each.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                (each(inputs(rank, step, 8)).square().mean() / len(ranks)).backward()
            list(each.parameters())[step].grad = None
            optimizer.step()
    return furthest(model, true)


# ---- what gets no gradient -----------------------------------------------------------------------

SPARED: dict[str, Make] = {**OPTIMIZERS, "Muon": lambda p: Muon(_matrices(p), lr=0.02)}


def _matrices(parameters: Any) -> list[nn.Parameter]:
    return [p for p in parameters if p.ndim == 2]


def _spared(make: Make, model: nn.Module, given: Any, batches: list[list[torch.Tensor]]) -> None:
    """Steps, each of a backward for every one of its ``batches``."""
    optimizer = make(given)
    for batch in batches:
        optimizer.zero_grad()
        for x in batch:
            (model(x).square().mean() / len(batch)).backward()
        optimizer.step()


def spared_apart(mesh: DeviceMesh, zero: int, strategy: str) -> dict[str, float]:
    """The largest difference of any weight from one process, per optimizer and what it has, in a
    model of which much gets no gradient, and is not frozen."""
    rank, size = mesh.get_local_rank(), mesh.size()
    made, batches = _spared_model(size)
    trained = {name for name, _ in made.named_parameters() if _learns(name)}
    found = {}
    for name, make in SPARED.items():
        true = _spared_alone(size, name)
        for way in ("model", "groups") if name != "Muon" else ("model",):
            model = copy.deepcopy(made)
            for unit in (*model.layers, model):
                fully_shard_flat(unit, mesh, zero=zero, shard_strategy=strategy)
            given: Any = model.parameters()
            if way == "groups":
                given = optimizer_parameters(model, lambda n, _: {} if n in trained else None)
            _spared(make, model, given, [[batch[rank]] for batch in batches])
            found[f"{name} over {way}"] = furthest(model, true)
    return found


@functools.cache
def _spared_model(size: int) -> tuple[nn.Module, list[list[torch.Tensor]]]:
    """A model that nobody trains, and the batches of all ranks in every step."""
    torch.manual_seed(0)
    made, x = spared()
    steps = range(STEPS)
    return made, [[x * (1 + 0.3 * r + 0.1 * step) for r in range(size)] for step in steps]


@functools.cache
def _spared_alone(size: int, optimizer: str) -> nn.Module:
    """It after the steps of one process."""
    made, batches = _spared_model(size)
    model = copy.deepcopy(made)
    _spared(SPARED[optimizer], model, model.parameters(), batches)
    return model


def _learns(name: str) -> bool:
    """Whether a step of :func:`own_models.spared` trains a parameter."""
    return name.endswith(("weight", "bias")) and not name.startswith(("layers.4", "other"))


def flat_tensors_of_spared(mesh: DeviceMesh, zero: int) -> str:
    """What a step over flat tensors says, of which a part gets no gradient."""
    torch.manual_seed(0)
    model, x = spared()
    for unit in (*model.layers, model):
        fully_shard_flat(unit, mesh, zero=zero, shard_strategy="flat")
    return said(lambda: _spared(OPTIMIZERS["SGD"], model, optimizer_parameters(model), [[x]]))
