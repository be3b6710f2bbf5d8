"""What helps where not even the smallest batch fits: every way out is tried before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwright.core.errors import InputError
from shardwright.core.fit import Estimate, Remedy
from shardwright.core.job import Job, memory_of, parallel_of
from shardwright.core.memory_section import MemorySection
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
    for key, value in _memory_keys(memory_of(job)):
        yield (f"memory.{key} = {value}",), changed_job(job, "memory", **{key: value})
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


def _memory_keys(section: MemorySection) -> Iterator[tuple[str, str]]:
    """Keys of ``[memory]`` that make a step smaller, and their values."""
    if section.runtime == "ddp":
        yield "runtime", "fsdp2"
    if section.checkpointing != "full":
        yield "checkpointing", "full"
    if section.loss == "gathered":
        yield "loss", "chunked"
    if smaller := OPTIMIZERS[section.optimizer].smaller:
        yield "optimizer", smaller
    if section.offload == "none":
        yield "offload", "states"
    if section.offload != "all":
        yield "offload", "all"
    if section.reduce_dtype == "fp32" and section.param_dtype != "fp32":
        yield "reduce_dtype", section.param_dtype


def _together(job: Job, found: list[Remedy]) -> Way:
    """All changes of ``[memory]`` that helped; the later of two values of a key."""
    helped = {change for remedy in found for change in remedy.changes}
    keys = {
        key: value
        for key, value in _memory_keys(memory_of(job))
        if f"memory.{key} = {value}" in helped
    }
    changes = tuple(f"memory.{key} = {value}" for key, value in keys.items())
    return changes, changed_job(job, "memory", **keys)
