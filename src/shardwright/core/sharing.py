"""At which stage of ZeRO and among whom a plan of a job may share its units."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shardwright.core.job import Job, memory_of, parallel_of
from shardwright.core.placement import TwoZeros, Zero


class Sharing(NamedTuple):
    """A stage of ZeRO, or one for replicas and one for shards, and how many replicas there are."""

    zero: Zero | TwoZeros
    replicas: int = 1


def sharings_of(job: Job, hosts: int) -> tuple[Sharing, ...]:
    """What a plan may share, and among whom, where the job leaves its stage open; of those as fast
    the first is taken. On several ``hosts`` it may share units within each of them."""
    given = parallel_of(job)
    replicas = given.data_replicate
    stages: tuple[Zero, ...] = (3,) if job.planner.dense.reshard else (3, 2, 1)
    found = [Sharing(zero, replicas) for zero in stages]
    if replicas == 1 and hosts > 1 and given.data_shard == -1:
        found += [Sharing(3, hosts), Sharing((2, 3), hosts)]
    elif replicas > 1:
        found.append(Sharing((2, 3), replicas))
    return tuple(found)


def with_sharing(job: Job, sharing: Sharing) -> Job:
    """The job at a stage of ZeRO, over so many replicas."""
    section, replicas = parallel_of(job), sharing.replicas
    if replicas != section.data_replicate:
        section = msgspec.structs.replace(section, data_replicate=replicas, data_shard=-1)
        job = msgspec.structs.replace(job, parallel=section)
    memory = msgspec.structs.replace(memory_of(job), zero=sharing.zero)
    return msgspec.structs.replace(job, memory=memory)
