"""The dense part of a job of tables: traced, so that a plan knows what it leaves them."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from shardwright.estimate.unplanned import estimated
from shardwright.job.job import Job
from shardwright.job.model import as_function


def with_traced_dense(job: Job) -> Job:
    """The job with the traced peak of its dense part in ``planner.reservation.nbytes``.

    Only of tables alone whose reservation is ``traced`` and whose ``model.python`` names the
    function that makes the dense part; other jobs come back as they are. On an accelerator it is
    what the allocator reserves, for that is not there for tables.
    """
    section = job.planner.reservation
    wanted = not job.model.traits.has_step and section.kind == "traced" and not section.nbytes
    if not wanted or job.model.python is UNSET:
        return job
    model = as_function(job.model)
    worst = estimated(msgspec.structs.replace(job, tables=(), model=model)).worst
    nbytes = max(worst.peak_bytes, worst.reserved_bytes)
    planner = msgspec.structs.replace(
        job.planner, reservation=msgspec.structs.replace(section, nbytes=nbytes)
    )
    return msgspec.structs.replace(job, planner=planner)
