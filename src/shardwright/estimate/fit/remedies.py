"""Ways out for a job of which nothing fits: each is estimated before it is named."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

from msgspec import UNSET

from shardwright.core.errors import InputError
from shardwright.core.footprint import Estimate, Remedy
from shardwright.core.llama import LlamaShape
from shardwright.core.optimizers import OPTIMIZERS
from shardwright.core.placement import TwoZeros, Zero
from shardwright.estimate.fit.variants import changed_job, on_ranks
from shardwright.job.job import Job, memory_of, parallel_of
from shardwright.job.memory import OFFLOADS
from shardwright.job.model_of_job import unplanned

PAIRED = 5  # changes, those that help most, each with every other one
MOST_PAIRS = 6  # that are tried, the likeliest
PAIR_SECONDS = 30.0  # after so many no further pair is begun
WORTH = 0.99  # of what was needed: a way out that leaves more is not worth naming
DEGREES = {"tensor": (2, 4, 8), "pipeline": (2, 4, 8)}  # that are tried
OF_EXPERTS = (2, 4, 8)  # of a module of one's own
SHARED = "data_shard"  # how a degree says over how many ranks data is still shared
TIMES = (2, 4, 8, 16, 32)  # as many ranks, where nothing fits on those there are

Way = tuple[tuple[str, ...], Job]
Estimates = Callable[[Job], Estimate]


def remedies(
    estimate: Estimates, job: Job, world_size: int, shards: int | None
) -> tuple[Remedy, ...]:
    """Single changes that make ``job`` smaller, those that fit first. Where none fits, pairs
    of those that help most, and all that concern memory alone together; where none of these does,
    or no number of ranks that only shares data, other degrees on more ranks. None is named that the
    job's runtime does not run. ``shards`` is a degree of data sharding that fits, 0 where there is
    none, None where it cannot be chosen.
    """
    needs = estimate(job).most_bytes
    found = []
    for changes, changed in _ways(job, world_size, shards):
        remedy = _tried(estimate, changes, changed) if _runs(job, changed) else None
        if remedy and remedy.estimate.most_bytes < WORTH * needs:
            found.append(remedy)
    together = _together(job, found)
    if not _fits(found):
        pairs = _pairs(estimate, job, found, world_size)
        found += pairs
        if len(together[0]) > 1 and set(together[0]) not in [set(each.changes) for each in pairs]:
            joined = _tried(estimate, *together)
            found += [joined] if joined else []
    for base in (((), job), together):
        if shards == 0 or not _fits(found):
            found += _on_more_ranks(estimate, base, world_size)
            shards = None
    return tuple(sorted(found, key=_rank))


def _fits(found: list[Remedy]) -> bool:
    return any(remedy.estimate.verdict == "fits" for remedy in found)


def _rank(remedy: Remedy) -> tuple[bool, int, int]:
    fits = remedy.estimate.verdict == "fits"
    return (not fits, len(remedy.changes), remedy.estimate.most_bytes)


def _tried(estimate: Estimates, changes: tuple[str, ...], job: Job) -> Remedy | None:
    """What a way out comes to; None where this model or runtime cannot go it."""
    try:
        return Remedy(changes, estimate(job))
    except InputError:
        return None


def _runs(job: Job, changed: Job) -> bool:
    """Whether the runtime of a job runs what is changed: ours runs what a plan follows."""
    if memory_of(job).runtime != "shardwright":
        return True
    before = {key for key, _, _ in unplanned(job)}
    return all(key in before for key, _, _ in unplanned(changed))


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
    for name, degree in _degrees(job):
        yield from _divided(job, world_size, name, degree)
    if job.batch.sequence > 1:
        half = job.batch.sequence // 2
        yield (f"batch.sequence = {half}",), changed_job(job, "batch", sequence=half)


def _degrees(job: Job) -> Iterator[tuple[str, int]]:
    """Larger degrees of a llama, by name; of experts all that there are. A module of the user's
    own has stages, and tensor and expert ranks where the job says how."""
    shape, section = job.model.shape, parallel_of(job)
    tried: dict[str, tuple[int, ...]] = {}
    if isinstance(shape, LlamaShape):
        tried = {"expert": (shape.experts,), **DEGREES}
    elif job.model.traits.is_function:
        styles = (section.parallelize_plan or {}).values()
        usable = ["expert"] * ("expert" in styles) + ["tensor"] * any(s != "expert" for s in styles)
        tried = {name: DEGREES.get(name, OF_EXPERTS) for name in (*usable, "pipeline")}
    for name, degrees in tried.items():
        yield from ((name, each) for each in degrees if each > getattr(section, name))


def _divided(job: Job, world_size: int, name: str, degree: int) -> Iterator[Way]:
    """So many ranks with another degree: fewer of them share the data; experts, which regroup
    those that do, are divided as far as that goes."""
    section = parallel_of(job)
    degrees = {key: getattr(section, key) for key in ("tensor", "pipeline", "context")}
    others = section.data_replicate * math.prod((degrees | {name: degree}).values())
    if name == "expert":
        others //= degree
        group = world_size // (others // section.context // section.tensor)
        degree = math.gcd(degree, group)
    if world_size % others or degree <= getattr(section, name):
        return
    shards = world_size // others
    changed = changed_job(job, "parallel", data_shard=shards, **{name: degree})
    text = f"parallel.{name} = {degree}"
    text += "" if name == "expert" else f" ({SHARED} = {shards})"
    yield (text,), on_ranks(changed, world_size)


def _on_more_ranks(estimate: Estimates, base: Way, world_size: int) -> Iterator[Remedy]:
    """Of every kind of degree the largest, on the first number of ranks on which a job fits; not
    further than it shrinks."""
    changes, job = base
    for name, degree in dict(_degrees(job)).items():
        least: int | None = None
        for times in TIMES:
            ways = _divided(job, times * world_size, name, degree)
            texts, changed = next(ways, ((), job))
            remedy = None
            if texts and _runs(job, changed):
                ranks = f"{times * world_size} ranks"
                remedy = _tried(estimate, (*changes, *texts, ranks), changed)
            if remedy is None or (least and remedy.estimate.most_bytes > WORTH * least):
                break
            least = remedy.estimate.most_bytes
            if remedy.estimate.verdict == "fits":
                yield remedy
                break


class _Key(NamedTuple):
    """A key of a job with another value."""

    section: str
    name: str
    value: str | Zero | TwoZeros

    def __str__(self) -> str:
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return f"{self.section}.{self.name} = {value}"

    def set_in(self, job: Job) -> Job:
        return changed_job(job, self.section, **{self.name: self.value})


def _pairs(estimate: Estimates, job: Job, found: list[Remedy], world_size: int) -> list[Remedy]:
    """Two changes at once, of what helped most of each key, the likeliest first: as if each took
    its share of what the other leaves."""
    best: dict[str, Remedy] = {}
    for remedy in sorted(found, key=lambda each: each.estimate.most_bytes):
        best.setdefault(_key_of(remedy.changes), remedy)
    likeliest = combinations(list(best.values())[:PAIRED], 2)
    pairs = sorted(likeliest, key=lambda two: math.prod(each.estimate.most_bytes for each in two))
    begun, tried = time.monotonic(), list[Remedy]()
    for first, second in pairs:
        way = _both(job, world_size, first.changes, second.changes)
        if way is None or not _runs(job, way[1]):
            continue
        if len(tried) == MOST_PAIRS or time.monotonic() - begun > PAIR_SECONDS:
            break
        remedy = _tried(estimate, *way)
        tried += [remedy] if remedy else []
    return tried


def _both(job: Job, world_size: int, first: tuple[str, ...], second: tuple[str, ...]) -> Way | None:
    """The second change after the first one, None where they cannot be had together. Of two degrees
    the later one says how far data is still shared."""
    changed = dict(_ways(job, world_size, None)).get(first)
    if changed is None:
        return None
    wanted = _value_of(second)
    for texts, both in _ways(changed, world_size, None):
        if _value_of(texts) == wanted:
            shared = SHARED in first[0] and SHARED in texts[0]
            return (_value_of(first) if shared else first[0], *texts), both
    return None


def _value_of(changes: tuple[str, ...]) -> str:
    """A single change without what follows from it."""
    return changes[0].split(" (")[0]


def _key_of(changes: tuple[str, ...]) -> str:
    return changes[0].split(" = ")[0]


def _memory_keys(job: Job) -> Iterator[_Key]:
    """Keys that change nothing but what a step keeps; steps that are always planned have of them
    what data ranks share."""
    section = memory_of(job)
    if job.model.traits.has_step and section.runtime == "shardwright":
        if section.zero in (1, 2):
            yield _Key("memory", "zero", 3)
        if section.zero in (1, 2, 3) and parallel_of(job).data_replicate > 1:
            yield _Key("memory", "zero", (2, 3))
    if not job.model.traits.is_estimated:
        return
    if section.runtime == "ddp":
        yield _Key("memory", "runtime", "fsdp2")
    if section.policy != "full":
        yield _Key("memory", "checkpointing", "full")
    if section.loss == "gathered":
        yield _Key("memory", "loss", "chunked")
    if smaller := OPTIMIZERS[job.train.optimizer].smaller:
        yield _Key("train", "optimizer", smaller)
    ways, _ = OFFLOADS[section.runtime]
    for way in ("states", "all"):
        if way in ways and section.offload in ("none", "states") and section.offload != way:
            yield _Key("memory", "offload", way)
    if section.param_dtype in (UNSET, "fp32"):
        yield _Key("memory", "param_dtype", "bf16")
    elif section.reduce_dtype == "fp32":
        yield _Key("memory", "reduce_dtype", section.param_dtype)


def _together(job: Job, found: list[Remedy]) -> Way:
    """All changes of memory alone that helped; the later of two values of a key."""
    helped = {change for remedy in found for change in remedy.changes}
    keys = {(key.section, key.name): key for key in _memory_keys(job) if str(key) in helped}
    changed = job
    for key in keys.values():
        changed = key.set_in(changed)
    return tuple(str(key) for key in keys.values()), changed
