"""Runs the loops of examples/language_model.py and examples/own_loop.py on the pool's workers."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from warm import run

import shardwright as sw

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_model.py"
OWN_LOOP = EXAMPLE.with_name("own_loop.py")


def under_torchrun(path: Path, *arguments: str) -> str:
    """What an example says on two ranks that torchrun starts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(path), *arguments]
    done = run(command, 110, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def _example(path: Path = EXAMPLE) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(mesh: DeviceMesh, folder: str, steps: int, every: int, stop: int) -> Any:
    """The evaluated losses, and the whole weights and moments of the last checkpoint."""
    example = _example()
    losses = example.train(mesh, Path(folder), steps, every, stop)
    dist.barrier(mesh.get_group())
    return losses, _saved(example, mesh, folder)


def train_own(mesh: DeviceMesh, steps: int) -> tuple[sw.Plan, sw.Measurement]:
    """The plan, and what all ranks measured."""
    found: tuple[sw.Plan, sw.Measurement] = _example(OWN_LOOP).train(mesh, steps)
    return found


def measured_on_a_grid(mesh: DeviceMesh) -> tuple[sw.Plan, sw.Measurement]:
    """The plan of two replicas of shards, and what a loop of three steps measured."""
    x = torch.ones(4, 6)
    plan = sw.plan_module(
        lambda: torch.nn.Linear(6, 6),
        x,
        cluster={"world_size": mesh.size()},
        parallel={"data_replicate": 2},
        planner={"units": {"root": "shard"}},
    )
    torch.manual_seed(0)
    model = sw.apply(torch.nn.Linear(6, 6), plan, mesh)
    optimizer = torch.optim.AdamW(sw.optimizer_parameters(model))
    with sw.measure(plan, model, optimizer) as measured:
        for _ in range(3):
            model(x.clone()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            measured.step()
    return plan, measured.gather()


def measured_twice(mesh: DeviceMesh) -> tuple[sw.Plan, sw.Measurement, sw.Measurement]:
    """What a loop of two steps measured, and after one that raised in a step that is followed, a
    loop of three."""
    x = torch.ones(4, 6)
    plan = sw.plan_module(lambda: torch.nn.Linear(6, 6), x, cluster={"world_size": mesh.size()})
    model = sw.apply(torch.nn.Linear(6, 6), plan, mesh)
    optimizer = torch.optim.AdamW(sw.optimizer_parameters(model))

    def loop(steps: int, *, fails: bool = False) -> sw.Measurement:
        with sw.measure(plan, model, optimizer) as measured:
            for step in range(1, steps + 1):
                model(x.clone()).mean().backward()
                if fails and step == steps:
                    raise OSError
                optimizer.step()
                optimizer.zero_grad()
                measured.step()
        return measured.gather()

    before = torch.autograd.backward
    short = loop(2)
    with suppress(OSError):
        loop(3, fails=True)
    assert torch.autograd.backward is before
    return plan, short, loop(3)


def _saved(example: ModuleType, mesh: DeviceMesh, folder: str) -> dict[str, torch.Tensor]:
    model = example.LanguageModel(int(example.corpus().max()) + 1)
    for parameter in model.parameters():
        parameter.detach().zero_()
    sw.fully_shard_flat(model, mesh)
    optimizer = torch.optim.AdamW(
        sw.optimizer_parameters(model, lambda name, p: {"weight_decay": float(p.ndim > 1)})
    )
    sw.load_checkpoint(folder, model, optimizer)
    found = sw.full_state_dict(model)
    for name, states in sw.optimizer_state_dict(model, optimizer)["state"].items():
        found[f"{name}/exp_avg"] = states["exp_avg"].full_tensor()
    return found
