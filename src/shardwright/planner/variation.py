"""The same job with one thing changed: what plans, ways out of a shortage, ``fit`` and why-not try.

All of them ask the same (does it fit, and how fast is it?) of a list of jobs that differ in a key
or two. What differs is how a list goes on: to the fastest of all, to the first that fits, or to the
border between what fits and what does not.
"""

# Plans are equal to the byte only as long as the order of a list stays: of jobs as fast as one
# another the first is taken, and a search with a time limit tries the first ones alone.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from shardwright.core.model import ModelSpec, TableSpec
from shardwright.core.placement import TwoZeros, Zero
from shardwright.job.job import Job, checkpointing_of, parallel_of
from shardwright.job.memory import MemorySection
from shardwright.job.parallel import ParallelSection

LEFT_OUT = {"memory": MemorySection(), "parallel": ParallelSection()}  # sections that may be unset

ModelOf = Callable[[Job], ModelSpec]


@dataclass(frozen=True, slots=True)
class Variation:
    """A job with something changed, which ``words`` say, mostly as a job file would.

    Where no key of a job says it, a ``table`` stands for the one of its name in the model.
    """

    job: Job
    words: str
    table: TableSpec | None = None

    def with_table(self, model: ModelSpec) -> ModelSpec:
        """The model of the job as it is varied."""
        if self.table is None:
            return model
        tables = (self.table if t.name == self.table.name else t for t in model.tables)
        return msgspec.structs.replace(model, tables=tuple(tables))


def changed(job: Job, keys: Mapping[str, Any]) -> Job:
    """The job with other values of keys, by their names in a job file: ``{"memory.zero": 3}``."""
    for key, value in keys.items():
        job = _with(job, key.split("."), value)
    return job


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if rest:
        inner = getattr(section, name)
        value = _with(LEFT_OUT[name] if inner is UNSET else inner, rest, value)
    return msgspec.structs.replace(section, **{name: value})


def shared(job: Job, zero: Zero | TwoZeros, replicas: int = 1, bucket_size: int = 0) -> Job:
    """The job at a stage of ZeRO, or one for replicas and one for shards; over so many replicas; in
    buckets of so many elements, 0 where units are modules."""
    keys: dict[str, Any] = {"memory.zero": zero, "planner.dense.bucket_size": bucket_size or UNSET}
    if replicas != parallel_of(job).data_replicate:
        keys |= {"parallel.data_replicate": replicas, "parallel.data_shard": -1}
    return changed(job, keys)


def checkpointed(job: Job, policy: str) -> Job:
    """The job with a checkpointing policy, where it leaves several open."""
    if len(checkpointing_of(job)) == 1:
        return job
    return changed(job, {"planner.dense.checkpointing": (policy,)})


def as_recorded(job: Job) -> bytes:
    """The job as far as a recording depends on it: not on stages of ZeRO, on buckets, nor on which
    data ranks share."""
    keys = {"memory.zero": 3, "planner.dense.bucket_size": UNSET}
    keys |= {"parallel.data_replicate": 1, "parallel.data_shard": -1}
    return msgspec.json.encode(changed(job, keys))


def once(model_of: ModelOf) -> ModelOf:
    """``model_of`` that describes no job twice that is recorded alike."""
    known: dict[bytes, dict[int, ModelSpec]] = {}

    def described(job: Job) -> ModelSpec:
        by_size = known.setdefault(as_recorded(job), {})
        if not by_size:
            by_size[0] = model_of(changed(job, {"planner.dense.bucket_size": UNSET}))
        size = job.planner.dense.bucket_size
        if isinstance(size, int) and size not in by_size:
            by_size[size] = msgspec.structs.replace(by_size[0], bucket_size=size)
        return by_size[size if isinstance(size, int) else 0]

    return described


def halved(
    fits: Callable[[int], bool],
    good: int,
    bad: int,
    *,
    enough: Callable[[int, int], bool] = lambda good, bad: abs(good - bad) <= 1,
) -> int:
    """The last number from ``good``, which fits, towards ``bad``, which does not, that was seen to
    fit, by halving what is between them until that is ``enough``."""
    while not enough(good, bad):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
