"""At which stage of ZeRO and among whom a plan of a job may share its units, and what these are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from shardwright.core.amount import ceil_div
from shardwright.core.placement import TwoZeros, Zero
from shardwright.job.job import Job, memory_of, parallel_of, with_memory

WHOLE_STAGES: tuple[Zero, ...] = (2, 1)  # of ZeRO, in which parameters stay whole


class Sharing(NamedTuple):
    """A stage of ZeRO, or one for replicas and one for shards, how many replicas there are, and of
    how many elements buckets are, 0 where units are modules."""

    zero: Zero | TwoZeros
    replicas: int = 1
    bucket_size: int = 0


PARTS = (1, 2, 4, 8, 16, 32)  # buckets of a model that are tried


def bucket_sizes_of(job: Job, elements: int) -> tuple[int, ...]:
    """What buckets a plan may choose, 0 for none, of a model with so many trained ``elements``."""
    wanted = job.planner.dense.bucket_size
    if wanted == "auto":
        return (0, *dict.fromkeys(max(ceil_div(elements, parts), 1) for parts in PARTS))
    return (wanted or 0,)


def sharings_of(job: Job, hosts: int, bucket_sizes: Sequence[int] = (0,)) -> tuple[Sharing, ...]:
    """What a plan of the job may share, and among whom; of those as fast the first is taken. A job
    that leaves it open on several ``hosts`` may share units within each of them. Where parameters
    stay whole units may be buckets of any of ``bucket_sizes``."""
    section, given = memory_of(job), parallel_of(job)
    replicas = given.data_replicate
    if section.zero != "auto":
        return tuple(Sharing(section.zero, replicas, size) for size in bucket_sizes)
    return tuple(_left_open(job, hosts, given.data_shard, replicas, bucket_sizes))


def _left_open(
    job: Job, hosts: int, shards: int, replicas: int, bucket_sizes: Sequence[int]
) -> Iterator[Sharing]:
    if 0 in bucket_sizes:
        yield Sharing(3, replicas)
    if not job.planner.dense.reshard or 0 not in bucket_sizes:
        for zero, size in product(WHOLE_STAGES, bucket_sizes):
            yield Sharing(zero, replicas, size)
    if 0 not in bucket_sizes:
        return
    if replicas == 1 and hosts > 1 and shards == -1:
        yield Sharing(3, hosts)
        yield Sharing((2, 3), hosts)
    elif replicas > 1:
        yield Sharing((2, 3), replicas)


def with_sharing(job: Job, sharing: Sharing) -> Job:
    """The job at a stage of ZeRO, over so many replicas, in such buckets."""
    section, replicas = parallel_of(job), sharing.replicas
    if replicas != section.data_replicate:
        section = msgspec.structs.replace(section, data_replicate=replicas, data_shard=-1)
        job = msgspec.structs.replace(job, parallel=section)
    job = with_memory(job, zero=sharing.zero)
    return with_buckets(job, sharing.bucket_size)


def with_buckets(job: Job, size: int) -> Job:
    """The job with buckets of so many elements, 0 for none."""
    dense = msgspec.structs.replace(job.planner.dense, bucket_size=size or UNSET)
    planner = msgspec.structs.replace(job.planner, dense=dense)
    return msgspec.structs.replace(job, planner=planner)
