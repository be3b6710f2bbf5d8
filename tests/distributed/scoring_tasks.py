"""What the pool's workers do to be scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.document import read_document
from shardwright.core.measurement import RECORD_SCHEMA, Record, Scores
from shardwright.job.plan import read_plan
from shardwright.launcher.folder import record_file
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.runtime.comm import Comm
from shardwright.train.steps import Scoring
from shardwright.train.training import Training


def scored(mesh: DeviceMesh, logits: Any, labels: Any, every: int) -> tuple[list[Scores], int]:
    """The scores of steps [S, W, B] of which each rank has its own rows, and how many collectives
    they took."""
    comm = Comm(mesh)
    before, scoring = comm.sequence, Scoring(comm, every)
    for step, (given, clicked) in enumerate(zip(logits, labels, strict=True), 1):
        own = (torch.from_numpy(np.asarray(each[comm.rank])) for each in (given, clicked))
        scoring.add(*own)
        scoring.after(step)
    return scoring.found, comm.sequence - before


def trained(mesh: DeviceMesh, plan: str, folder: Path) -> tuple[Record, int]:
    """The record of a training, and the collectives of the group while it trained."""
    rank = mesh.get_local_rank()
    training = Training(read_plan(plan), folder, rank, Heartbeat.create(folder, rank), mesh=mesh)
    before = Comm(mesh).sequence
    training.run()
    record = read_document(record_file(folder, rank), Record, RECORD_SCHEMA, "train")
    return record, training.guard.comm.sequence - before
