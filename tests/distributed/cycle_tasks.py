"""What is left of a model that was made, used in one of the public ways, and deleted."""

from __future__ import annotations

import copy
import ctypes
import gc
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from embedding_tasks import trained
from tasks import train_sharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, AdamW

import shardwright as sw
from shardwright.job.plan import Plan

NUMBERS: defaultdict[str, count[int]] = defaultdict(count)
BLOCK = 128  # bytes at most of most objects of Python's


class Left(NamedTuple):
    """What a cycle leaves: bytes of torch's and Python's, and objects with references."""

    bytes: float
    objects: float


class _Malloc(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def _now() -> tuple[int, int]:
    gc.collect()
    info = ctypes.CDLL("libc.so.6").mallinfo2
    info.restype = _Malloc
    found = info()
    taken = found.uordblks + found.hblkhd + BLOCK * sys.getallocatedblocks()
    return taken, len(gc.get_objects())


def left(mesh: DeviceMesh, name: str, folder: str, cycles: int, made: Plan | None = None) -> Left:
    """Of a cycle, in the third of so many that left least: what is kept for all comes first."""
    use: Any = partial(USES.get(name, _plain), mesh, folder)
    if made is not None:
        use = partial(train_sharded, mesh, made.job, True, made=made)
        use = use if made.units else partial(trained, mesh, made)
    found, before = [], (0, 0)
    for number in range(4):
        for _ in range(cycles // 3):
            use()
        now = _now()
        if number:
            found.append([(b - a) / (cycles // 3) for a, b in zip(before, now, strict=True)])
        before = now
    return Left(*map(min, zip(*found, strict=True)))


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def _step(model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 8)).square().mean().backward()
        optimizer.step()


def _sharded(mesh: DeviceMesh, **options: Any) -> Any:
    model = _net()
    for module in (model[0], model):
        sw.fully_shard_flat(module, mesh, **options)
    return model


def _plain(mesh: DeviceMesh, folder: str) -> None:
    model = _net()
    _step(model, AdamW(model.parameters()))


def _trained(**options: Any) -> Callable[[DeviceMesh, str], None]:
    def use(mesh: DeviceMesh, folder: str) -> None:
        model = _sharded(mesh, **options)
        _step(model, AdamW(model.parameters()))

    return use


def _flat_optimizer(mesh: DeviceMesh, folder: str) -> None:
    model = _sharded(mesh, shard_strategy="flat")
    _step(model, AdamW(sw.optimizer_parameters(model)))
    _step(model, SGD(sw.optimizer_parameters(model, per_unit=True), 0.1))


def _optimizers(mesh: DeviceMesh, folder: str) -> None:
    model = _sharded(mesh)
    _step(model, sw.Muon([model[0].weight]))
    _step(model, sw.AdamW8bit(model.parameters()))


def _saved(mesh: DeviceMesh, folder: str) -> None:
    model = _sharded(mesh)
    optimizer = AdamW(sw.optimizer_parameters(model))
    _step(model, optimizer)
    sw.load_optimizer_state_dict(model, optimizer, sw.optimizer_state_dict(model, optimizer))
    model.load_state_dict(sw.full_state_dict(model))
    sw.save_checkpoint(folder, model, optimizer, step=next(NUMBERS[folder]), keep=1)
    sw.load_checkpoint(folder, model, optimizer)


def _copied(mesh: DeviceMesh, folder: str) -> None:
    model = copy.deepcopy(_sharded(mesh))
    _step(model, AdamW(model.parameters()))
    sw.clip_grad_norm_(model, 1.0)


def _bucketed(mesh: DeviceMesh, folder: str) -> None:
    model = _net()
    sw.fully_shard_flat(model, mesh, bucket_size=100, zero=2)
    _step(model, AdamW(sw.optimizer_parameters(model)))


def _tracked(mesh: DeviceMesh, folder: str) -> None:
    model = _sharded(mesh)
    optimizer = AdamW(model.parameters())
    with sw.MemoryTracker(model, optimizer):
        _step(model, optimizer)


USES: dict[str, Callable[[DeviceMesh, str], None]] = {
    "plain": _plain,
    "sharded": lambda mesh, folder: _sharded(mesh) and None,
    "per_param": _trained(),
    "flat": _trained(shard_strategy="flat"),
    "zero 2": _trained(zero=2),
    "offloaded": _trained(cpu_offload=True),
    "optimizer_parameters": _flat_optimizer,
    "optimizers": _optimizers,
    "saved": _saved,
    "copied": _copied,
    "bucketed": _bucketed,
    "tracked": _tracked,
}
