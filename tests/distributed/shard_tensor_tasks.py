"""Operators on sharded tensors beside the same on whole ones, for every way to cut."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import safetensors.torch
import torch
from probe_tasks import said
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.core.layout import unit_layout
from shardwright.core.placement import BlockShard, Flat, Owned, Placement, Shard
from shardwright.core.tensor import TensorSpec
from shardwright.runtime.comm import Comm
from shardwright.runtime.torch_private import HEARS_OF_OPERATORS
from shardwright.runtime.units.cut import Cut
from shardwright.runtime.units.shard_tensor import ShardTensor

SHAPES = [(7, 5), (8, 8), (2, 9), (1, 3)]
Pair = tuple[torch.Tensor, torch.Tensor]


def cuts(size: int) -> list[Placement]:
    """Every kind of placement on ``size`` ranks."""
    return [Flat(), Shard(0), Shard(1), Owned(size - 1), BlockShard(3), BlockShard(2, 1)]


def cut_of(comm: Comm, shape: tuple[int, ...], placement: Placement, before: int) -> Cut:
    """The cut of a tensor that lies ``before`` elements into its unit."""
    specs = [TensorSpec("before", (before,), "fp64"), TensorSpec("w", shape, "fp64")]
    by_columns = isinstance(placement, Shard | BlockShard) and placement.dim == 1
    first = Shard(0) if by_columns else placement
    layout = unit_layout(specs, {"before": first, "w": placement}, comm.size)
    (found,) = (
        Cut.of_slot(segment, slot, comm)
        for segment in layout.segments
        for slot in segment.slots
        if slot.tensor.fqn == "w"
    )
    return found


def sharded(comm: Comm, whole: torch.Tensor, placement: Placement, before: int = 5) -> ShardTensor:
    """This rank's part of ``whole``."""
    cut = cut_of(comm, tuple(whole.shape), placement, before)
    return ShardTensor(cut.part(whole).clone(), cut)


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


PURE: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {  # of a, b, and a whole plain tensor
    "itself": lambda a, b, v: a,
    "sum": lambda a, b, v: a + b,
    "scaled": lambda a, b, v: 1 - a * 2,
    "with a plain one": lambda a, b, v: a + v,
    "with a row": lambda a, b, v: a * v[:1],
    "with a number": lambda a, b, v: a * torch.tensor(3.0),
    "where": lambda a, b, v: torch.where(a > 0, a, b),
    "comparison": lambda a, b, v: a > b,
    "total": lambda a, b, v: a.sum(),
    "mean": lambda a, b, v: a.mean(),
    "norm": lambda a, b, v: a.norm(),
    "norm of 1": lambda a, b, v: a.norm(1),
    "largest norm": lambda a, b, v: a.norm(torch.inf),
    "norm kept": lambda a, b, v: torch.linalg.vector_norm(a, keepdim=True),
    "max": lambda a, b, v: a.max(),
    "min": lambda a, b, v: a.min(),
    "largest": lambda a, b, v: a.abs().max(),
    "sum of columns": lambda a, b, v: a.sum(0),
    "largest of rows": lambda a, b, v: a.amax(1),
    "deviation": lambda a, b, v: a.std(),
    "product": lambda a, b, v: a @ v.T,
    "transposed product": lambda a, b, v: a.T @ b,
    "any": lambda a, b, v: (a > 1).any(),
    "all": lambda a, b, v: (a > -9).all(),
    "finite": lambda a, b, v: torch.isfinite(a).all(),
    "not finite": lambda a, b, v: torch.isfinite(a / 0.0).all(),
    "nan": lambda a, b, v: (a * torch.nan).norm(),
    "inf": lambda a, b, v: (a / 0.0).abs().max(),
    "largest nan": lambda a, b, v: (a * torch.nan).max(),
    "largest norm of one nan": lambda a, b, v: torch.where(a < v.max(), a, torch.nan).norm(
        torch.inf
    ),
    "equal": lambda a, b, v: torch.equal(a, a.clone()),
    "unequal": lambda a, b, v: torch.equal(a, b),
    "close": lambda a, b, v: torch.allclose(a, a + 1e-12),
    "dot": lambda a, b, v: a.view(-1).dot(b.view(-1)),
    "a row": lambda a, b, v: a[0],
    "a column": lambda a, b, v: a[:, 1],
    "running sum": lambda a, b, v: a.cumsum(0),
    "sorted": lambda a, b, v: a.sort()[0],
    "rows by the largest": lambda a, b, v: a.max(1)[0],
    "maximum": lambda a, b, v: torch.max(a, b),
    "median": lambda a, b, v: a.median(),
    "top": lambda a, b, v: a.topk(2)[0],
    "concatenated": lambda a, b, v: torch.cat([a, b]),
    "stacked sums": lambda a, b, v: torch.stack([a.sum(), b.sum()]),
    "in half": lambda a, b, v: a.half(),
    "count": lambda a, b, v: (a > 0).sum(),
    "lerp into plain": lambda a, b, v: v.clone().lerp_(a, 0.25),
    "lists": lambda a, b, v: torch._foreach_mul([a, v], 2.0)[0],
    "list into plain": lambda a, b, v: _first(torch._foreach_lerp_, [v.clone()], [a], 0.25),
    "list with plain": lambda a, b, v: _first(torch._foreach_add_, [a.clone()], [v]),
    "norms of lists": lambda a, b, v: torch.stack(list(torch._foreach_norm([a, v, b]))),
    "largest of lists": lambda a, b, v: torch.stack(list(torch._foreach_max([a, b]))),
    "copy": lambda a, b, v: copy.deepcopy(a),
    "shallow copy": lambda a, b, v: copy.copy(a),
    "staged": lambda a, b, v: StateDictStager().stage([a])[0],
    "staged and shared": lambda a, b, v: StateDictStager(share_memory=True).stage([a])[0],
    "shared": lambda a, b, v: a.clone().share_memory_(),
    "in a queue": lambda a, b, v: pickle.loads(ForkingPickler.dumps(a)),
}


def _first(call: Callable[..., Any], lists: list[Any], *rest: Any) -> Any:
    call(lists, *rest)
    return lists[0]


WRITES: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "add_": lambda a, b, v: a.add_(b, alpha=0.5),
    "addcdiv_": lambda a, b, v: a.addcdiv_(b, v.abs() + 1, value=0.5),
    "a row filled": lambda a, b, v: a[0].fill_(3),
    "a column set": lambda a, b, v: a.__setitem__((slice(None), 1), 7),
    "a mask": lambda a, b, v: a.masked_fill_(a > 0, 2.0),
    "transposed": lambda a, b, v: a.T.mul_(2),
    "copied": lambda a, b, v: a.copy_(v),
    "some elements": lambda a, b, v: a.view(-1)[1:3].zero_(),
    "halves": lambda a, b, v: [half.mul_(3) for half in a.chunk(2)],
    "clamped": lambda a, b, v: a.clamp_(-0.5, 0.5),
    "normal": lambda a, b, v: a.normal_(),
    "uniform": lambda a, b, v: a.uniform_(-2, 2),
    "xavier": lambda a, b, v: nn.init.xavier_uniform_(a),
    "kaiming": lambda a, b, v: nn.init.kaiming_normal_(a),
    "truncated": lambda a, b, v: nn.init.trunc_normal_(a),
    "orthogonal": lambda a, b, v: nn.init.orthogonal_(a) if min(a.shape) > 1 else a,
    "identity": lambda a, b, v: nn.init.eye_(a),
    "drawn alike": lambda a, b, v: a.copy_(torch.randn_like(a)),
    "dropped out": lambda a, b, v: a.copy_(torch.dropout(a, 0.5, True)),
}

LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "squares": lambda p, b: p.pow(2).sum(),
    "norm": lambda p, b: (p * b).norm(),
    "largest": lambda p, b: p.abs().max(),
    "whole": lambda p, b: (p.full_tensor() if isinstance(p, DTensor) else p).pow(3).sum(),
    "part": lambda p, b: (p.to_local() if isinstance(p, DTensor) else p).pow(3).sum(),
}


def differing(mesh: DeviceMesh, every: int) -> list[str]:
    """Which operators differ on which cut of which shape; of their pairs ``every`` so many."""
    comm, found = Comm(mesh), []
    for i, placement in enumerate(cuts(mesh.size())):
        for j, shape in enumerate(SHAPES):
            if (i + j) % every == 0:
                where = f"{placement} of {shape}"
                found += [f"{name}: {where}" for name in _differing(comm, placement, shape)]
    return found


def _differing(comm: Comm, placement: Placement, shape: tuple[int, ...]) -> list[str]:
    whole, other, plain = (drawn(shape, seed) for seed in (1, 2, 3))
    mine, its = sharded(comm, whole, placement), sharded(comm, other, placement)
    found = [
        name
        for name, do in PURE.items()
        if not _same(do(mine, its, plain), do(whole, other, plain))
    ]
    for name, do in WRITES.items():
        one, two = mine.clone(), whole.clone()
        torch.manual_seed(3)
        do(one, its, plain)
        torch.manual_seed(3)
        do(two, other, plain)
        found += [] if _same(one, two) else [name]
    for name, loss in LOSSES.items():
        if not HEARS_OF_OPERATORS and name not in ("whole", "part"):
            continue  # refused
        p, q = nn.Parameter(mine.clone()), nn.Parameter(whole.clone())
        loss(p, its).backward()
        loss(q, other).backward()
        found += [] if p.grad is not None and _same(p.grad, q.grad) else [f"gradient of {name}"]
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    found += [] if _same(torch.load(file), whole) else ["torch.save"]
    for another in cuts(comm.size):
        moved = sharded(comm, other, another, before=3)
        found += [] if _same(mine.clone().copy_(moved), other) else [f"copy from {another}"]
        found += [] if _same(mine + moved, whole + other) else [f"sum with {another}"]
    theirs = mine.redistribute(placements=its.placements)
    found += (
        [] if _same(theirs, whole) and _same(mine.clone().copy_(theirs), whole) else ["torch's"]
    )
    refused = said(lambda: nn.Parameter(mine.clone()) @ plain.T)
    return found if refused.startswith("UnsupportedError: w: expected a use") else [*found, refused]


def _same(found: Any, true: Any) -> bool:
    value = found.full_tensor() if isinstance(found, DTensor) else torch.as_tensor(found)
    true = torch.as_tensor(true)
    if value.shape != true.shape or value.dtype != true.dtype:
        return False
    return torch.allclose(value.double(), true.double(), rtol=0, atol=1e-12, equal_nan=True)


def says(mesh: DeviceMesh) -> str:
    """How a sharded tensor shows itself."""
    return repr(sharded(Comm(mesh), torch.ones(3, 2, dtype=torch.float64), Shard(0)))


MEMORY: dict[str, Callable[[ShardTensor], Any]] = {
    "storage": lambda a: a.storage(),
    "untyped storage": lambda a: a.untyped_storage(),
    "dlpack": torch.from_dlpack,
    "numpy": lambda a: a.numpy(),
    "array": np.asarray,
    "list": lambda a: a.tolist(),
    "safetensors": lambda a: safetensors.torch.save({"a": a}),
    "other memory": lambda a: a.set_(torch.zeros(a.shape).double()),
    "resized": lambda a: a.resize_(2),
    "a view copied": lambda a: copy.deepcopy(a.T),
    "a view pickled": lambda a: pickle.dumps(a.T),
    "a view staged": lambda a: StateDictStager().stage({"a": a.T}),
}


def of_memory(mesh: DeviceMesh) -> dict[str, str]:
    """What those are told who want to have its memory, or a copy of a view of it."""
    shard = sharded(Comm(mesh), torch.ones(3, 2, dtype=torch.float64), Shard(0))
    before, shared = shard.is_shared(), shard.clone().share_memory_()
    assert (before, shared.is_shared(), shared.data_ptr()) == (False, True, 0)
    return {name: said(partial(ask, shard)) for name, ask in MEMORY.items()}
