"""A job's steps followed by the tracker, as ``memory --real-ranks`` runs them."""

from __future__ import annotations

import msgspec
import torch
from probe_tasks import MESHES
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.footprint import Tracked
from shardwright.estimate.rehearsal import followed
from shardwright.job.job import Job, parallel_of


def seen(mesh: DeviceMesh, job: Job) -> Tracked:
    """What this rank took; on pairs of ranks where the job has replicas."""
    torch.manual_seed(0)
    if parallel_of(job).data_replicate > 1:
        mesh = MESHES[2, 2]
    return msgspec.structs.replace(followed(job, mesh), snapshots=())
