"""What helps where not even the smallest batch fits: every way out is tried before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardwright.core.errors import InputError
from shardwright.core.fit import Estimate, Remedy
from shardwright.core.job import Job, memory_of, parallel_of
from shardwright.core.model_section import MEMORY_ONLY
from shardwright.core.optimizers import OPTIMIZERS
from shardwright.lab.fit.variants import changed_job, on_ranks

WORTH = 0.99  # of what was needed: a way out that leaves more is not worth naming
TENSOR = (2, 4, 8)  # degrees that fit inside a host

Way = tuple[tuple[str, ...], Job]


def remedies(
    estimate: Callable[[Job], Estimate], job: Job, world_size: int, shards: int | None
) -> tuple[Remedy, ...]:
    """Single changes that make ``job`` smaller, those that fit first; where none of them fits, all
    that concern memory alone together. ``shards`` is a degree of data sharding that fits, 0 or
    None where there is none."""
    needs = estimate(job).most_bytes
    found = []
    for changes, changed in _ways(job, world_size, shards):
        remedy = _tried(estimate, changes, changed)
        if remedy and remedy.estimate.most_bytes < WORTH * needs:
            found.append(remedy)
    if not any(remedy.estimate.verdict == "fits" for remedy in found):
        together = _tried(estimate, *_together(job, found))
        if together and len(together.changes) > 1:
            found.append(together)
    return tuple(sorted(found, key=_rank))


def _rank(remedy: Remedy) -> tuple[bool, int, int]:
    fits = remedy.estimate.verdict == "fits"
    return (not fits, len(remedy.changes), remedy.estimate.most_bytes)


def _tried(
    estimate: Callable[[Job], Estimate], changes: tuple[str, ...], job: Job
) -> Remedy | None:
    """What a way out comes to; None where this model or runtime cannot go it."""
    try:
        return Remedy(changes, estimate(job))
    except InputError:
        return None


def _ways(job: Job, world_size: int, shards: int | None) -> Iterator[Way]:
    for key in _memory_keys(job):
        yield (str(key),), key.set_in(job)
    section = parallel_of(job)
    if shards:
        fixed = section.data_shard != -1
        changed = changed_job(job, "parallel", data_shard=shards) if fixed else job
        others = section.data_replicate * section.tensor * section.pipeline * section.context
        world = others * shards
        yield (f"parallel.data_shard = {shards} ({world} ranks)",), on_ranks(changed, world)
    for tensor in TENSOR:
        if job.model.kind == "llama" and tensor > section.tensor:
            yield from _more_tensor(job, world_size, tensor)
    if job.batch.sequence > 1:
        half = job.batch.sequence // 2
        yield (f"batch.sequence = {half}",), changed_job(job, "batch", sequence=half)


def _more_tensor(job: Job, world_size: int, tensor: int) -> Iterator[Way]:
    """On the same ranks, of which fewer share the data."""
    section = parallel_of(job)
    others = section.data_replicate * section.pipeline * section.context
    if world_size % (others * tensor) == 0:
        shards = world_size // (others * tensor)
        changed = changed_job(job, "parallel", tensor=tensor, data_shard=shards)
        yield (
            (f"parallel.tensor = {tensor} (data_shard = {shards})",),
            on_ranks(changed, world_size),
        )


class _Key(NamedTuple):
    """A key of a job with another value."""

    section: str
    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.section}.{self.name} = {self.value}"

    def set_in(self, job: Job) -> Job:
        return changed_job(job, self.section, **{self.name: self.value})


def _memory_keys(job: Job) -> Iterator[_Key]:
    """Keys that change nothing but what a step keeps; steps that are planned have none of them."""
    if job.model.kind not in MEMORY_ONLY:
        return
    section = memory_of(job)
    if section.runtime == "ddp":
        yield _Key("memory", "runtime", "fsdp2")
    if section.checkpointing != "full":
        yield _Key("memory", "checkpointing", "full")
    if section.loss == "gathered":
        yield _Key("memory", "loss", "chunked")
    if smaller := OPTIMIZERS[job.train.optimizer].smaller:
        yield _Key("train", "optimizer", smaller)
    if section.offload == "none":
        yield _Key("memory", "offload", "states")
    if section.offload != "all":
        yield _Key("memory", "offload", "all")
    if section.reduce_dtype == "fp32" and section.param_dtype != "fp32":
        yield _Key("memory", "reduce_dtype", section.param_dtype)


def _together(job: Job, found: list[Remedy]) -> Way:
    """All changes of memory alone that helped; the later of two values of a key."""
    helped = {change for remedy in found for change in remedy.changes}
    keys = {(key.section, key.name): key for key in _memory_keys(job) if str(key) in helped}
    changed = job
    for key in keys.values():
        changed = key.set_in(changed)
    return tuple(str(key) for key in keys.values()), changed
