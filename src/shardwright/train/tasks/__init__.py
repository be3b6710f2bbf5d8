"""What a rank trains, by the kind of its model: one file for each, all with the same methods."""

from __future__ import annotations

from shardwright.estimate.task import Task
from shardwright.job.job import Job


def task_of(job: Job) -> Task:
    """The task of a job, on every rank its own."""
    if job.model.traits.is_function:
        from shardwright.train.tasks.python import python_task

        return python_task(job)
    if job.model.traits.reads_clicks:
        from shardwright.train.tasks.clicks import Clicks

        return Clicks(job)
    from shardwright.train.tasks.language import Language

    return Language(job)
