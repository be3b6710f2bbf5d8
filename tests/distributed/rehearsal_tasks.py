"""A job's steps followed by the tracker, as ``memory --real-ranks`` runs them."""

from __future__ import annotations

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.footprint import Tracked
from shardwright.core.job import Job
from shardwright.lab.rehearsal_rank import followed


def seen(mesh: DeviceMesh, job: Job) -> Tracked:
    """What this rank took."""
    torch.manual_seed(0)
    return msgspec.structs.replace(followed(job, mesh), snapshots=())
