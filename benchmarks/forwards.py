"""A step of a DLRM whose ranks are threads of one process, beside that of processes.

    python benchmarks/forwards.py --output validation/cpu-2-cores/forwards.json

The model, its plans and its batches are those of `whole_dlrm.py` with the small top, on 2 and 4
ranks. Both forwards are there at once and take turns, several steps at a time; every rank has one
thread to compute with. CPU time is that of all ranks together, wall time that of the slowest, both
per step and medians over the turns; so are their ratios, of neighbouring turns. Losses after all
steps are said, too: they are of the same batches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from side_by_side import SHAPES
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from whole_dlrm import Batch, made_up, ours, planned

from shardwright.job.plan import Plan
from shardwright.runtime.devices import Devices

SECONDS = 300  # that anybody waits at most
BATCHES, BLOCK = 4, 5  # different ones of a rank, and steps of a turn
Turn = tuple[float, float, float]  # CPU and wall seconds, and the last loss


def batches(rank: int) -> list[Batch]:
    """A rank's."""
    random = np.random.default_rng(rank)
    return [made_up(SHAPES["A"], random) for _ in range(BATCHES)]


def process(rank: int, ranks: int, made: Plan, store: str, link: Connection) -> None:
    """A rank that is a process: as many steps as it is asked for, until it is asked for none."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    place = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=SECONDS)}
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), **place)
    step, given = ours(made, init_device_mesh("cpu", (ranks,))), batches(rank)
    while count := link.recv():
        dist.barrier()
        cpu, wall, loss = time.process_time(), time.perf_counter(), 0.0
        for number in range(count):
            loss = step(given[number % BATCHES])
        link.send((time.process_time() - cpu, time.perf_counter() - wall, loss))
    dist.destroy_process_group()


def threads(ranks: int, made: Plan, link: Connection) -> None:
    """All ranks in one process."""
    torch.set_num_threads(1)
    devices = Devices(ranks, timedelta(seconds=SECONDS))
    ready = threading.Barrier(ranks + 1, timeout=SECONDS)
    asked, losses = [0], [0.0] * ranks

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        with devices.rank(rank):
            step, given = ours(made, init_device_mesh("cpu", (ranks,))), batches(rank)
            while ready.wait() >= 0 and asked[0]:
                for number in range(asked[0]):
                    losses[rank] = step(given[number % BATCHES])
                ready.wait()

    with devices.here():
        started = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(ranks)]
        for thread in started:
            thread.start()
        while count := link.recv():
            asked[0] = count
            ready.wait()
            cpu, wall = time.process_time(), time.perf_counter()
            ready.wait()
            link.send((time.process_time() - cpu, time.perf_counter() - wall, losses[0]))
        asked[0] = 0
        ready.wait()
        for thread in started:
            thread.join(SECONDS)


def turn(links: list[Connection], steps: int) -> Turn:
    """What the ranks behind ``links`` took for so many steps."""
    for link in links:
        link.send(steps)
    found = []
    for link in links:
        if not link.poll(SECONDS):
            raise TimeoutError(f"no rank has answered for {SECONDS} s")
        found.append(link.recv())
    return sum(cpu for cpu, _, _ in found), max(wall for _, wall, _ in found), found[0][2]


def run(ranks: int, sharding: str, turns: int) -> dict[str, Any]:
    """Both forwards of one plan."""
    made = planned(("small", sharding), "none", ranks)
    context = multiprocessing.get_context("spawn")
    links: dict[str, list[Connection]] = {"distributed": [], "parallel": []}
    started = []
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        jobs: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("distributed", process, (rank, ranks, made, store)) for rank in range(ranks)
        ]
        for name, target, arguments in (*jobs, ("parallel", threads, (ranks, made))):
            here, there = context.Pipe()
            links[name].append(here)
            started.append(context.Process(target=target, args=(*arguments, there), daemon=True))
            started[-1].start()
        taken: dict[str, list[Turn]] = {name: [] for name in links}
        for number in range(turns + 1):
            for name, ends in links.items():
                found = turn(ends, BLOCK)
                if number:  # the first warms up
                    taken[name].append(found)
        for link in (*links["distributed"], *links["parallel"]):
            link.send(0)
        for each in started:
            each.join(SECONDS)
    line: dict[str, Any] = {"ranks": ranks, "sharding": sharding}
    for name, seen in taken.items():
        cpu, wall = (statistics.median(t[i] for t in seen) / BLOCK * 1e3 for i in (0, 1))
        line[name] = {"cpu_ms": round(cpu, 3), "wall_ms": round(wall, 3), "loss": seen[-1][2]}
    pairs = list(zip(taken["parallel"], taken["distributed"], strict=True))
    line["parallel_over_distributed"] = {
        key: round(statistics.median(one[i] / other[i] for one, other in pairs), 3)
        for i, key in enumerate(("cpu", "wall"))
    }
    return line


def main() -> None:
    """Two types on two and four ranks, one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = []
    for ranks in options.ranks:
        for sharding in ("table_wise", "row_wise"):
            lines.append(run(ranks, sharding, options.turns))
            print(json.dumps(lines[-1]), flush=True)
    if options.output:
        document = {"versions": {"torch": torch.__version__}, "cases": lines}
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
