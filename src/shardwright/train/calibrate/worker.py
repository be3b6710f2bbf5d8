"""``torchrun ... -m shardwright.train.calibrate.worker``: one rank of a calibration."""

# What is timed is what a run does, by the same classes (Comm, Store, GroupRouting): another way to
# do it would have other constants. Sections come one after the other on all ranks, and those that
# need one rank alone are timed while all work at them.

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwright.core.cluster import Device
from shardwright.core.document import write_document
from shardwright.launcher.folder import store_file
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.launcher.progress import ProgressLog
from shardwright.launcher.worker import run_worker
from shardwright.runtime import comm
from shardwright.runtime.comm import Comm
from shardwright.train.calibrate import cases
from shardwright.train.calibrate.cases import BUFFERS, SCHEMA, Bench, Samples, Timed, samples_file

TIMEOUT = 60.0
LEAST, LEAST_QUICK = 5, 3
KEPT = 31 * 2**20  # bytes; a run that has freed a large buffer is in this state too
QUICK = 0.12  # of the seconds


@dataclass(frozen=True, slots=True)
class TimedTogether:
    """Cases that are timed side by side, for about ``seconds``."""

    title: str
    seconds: float
    runs: Callable[[], Mapping[str, Timed]]


class Worker:
    """One rank: its device, its part in every section, its samples."""

    def __init__(self, folder: Path, rank: int, world_size: int, heartbeat: Heartbeat) -> None:
        self.folder = folder
        self.rank = rank
        self.world_size = world_size
        self.heartbeat = heartbeat
        self.step = 0
        accelerated = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
        self.kind: Device = "cuda" if accelerated else "cpu"
        self.backend = "nccl" if accelerated else "gloo"
        self.device = torch.device(self.kind)
        if accelerated:
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)

    def run(self, quick: bool) -> None:
        """Time everything and leave the samples."""
        mesh = init_device_mesh(self.kind, (self.world_size,))
        torch.empty(
            KEPT, dtype=torch.uint8
        )  # let go at once: malloc keeps such buffers from now on
        link = Comm(mesh)
        link.prepare(BUFFERS[-1])  # the ways that units of such sizes would take
        bench = Bench(link, self._synchronize, self._tick)
        progress = ProgressLog(self.folder) if self.rank == 0 else None
        sections = self._sections(link, bench)
        for self.step, section in enumerate(sections, 1):
            if progress:
                count = len(sections)
                progress.update({"step": self.step, "steps": count, "text": section.title})
            seconds = section.seconds * (QUICK if quick else 1.0)
            bench.measure(section.runs(), seconds, LEAST_QUICK if quick else LEAST)
        self._leave(bench, link.paths)

    def _synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def _tick(self) -> None:
        self.heartbeat.begin("evaluate", self.step)

    def _sections(self, link: Comm, bench: Bench) -> list[TimedTogether]:
        device, alone = self.device, self.world_size == 1
        layers = partial(cases.compute, device)
        if cases.products_file(self.folder).exists():
            layers = partial(cases.products, self.folder, device)
        sections = [
            TimedTogether("memory", 3.0, lambda: cases.memory(device)),
            TimedTogether("layers", 2.5, layers),
            TimedTogether("small operations", 1.5, lambda: cases.operations(device)),
            TimedTogether("embedding rows", 3.0, lambda: cases.accesses(device, self.world_size)),
            TimedTogether("click-log rows", 1.0, lambda: cases.parsing(self.folder, self.rank)),
        ]
        if self.kind == "cuda":
            sections.append(TimedTogether("host memory", 2.0, lambda: cases.link(device)))
        if not alone:
            sections += [
                TimedTogether("collectives", 12.0, lambda: cases.collectives(link)),
                TimedTogether("overlap", 4.0, lambda: cases.overlaps(link, bench)),
            ]
        return sections

    def _leave(self, bench: Bench, ways: Mapping[str, str]) -> None:
        memory = {"ddr_cap": cases.host_bytes()}
        facts = {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": str(os.cpu_count()),
            "threads_per_rank": str(torch.get_num_threads()),
            "torch": str(torch.__version__),
            **ways,
        }
        if self.kind == "cuda":
            memory["hbm_cap"] = torch.cuda.mem_get_info(self.device)[1]
            facts["accelerator"] = torch.cuda.get_device_name(self.device)
        found = Samples(
            schema=SCHEMA,
            rank=self.rank,
            world_size=self.world_size,
            device=self.kind,
            backend=self.backend,
            machine=facts,
            memory=memory,
            cases=bench.cases,
        )
        write_document(found, samples_file(self.folder, self.rank))


def main() -> int:
    """Measure as torchrun's environment says; the status file says how it ended."""
    parser = argparse.ArgumentParser(prog="shardwright.train.calibrate.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def body(heartbeat: Heartbeat) -> None:
        worker = Worker(options.folder, rank, world_size, heartbeat)
        store = comm.meet(TIMEOUT, rank, world_size, store_file(options.folder))
        comm.start(worker.backend, TIMEOUT, rank, world_size, store)
        try:
            worker.run(options.quick)
            heartbeat.mark("done")
        finally:
            comm.stop()

    return run_worker(options.folder, rank, body)


if __name__ == "__main__":
    sys.exit(main())
