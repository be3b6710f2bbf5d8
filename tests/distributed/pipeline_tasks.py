"""A stage of a small llama under torch's pipelining, seen by our tracker."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from shardwright.core.job import Job, degrees_of
from shardwright.core.llama import LlamaShape
from shardwright.core.llama_local import LocalShape
from shardwright.lab.footprint.stages import pipeline_ranks
from shardwright.models.llama import Llama
from shardwright.tracker.memory import MemoryTracker

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
SETTLE_SECONDS = 0.01  # gloo's threads may hold a buffer for a moment after the wait


def tracked_stage(mesh: DeviceMesh, job: Job) -> dict[str, int]:
    """The peaks of this rank's third step, by phase."""
    rank, size = mesh.get_local_rank(), mesh.size()
    shape, degrees, batch = job.model.shape, degrees_of(job, size), job.batch
    assert isinstance(shape, LlamaShape)
    (mine,) = pipeline_ranks(shape.layers, degrees)[rank].stages
    local = LocalShape(first=mine.first, last=mine.last, layers=mine.layers)
    model = Llama(shape, local, sequence=batch.sequence)
    stage = PipelineStage(model, rank, size, torch.device("cpu"), group=mesh.get_group())
    schedule = SCHEDULES[degrees.schedule](
        stage, degrees.microbatches, loss_fn=model.loss, scale_grads=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens, targets = (torch.zeros(batch.size, batch.sequence, dtype=torch.int64) for _ in range(2))

    def step() -> None:
        if rank == 0:
            schedule.step(tokens, return_outputs=False)
        else:
            schedule.step(target=targets, losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    time.sleep(SETTLE_SECONDS)
    dist.barrier(mesh.get_group())
    with MemoryTracker(model, optimizer, tokens if rank == 0 else targets) as tracker:
        step()
    return {phase.phase: phase.bytes for phase in tracker.result().phases}
