"""What the pool's workers do to be profiled."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.document import read_document
from shardwright.core.measurement import RECORD_SCHEMA, RankProfile, Record
from shardwright.job.plan import read_plan
from shardwright.launcher.folder import record_file
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.runtime.clock import clock_offset
from shardwright.runtime.comm import Comm
from shardwright.runtime.meter import Meter
from shardwright.train.profiling import Profiler
from shardwright.train.training import Training

DELAY = 1.0  # seconds, large against what a busy machine adds
STEPS = 3


def with_a_straggler(
    mesh: DeviceMesh, folder: Path, straggler: int
) -> tuple[RankProfile, list[float]]:
    """The profile of steps in which one rank comes late to an exchange that others wait for, and
    how late it was by its own clock."""
    rank = mesh.get_local_rank()
    meter = Meter(rank)
    comm = Comm(mesh, meter)
    profiler = Profiler(meter, mesh, folder, STEPS)
    late = []
    profiler.start("training")
    for _ in range(STEPS):
        with meter.phase("exchange_rows"):
            comm.all_reduce("start", torch.ones(1))
            began = time.perf_counter()
            if rank == straggler:
                time.sleep(DELAY)
            late.append(time.perf_counter() - began)
            sent = torch.full((2**18,), float(rank))
            comm.all_to_all("rows", torch.empty_like(sent), sent)
        profiler.counted()
    (found,) = profiler.found
    return found, late


def offsets(mesh: DeviceMesh) -> tuple[float, float]:
    """What the rank's clock is off, which is that of its host like those of all others."""
    return clock_offset(mesh)


def trained(mesh: DeviceMesh, plan: str, folder: Path, steps: int) -> Record:
    """The record of a training of which some steps are profiled."""
    rank = mesh.get_local_rank()
    beat = Heartbeat.create(folder, rank)
    Training(read_plan(plan), folder, rank, beat, mesh=mesh, profile=steps).run()
    return read_document(record_file(folder, rank), Record, RECORD_SCHEMA, "train")
