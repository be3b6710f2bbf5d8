"""A stage of a small llama under torch's pipelining, seen by our tracker."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from shardwright.core.llama import LlamaShape, LocalShape
from shardwright.core.recording import BlockNames
from shardwright.estimate.stages import ModelStage, pipeline_ranks
from shardwright.estimate.unplanned import recorded_model
from shardwright.job.job import Job, degrees_of, memory_of, parallel_of
from shardwright.models.llama import Llama
from shardwright.runtime.fully_shard import fully_shard_flat
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters
from shardwright.runtime.units.dstorage import DStorage, units_in
from shardwright.trace.treatment import Treatment
from shardwright.tracker.memory import MemoryTracker

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
SETTLE_SECONDS = 0.01  # gloo's threads may hold a buffer for a moment after the wait


def tracked_stage(mesh: DeviceMesh, job: Job) -> dict[str, int]:
    """The peaks of this rank's third step, by phase."""
    degrees = degrees_of(job, mesh.size())
    data, across = None, mesh
    if memory_of(job).runtime == "shardwright":  # on all ranks of the world, which make groups
        sizes = (degrees.pipeline, degrees.data_replicate, degrees.data_shard)
        every = init_device_mesh("cpu", sizes, mesh_dim_names=("pipe", "replicate", "shard"))
        across = every["pipe"]
        data = every["replicate", "shard"] if degrees.data_replicate > 1 else every["shard"]
    pipe, rank = across.get_group(), across.get_local_rank()
    shape, batch = job.model.shape, job.batch
    assert isinstance(shape, LlamaShape)
    (mine,) = pipeline_ranks(shape.layers, degrees)[rank].stages
    local = LocalShape(first=mine.first, last=mine.last, layers=mine.layers)
    model = Llama(shape, local, sequence=batch.sequence)
    parameters = model.parameters()
    if data is not None:
        _share(model, job, mine, data)
        parameters = optimizer_parameters(model)
    stage = _Stage(model, rank, degrees.pipeline, torch.device("cpu"), group=pipe)
    schedule = SCHEDULES[degrees.schedule](
        stage, degrees.microbatches, loss_fn=model.loss, scale_grads=False
    )
    optimizer = make_optimizer("adamw", parameters, 1e-3, "foreach")
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
    dist.barrier(pipe)
    with MemoryTracker(model, optimizer, tokens if rank == 0 else targets) as tracker:
        step()
    return {phase.phase: phase.bytes for phase in tracker.result().phases}


def _share(model: Llama, job: Job, mine: ModelStage, mesh: DeviceMesh) -> None:
    """The units of the estimate, those inside of others first, kept whole for all microbatches."""
    section = memory_of(job)
    degrees = degrees_of(job, job.cluster.world_size or 1)
    recorded = recorded_model(job, degrees, Treatment("cpu", section.policy))
    blocks = BlockNames(recorded.recorded(parallel_of(job), mine).recording)
    units = [blocks.own(name, unit) for name, unit in blocks.unfolded()]
    for unit in sorted(units, key=lambda each: each.name == ""):
        modules = [model.get_submodule(path) for path in unit.modules]
        zero = section.stage if section.zero == "auto" else section.zero
        fully_shard_flat(
            modules, mesh, reshard_after_forward=False, zero=zero, shard_strategy="flat"
        )


class _Stage(PipelineStage):
    """Which sums gradients over data ranks in its last backward, as torch does it for FSDP2."""

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        for storage in units_in(self.submod):
            DStorage(storage).set_requires_gradient_sync(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
