"""What a rank trains, by the kind of its model: one file for each, all with the same methods."""

from __future__ import annotations

from shardwright.core.job import Job
from shardwright.lab.tasks.clicks import Clicks
from shardwright.lab.tasks.language import Language
from shardwright.lab.tasks.task import Task


def task_of(job: Job, rank: int, world_size: int) -> Task:
    """The task of one rank."""
    kinds: dict[str, type[Clicks] | type[Language]] = {"dlrm": Clicks, "transformer": Language}
    return kinds[job.model.kind](job, rank, world_size)
