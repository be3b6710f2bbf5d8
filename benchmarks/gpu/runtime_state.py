"""Shards in host memory, whose copies run beside computing, and checkpoints."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwright as sw
from gpu.rows import Row, Setting, group_of_one, timed
from gpu.runtime_units import (
    Optimizers,
    Wrap,
    compared,
    flat_adamw,
    fsdp2,
    half,
    large,
    ours,
    step,
    taken,
    usual_adamw,
    whole,
)


def fsdp2_offloaded(setting: Setting, model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 with its shards in host memory, pinned where there is a GPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    fsdp2(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=setting.device == "cuda"))


def copies(setting: Setting) -> dict[str, Any]:
    """Seconds that all shards of the larger model take from host memory to the device and back,
    with nothing beside: what computing has to hide."""
    count = sum(p.numel() for p in large(setting).model(setting).parameters())
    pinned = torch.zeros(count, pin_memory=setting.device == "cuda")
    there = torch.zeros(count, device=setting.device)
    to = timed(setting, partial(there.copy_, pinned, non_blocking=True))
    back = timed(setting, partial(pinned.copy_, there, non_blocking=True))
    return {"bytes": pinned.nbytes, "to_device": to, "to_host": back}


def checkpoint(setting: Setting, **options: Any) -> dict[str, Any]:
    """Saved after a step and read into another model, whose every bit is then the same."""
    size = large(setting)
    with group_of_one(setting), tempfile.TemporaryDirectory() as folder:
        mesh = init_device_mesh(setting.device, (1,))
        model, other = _made(setting, mesh, **options), _made(setting, mesh, **options)
        with torch.no_grad():
            for parameter in other[0].parameters():
                parameter.zero_()
        (batch,) = size.batches(setting, 1)
        step(model[0], batch)
        model[1].step()
        setting.synchronize()
        begun = time.perf_counter()
        path = sw.save_checkpoint(folder, *model, step=1)
        saved = time.perf_counter()
        sw.load_checkpoint(folder, *other)
        setting.synchronize()
        loaded = time.perf_counter()
        nbytes = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
        pairs = [*zip(model[0].parameters(), other[0].parameters(), strict=True)]
        states = [
            (one[name], two[name])
            for one, two in zip(model[1].state.values(), other[1].state.values(), strict=True)
            for name in one
        ]
        return {
            "bytes": nbytes,
            "weights_equal": all(torch.equal(whole(a), whole(b)) for a, b in pairs),
            "states_equal": all(torch.equal(whole(a), whole(b)) for a, b in states),
            "save_seconds": saved - begun,
            "load_seconds": loaded - saved,
            "save_gb_a_second": nbytes / (saved - begun) / 1e9,
            "load_gb_a_second": nbytes / (loaded - saved) / 1e9,
        }


def _made(setting: Setting, mesh: DeviceMesh, **options: Any) -> tuple[nn.Module, Any]:
    model = large(setting).model(setting)
    ours(model, mesh, **options)
    return model, flat_adamw(model)


def rows(setting: Setting) -> list[Row]:
    """Equal numbers, then seconds and memory with and without, then checkpoints."""
    found = []
    for strategy in ("flat", "per_param"):
        for zero in (3, 2):
            wrap = partial(ours, shard_strategy=strategy, zero=zero, cpu_offload=True)
            run = partial(compared, setting, wrap, flat_adamw, ["plain"])
            found.append(Row(f"fp32 {strategy} zero {zero}, offloaded", run, 3))
    found.append(Row("copies of shards", partial(copies, setting), 3))
    wraps: dict[str, tuple[Wrap, Optimizers]] = {
        "flat fp32, offloaded": (
            partial(ours, shard_strategy="flat", cpu_offload=True),
            flat_adamw,
        ),
        "flat fp32, offloaded, prefetch 0": (
            partial(ours, shard_strategy="flat", cpu_offload=True, prefetch=0),
            flat_adamw,
        ),
        "fsdp2 fp32, offloaded": (partial(fsdp2_offloaded, setting), usual_adamw),
        "flat bf16, offloaded": (half(shard_strategy="flat", cpu_offload=True), flat_adamw),
    }
    for name, (each, make) in wraps.items():
        found.append(Row(f"step {name}", partial(taken, setting, each, make), 6))
    for strategy in ("flat", "per_param"):
        run = partial(checkpoint, setting, shard_strategy=strategy)
        found.append(Row(f"checkpoint {strategy}", run, 10))
    run = partial(checkpoint, setting, shard_strategy="flat", cpu_offload=True)
    found.append(Row("checkpoint flat, offloaded", run, 10))
    return found
