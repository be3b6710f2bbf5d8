"""What a step takes of the host beside FSDP2: rank 0 of a fake group of eight, so that all of the
runtime's work is done and nothing travels."""

from __future__ import annotations

import gc
import time
from functools import partial
from statistics import median
from typing import Any

from fsdp_contestants import SIZES, Contestant, batch_of, contestants, model_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gpu.rows import Row, Setting, fake_group
from shardwright.models.transformer import next_token_loss

RANKS = 8
SOME = ("single", "fsdp2", "flat")
NAMES = (*SOME, "per_param", "flat prefetch", "zero 2", "zero 2 buckets")
WARM = 4
CLOCKS = ("wall", "host", "cpu", "update_host", "update_cpu")


class Run:
    """A contestant under way."""

    def __init__(
        self, contestant: Contestant, size: str, setting: Setting, mesh: DeviceMesh
    ) -> None:
        self.setting = setting
        self.model = contestant.wrap(model_of(size).to(setting.device), mesh)
        self.optimizer = contestant.optimizer(self.model)
        self.batch = [part.to(setting.device) for part in batch_of(size, 0, 0, RANKS)]
        self.clear()

    def clear(self) -> None:
        """Begin the clocks anew: of the whole step until it is done, and of the host until it has
        asked for forward and backward and for the update, with its processor time."""
        self.clocks: dict[str, list[float]] = {name: [] for name in CLOCKS}

    def step(self) -> None:
        """Forward, backward, update."""
        tokens, targets = self.batch
        self.setting.synchronize()
        begun, cpu = time.perf_counter(), time.process_time()
        next_token_loss(self.model(tokens), targets).backward()
        middle, middle_cpu = time.perf_counter(), time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        ended, ended_cpu = time.perf_counter(), time.process_time()
        self.setting.synchronize()
        taken = (
            *(time.perf_counter() - begun, middle - begun, middle_cpu - cpu),
            *(ended - middle, ended_cpu - middle_cpu),
        )
        for name, seconds in zip(CLOCKS, taken, strict=True):
            self.clocks[name].append(seconds)

    def figures(self) -> dict[str, Any]:
        """Medians in milliseconds."""
        return {f"{name}_ms": 1e3 * median(each) for name, each in self.clocks.items()}


def overhead(setting: Setting, size: str) -> dict[str, Any]:
    """All contestants in turns on one model of ``SIZES``, and what a unit adds to the host's time
    of a step without any."""
    rounds, steps = (1, 1) if setting.small else (4, 8)
    with fake_group(RANKS):
        mesh = init_device_mesh(setting.device, (RANKS,))
        known = contestants()
        runs = {
            name: Run(known[name], size, setting, mesh)
            for name in (SOME if setting.small else NAMES)
        }
        for run in runs.values():
            for _ in range(1 if setting.small else WARM):
                run.step()
            run.clear()
        gc.collect()
        gc.disable()
        try:
            for turn in range(rounds):
                for run in runs.values() if turn % 2 == 0 else reversed(runs.values()):
                    for _ in range(steps):
                        run.step()
        finally:
            gc.enable()
        found: dict[str, Any] = {name: run.figures() for name, run in runs.items()}
    units, bare, peer = SIZES[size]["layers"] + 1, found["single"], found["fsdp2"]
    for name, row in found.items():
        if name != "single":
            for clock in ("host", "cpu"):
                row[f"{clock}_ms_a_unit"] = (row[f"{clock}_ms"] - bare[f"{clock}_ms"]) / units
            row["of_fsdp2"] = {name: row[f"{name}_ms"] / peer[f"{name}_ms"] for name in CLOCKS}
    return {"ranks": RANKS, "units": units, "steps": rounds * steps, "contestants": found}


def rows(setting: Setting) -> list[Row]:
    """The small and the larger model; of these on a CPU the small one."""
    sizes = ("tiny",) if setting.small else (*SIZES,)
    return [Row(f"host {size}", partial(overhead, setting, size), 12) for size in sizes]
