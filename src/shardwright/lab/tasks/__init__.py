"""What a rank trains, by the kind of its model: one file for each, all with the same methods."""

from __future__ import annotations

from shardwright.core.job import Job
from shardwright.lab.tasks.task import Task


def task_of(job: Job) -> Task:
    """The task of a job, on every rank its own."""
    if job.model.kind == "python":
        from shardwright.lab.tasks.python import python_task

        return python_task(job)
    if job.model.kind == "dlrm":
        from shardwright.lab.tasks.clicks import Clicks

        return Clicks(job)
    from shardwright.lab.tasks.language import Language

    return Language(job)
