"""Stage ``memory``: what a step takes of the device, phase by phase, beside what was predicted.

On a GPU its allocator is asked, which counts what is live (``allocated``: tensors, rounded up, and
cuBLAS's workspaces), what it cannot give away yet (``active``) and what it holds (``reserved``);
the device says what is taken outside of it. On a CPU the tracker is asked, which sees tensors
alone.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any

import torch

from gpu.configurations import Configuration, memory_configurations
from gpu.predict import Prediction, prediction_of
from gpu.rehearsal import Run, clear, running
from gpu.rows import Row, Setting
from shardwright.estimate.rehearsal import tracked

STEPS = 3
PHASES = ("forward", "backward", "step")


def rows(setting: Setting) -> list[Row]:
    """A configuration each; before them what a process takes of a GPU once."""
    found = [
        Row(each.name, partial(measured, setting, each), each.seconds, each.environment)
        for each in memory_configurations()
        if each.runs_on(setting)
    ]
    return [Row("workspaces", partial(workspaces, setting)), *found]


def workspaces(setting: Setting) -> dict[str, Any]:
    """What products take in torch's allocator for as long as a process runs, forward and backward,
    and what a context takes outside of it."""
    if setting.device == "cpu":
        return {"bytes": 0}
    clear(setting)
    before = torch.cuda.memory_allocated()
    x, y = (
        torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    found: dict[str, Any] = {}
    z = x @ y
    torch.cuda.synchronize()
    found["forward"] = torch.cuda.memory_allocated() - before - 3 * 64 * 64 * 2
    z.backward(torch.ones_like(z))
    torch.cuda.synchronize()
    del x, y, z
    gc.collect()
    found["bytes"] = torch.cuda.memory_allocated() - before
    return found | {"outside": outside()}


def outside() -> int:
    """Bytes of the device that are taken and not held by torch's allocator."""
    free, everything = torch.cuda.mem_get_info()
    return everything - free - torch.cuda.memory_reserved()


def measured(setting: Setting, configuration: Configuration) -> dict[str, Any]:
    """A configuration's steps, the most of three by phase, beside its prediction."""
    known = prediction_of(setting, configuration)
    with running(setting, configuration, known) as run:
        found = _of_gpu(run) if setting.device == "cuda" else _of_cpu(setting, configuration, run)
    return {**found, "predicted": told(known)}


def told(known: Prediction) -> dict[str, Any]:
    """A prediction beside figures."""
    names = ("peak", "phases", "kept", "reserved", "retries", "outside", "parameters")
    return {name: getattr(known, name) for name in names}


def _of_gpu(run: Run) -> dict[str, Any]:
    at_first = torch.cuda.memory_stats()
    run.step()  # makes the optimizer's states
    torch.cuda.synchronize()
    phases: dict[str, dict[str, int]] = {phase: {} for phase in PHASES}
    begun = time.perf_counter()
    for _ in range(STEPS):
        for phase, part in zip(PHASES, (run.forward, run.backward, run.update), strict=True):
            torch.cuda.reset_peak_memory_stats()
            part()
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            for kind in ("allocated", "active", "requested", "reserved"):
                now = stats[f"{kind}_bytes.all.peak"]
                phases[phase][kind] = max(now, phases[phase].get(kind, 0))
    seconds = (time.perf_counter() - begun) / STEPS
    stats = torch.cuda.memory_stats()
    return {
        "phases": phases,
        **{kind: max(phases[p][kind] for p in PHASES) for kind in phases["forward"]},
        "kept": stats["allocated_bytes.all.current"],
        "retries": stats["num_alloc_retries"] - at_first["num_alloc_retries"],
        "outside_measured": outside(),
        "seconds_a_step": seconds,
    }


def _of_cpu(setting: Setting, configuration: Configuration, run: Run) -> dict[str, Any]:
    found = tracked(configuration.job(setting), run.rehearsed)
    peaks = {each.phase: each.bytes for each in found.phases}
    return {"phases": {p: {"allocated": size} for p, size in peaks.items()}} | {
        "allocated": found.peak.bytes
    }
