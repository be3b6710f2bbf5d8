"""Gloo workers that are started once per test session and run one task after the other.

All four processes share one group; a task on ``world_size`` ranks runs on the first of them, on a
mesh that was made at the start. Every wait has a timeout, and a pool that missed one is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

WORLD_SIZE = 4
TASK_SECONDS = 400.0
COLLECTIVE_SECONDS = 20.0


class Pool:
    """Runs module-level functions ``task(mesh, **arguments)`` on the first ranks."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        self.links: list[Connection] = []
        self.processes = []
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, store, theirs), daemon=True)
            process.start()
            self.links.append(ours)
            self.processes.append(process)

    def run(self, world_size: int, task: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What each rank returned; raises AssertionError with the first rank's error."""
        outcomes = self.outcomes(world_size, task, **arguments)
        for rank, (works, value) in enumerate(outcomes):
            assert works, f"rank {rank}: {value}"
        return [value for _, value in outcomes]

    def outcomes(
        self, world_size: int, task: Callable[..., Any], **arguments: Any
    ) -> list[tuple[bool, Any]]:
        """(True, result) or (False, error text) of each rank."""
        for link in self.links[:world_size]:
            link.send((world_size, task, arguments))
        answers = []
        for rank, link in enumerate(self.links[:world_size]):
            if not link.poll(TASK_SECONDS):
                self.close()
                raise AssertionError(f"rank {rank} gave no answer within {TASK_SECONDS} s")
            answers.append(link.recv())
        return answers

    def close(self) -> None:
        """End every worker."""
        for process in self.processes:
            process.kill()
            process.join(10)
        self.folder.cleanup()


def serve(rank: int, store: str, link: Connection) -> None:
    """A worker's life: join, make the meshes, answer tasks until the pipe closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from shardwright.runtime.comm import Comm

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in range(1, WORLD_SIZE + 1)}
    while True:
        try:
            world_size, task, arguments = link.recv()
        except EOFError:
            return
        Comm(meshes[world_size]).forget()  # a task that failed on one rank left another
        try:
            answer = (True, task(meshes[world_size], **arguments))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        link.send(answer)
