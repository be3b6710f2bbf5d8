"""From a job to the memory of every class of its ranks, without running it."""

from __future__ import annotations

import time

import msgspec

from shardwright.core.errors import check_type
from shardwright.core.footprint import Footprint
from shardwright.estimate.planned import planned
from shardwright.estimate.with_tables import Recorded
from shardwright.job.job import A_JOB, Job
from shardwright.job.model_of_job import is_planned
from shardwright.planner.search.watch import Hear

__all__ = ["footprint"]


def footprint(
    job: Job,
    *,
    details: bool = False,
    rank: str = "",
    hear: Hear | None = None,
    record: Recorded | None = None,
    ways: bool = True,
) -> Footprint:
    """The memory of every class of ranks of ``job``, without running it.

    A job that can be planned has the memory of its plan, to the byte, also where no plan fits:
    then that of the draft which asks least. Others are estimated as their ``[parallel]`` and
    ``[memory]`` say. On an accelerator the class with the highest peak is also replayed through
    the allocator. With ``details`` it has its modules, its largest tensors and a timeline;
    ``rank`` names another class to have them. ``hear`` is called in every round of a search, and
    ``record`` gives the step of a module of the user's own that is planned.
    Raises InputError for what cannot be traced or divided, naming the place, NoPlanError where
    no tables alone fit, with ``ways`` out unless nobody asks for them.
    """
    check_type(job, Job, "job", A_JOB)
    begun = time.perf_counter()
    if is_planned(job):
        found = planned(job, details=details, rank=rank, hear=hear, record=record, ways=ways)
    else:
        from shardwright.estimate.unplanned import estimated

        found = estimated(job, details=details, rank=rank)
    return msgspec.structs.replace(found, seconds=time.perf_counter() - begun)
