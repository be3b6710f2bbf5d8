"""Tiny training runs with one fault each: ``-m workers FOLDER FAULT``, started by the launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from shardwright.core.errors import InputError, NoPlanError
from shardwright.launcher.folder import MARK, store_file
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.launcher.progress import ProgressLog
from shardwright.launcher.watch import run_processes
from shardwright.launcher.worker import run_worker

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(sys.argv[1])
fault = sys.argv[2]
STEPS = 10


def body(heartbeat: Heartbeat) -> None:
    heartbeat.mark("load")
    if fault == "no_plan":
        raise NoPlanError("plan: expected at most 1 GiB on rank 0, got 2 GiB.")
    if fault == "endless":  # no torch: nothing but signs of life
        for step in range(10_000):
            heartbeat.begin("forward", step)
            time.sleep(0.01)
    if fault == "quick":  # no torch either
        for step in range(STEPS):
            heartbeat.begin("forward", step)
        return
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(store_file(FOLDER)), SIZE)
    dist.init_process_group(
        "gloo", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    progress = ProgressLog(FOLDER)
    for step in range(STEPS):
        heartbeat.begin("exchange_rows", step)
        if step == 7:
            break_down()
        value = torch.ones(4)
        dist.all_reduce(value)
        if RANK == 0:
            progress.update({"step": step + 1, "steps": STEPS, "loss": float(value.sum())})
    if RANK == 0:
        (FOLDER / "listening.txt").write_text("\n".join(listening(os.environ[MARK])))
    dist.barrier()
    dist.destroy_process_group()


def listening(mark: str) -> list[str]:
    """The addresses at which processes of the run take connections."""
    own = set()
    for pid in run_processes(mark):
        for descriptor in Path("/proc").glob(f"{pid}/fd/*"):
            with contextlib.suppress(OSError):  # closed since
                own.add(os.readlink(descriptor))
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def break_down() -> None:
    if fault == "input_1" and RANK == 1:
        raise InputError("batch 7: expected ids below 100, got 100.")
    if fault == f"kill_{RANK}":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == f"stop_{RANK}":
        os.kill(os.getpid(), signal.SIGSTOP)


if fault == "import":
    import shardwright.no_such_module  # noqa: F401

if __name__ == "__main__":
    sys.exit(run_worker(FOLDER, RANK, body))
