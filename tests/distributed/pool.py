"""Gloo workers that are started once per test session and run one task after the other.

All four processes share one group; a task on ``world_size`` ranks runs on the first of them, on a
mesh that was made at the start. Every wait has a timeout, and a pool that missed one is gone.
"""

from __future__ import annotations

import gc
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from warm import server

WORLD_SIZE = 4
TASK_SECONDS = 400.0
COLLECTIVE_SECONDS = 60.0  # two busy cores have many ranks


class Pool:
    """Runs module-level functions ``task(mesh, **arguments)`` on the first ranks."""

    def __init__(self) -> None:
        context = server()  # what takes seconds is imported once
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


class Threads(Pool):
    """The same of ranks that are threads of this process."""

    def __init__(self) -> None:
        """Nothing is started yet."""

    def outcomes(
        self, world_size: int, task: Callable[..., Any], **arguments: Any
    ) -> list[tuple[bool, Any]]:
        from torch.distributed.device_mesh import DeviceMesh

        from shardwright.runtime.devices import Devices

        devices = Devices(world_size, timedelta(seconds=COLLECTIVE_SECONDS))
        answers: list[tuple[bool, Any]] = [(False, "no answer")] * world_size

        def run(rank: int) -> None:
            with devices.rank(rank):
                mesh = DeviceMesh("cpu", list(range(world_size)))
                answers[rank] = _answer(mesh, task, arguments)

        with devices.here():
            started = [
                threading.Thread(target=run, args=(rank,), daemon=True)
                for rank in range(world_size)
            ]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join(TASK_SECONDS)
        return answers


def _answer(mesh: Any, task: Callable[..., Any], arguments: dict[str, Any]) -> tuple[bool, Any]:
    try:
        return True, task(mesh, **arguments)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def share_one_device() -> None:
    """All gloo groups of this process on one device. Left alone, each makes its own, with a thread
    that wakes a hundred times a second for as long as the group lives: idle workers, which have
    dozens of groups, would take half a processor from whatever else is tested."""
    from torch.distributed import ProcessGroupGloo

    device = ProcessGroupGloo.create_device(interface="lo")
    made_alone, options = ProcessGroupGloo.__init__, ProcessGroupGloo._Options

    def make(group: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        given = options()
        given._devices, given._timeout = [device], timeout
        made_alone(group, store, rank, size, given)

    ProcessGroupGloo.__init__ = make


def serve(rank: int, store: str, link: Connection) -> None:
    """A worker's life: join, make the meshes, answer tasks until the pipe closes."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from shardwright.runtime.comm import Comm

    torch.set_num_threads(1)
    share_one_device()
    gc.freeze()  # no collection looks at what was imported again
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
        comm = Comm(meshes[world_size])
        comm.forget()  # a task that failed on one rank left another
        comm.step = None  # which the one before may have been in
        link.send(_answer(meshes[world_size], task, arguments))
