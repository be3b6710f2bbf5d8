"""Ways out for a job of which nothing fits: each is estimated before it is named."""

# Every way is a key of the job with another value, applied and estimated like any other job. Pairs
# multiply, so only those of what helped most are tried, the likeliest first, for some time.

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.errors import InputError
from shardwright.core.footprint import Estimate, Remedy
from shardwright.core.llama import LlamaShape
from shardwright.core.optimizers import OPTIMIZERS
from shardwright.core.quantities import counted
from shardwright.estimate.fit.variants import on_ranks
from shardwright.job.job import Job, memory_of, parallel_of
from shardwright.job.memory import OFFLOADS
from shardwright.job.model_of_job import unplanned
from shardwright.planner.variation import Variation, changed

PAIRED = 5  # changes, those that help most, each with every other one
MOST_PAIRS = 6  # that are tried, the likeliest
PAIR_SECONDS = 30.0  # after so many no further pair is begun
WORTH = 0.99  # of what was needed: a way out that leaves more is not worth naming
DEGREES = {"tensor": (2, 4, 8), "pipeline": (2, 4, 8)}  # that are tried
OF_EXPERTS = (2, 4, 8)  # of a module of one's own
SHARED = "data_shard"  # how a degree says over how many ranks data is still shared
TIMES = (2, 4, 8, 16, 32)  # as many ranks, where nothing fits on those there are

Estimates = Callable[[Job, str], Estimate]  # of a job, and what of it was changed


def remedies(
    estimate: Estimates, job: Job, world_size: int, shards: int | None
) -> tuple[Remedy, ...]:
    """Single changes that make ``job`` smaller, those that fit first, the cheapest of them. Where
    none fits, pairs of those that help most, and all that concern memory alone together; where none
    of these does, or no number of ranks that only shares data, other degrees on more ranks. None is
    named that the job's runtime does not run. ``shards`` is a degree of data sharding that fits, 0
    where there is none, None where it cannot be chosen.
    """
    its = estimate(job, "")
    needs, rate = its.most_bytes, its.device_tokens_per_second
    found = []
    for way in _ways(job, world_size, shards):
        remedy = _tried(estimate, (way.words,), way.job) if _runs(job, way.job) else None
        if remedy and remedy.estimate.most_bytes < WORTH * needs:
            found.append(remedy)
    # All keys of memory at once: one estimate more, for where no pair is enough.
    words, joined = _together(job, found)
    if not _fits(found):
        pairs = _pairs(estimate, job, found, world_size)
        found += pairs
        if len(words) > 1 and set(words) not in [set(each.changes) for each in pairs]:
            remedy = _tried(estimate, words, joined)
            found += [remedy] if remedy else []
    for changes, way_out in (((), job), (words, joined)):
        if shards == 0 or not _fits(found):
            found += _on_more_ranks(estimate, changes, way_out, world_size)
            shards = None

    return tuple(sorted((_timed(each, rate) for each in found), key=_order))


def _order(remedy: Remedy) -> tuple[bool, int, float, int]:
    """What fits first, of it single changes, the cheapest, by seconds where they are known."""
    fits = remedy.estimate.verdict == "fits"
    seconds = remedy.longer if fits and remedy.longer is not UNSET else 0.0
    return not fits, len(remedy.changes), seconds, remedy.estimate.most_bytes


def _timed(remedy: Remedy, rate: float | UnsetType) -> Remedy:
    """With what it costs beside tokens of a device at a ``rate``, where that is known."""
    own = remedy.estimate.device_tokens_per_second
    return msgspec.structs.replace(remedy, longer=rate / own - 1) if rate and own else remedy


def _fits(found: list[Remedy]) -> bool:
    return any(remedy.estimate.verdict == "fits" for remedy in found)


def _tried(estimate: Estimates, changes: tuple[str, ...], job: Job) -> Remedy | None:
    """What a way out comes to; None where this model or runtime cannot go it."""
    try:
        return Remedy(changes, estimate(job, " and ".join(changes)))
    except InputError:
        return None


def _runs(job: Job, variation: Job) -> bool:
    """Whether the runtime of a job runs what is changed: ours runs what a plan follows."""
    if memory_of(job).runtime != "shardwright":
        return True
    before = {key for key, _, _ in unplanned(job)}
    return all(key in before for key, _, _ in unplanned(variation))


def _ways(job: Job, world_size: int, shards: int | None) -> Iterator[Variation]:
    for key, value in _memory_keys(job):
        yield Variation(changed(job, {key: value}), _said(key, value))
    section = parallel_of(job)
    if shards:
        fixed = section.data_shard != -1
        its = changed(job, {"parallel.data_shard": shards} if fixed else {})
        others = section.data_replicate * section.tensor * section.pipeline * section.context
        world = others * shards
        yield Variation(
            on_ranks(its, world), f"parallel.data_shard = {shards} ({counted(world, 'rank')})"
        )
    for name, degree in _degrees(job):
        yield from _divided(job, world_size, name, degree)
    if job.batch.sequence > 1:
        half = job.batch.sequence // 2
        yield Variation(changed(job, {"batch.sequence": half}), _said("batch.sequence", half))


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


def _divided(job: Job, world_size: int, name: str, degree: int) -> Iterator[Variation]:
    """So many ranks with another degree: fewer of them share the data; experts, which regroup
    those that do, are divided as far as that goes."""
    section = parallel_of(job)
    degrees = {key: getattr(section, key) for key in ("tensor", "pipeline", "context")}
    others = section.data_replicate * math.prod((degrees | {name: degree}).values())
    # Experts regroup ranks that share data, so their degree takes no ranks of its own: it divides
    # the group as far as that goes.
    if name == "expert":
        others //= degree
        group = world_size // (others // section.context // section.tensor)
        degree = math.gcd(degree, group)
    if world_size % others or degree <= getattr(section, name):
        return
    shards = world_size // others
    its = changed(job, {"parallel.data_shard": shards, f"parallel.{name}": degree})
    shared = "" if name == "expert" else f" ({SHARED} = {shards})"
    yield Variation(on_ranks(its, world_size), f"parallel.{name} = {degree}{shared}")


def _on_more_ranks(
    estimate: Estimates, changes: tuple[str, ...], job: Job, world_size: int
) -> Iterator[Remedy]:
    """Of every kind of degree the largest, on the first number of ranks on which a job, which has
    ``changes`` already, fits; not further than it shrinks."""
    for name, degree in dict(_degrees(job)).items():
        least: int | None = None
        for times in TIMES:
            way = next(_divided(job, times * world_size, name, degree), None)
            remedy = None
            if way and _runs(job, way.job):
                words = (*changes, way.words, f"{times * world_size} ranks")
                remedy = _tried(estimate, words, way.job)
            # More ranks that no longer make it smaller will not make it fit: what is left does not
            # go down with them.
            if remedy is None or (least and remedy.estimate.most_bytes > WORTH * least):
                break
            least = remedy.estimate.most_bytes
            if remedy.estimate.verdict == "fits":
                yield remedy
                break


def _pairs(estimate: Estimates, job: Job, found: list[Remedy], world_size: int) -> list[Remedy]:
    """Two changes at once, of what helped most of each key, the likeliest first: as if each took
    its share of what the other leaves."""
    best: dict[str, Remedy] = {}
    for remedy in sorted(found, key=lambda each: each.estimate.most_bytes):
        # Of one key the best value alone, for two values of it cannot be had together.
        best.setdefault(remedy.changes[0].split(" = ")[0], remedy)
    likeliest = combinations(list(best.values())[:PAIRED], 2)
    pairs = sorted(likeliest, key=lambda two: math.prod(each.estimate.most_bytes for each in two))
    begun, tried = time.monotonic(), list[Remedy]()
    for first, second in pairs:
        way = _both(job, world_size, first.changes[0], second.changes[0])
        if way is None or not _runs(job, way[1]):
            continue
        if len(tried) == MOST_PAIRS or time.monotonic() - begun > PAIR_SECONDS:
            break
        both = _tried(estimate, *way)
        tried += [both] if both else []
    return tried


def _both(job: Job, world_size: int, first: str, second: str) -> tuple[tuple[str, str], Job] | None:
    """The second change after the first one, None where they cannot be had together. Of two degrees
    the later one says how far data is still shared."""
    own = next((way.job for way in _ways(job, world_size, None) if way.words == first), None)
    for way in _ways(own, world_size, None) if own else ():
        if _value_of(way.words) == _value_of(second):
            shared = SHARED in first and SHARED in way.words
            return (_value_of(first) if shared else first, way.words), way.job
    return None


def _value_of(words: str) -> str:
    """A change without what follows from it."""
    return words.split(" (")[0]


def _said(key: str, value: Any) -> str:
    return f"{key} = {list(value) if isinstance(value, tuple) else value}"


def _memory_keys(job: Job) -> Iterator[tuple[str, Any]]:
    """Keys that change nothing but what a step keeps; steps that are always planned have of them
    what data ranks share."""
    section = memory_of(job)
    if job.model.traits.has_step and section.runtime == "shardwright":
        if section.zero in (1, 2):
            yield "memory.zero", 3
        if section.zero in (1, 2, 3) and parallel_of(job).data_replicate > 1:
            yield "memory.zero", (2, 3)
    if not job.model.traits.is_estimated:
        return
    if section.runtime == "ddp":
        yield "memory.runtime", "fsdp2"
    if section.policy != "full":
        yield "memory.checkpointing", "full"
    if section.loss == "gathered":
        yield "memory.loss", "chunked"
    if smaller := OPTIMIZERS[job.train.optimizer].smaller:
        yield "train.optimizer", smaller
    ways, _ = OFFLOADS[section.runtime]
    for way in ("states", "all"):
        if way in ways and section.offload in ("none", "states") and section.offload != way:
            yield "memory.offload", way
    if section.param_dtype in (UNSET, "fp32"):
        yield "memory.param_dtype", "bf16"
    elif section.reduce_dtype == "fp32":
        yield "memory.reduce_dtype", section.param_dtype


def _together(job: Job, found: list[Remedy]) -> tuple[tuple[str, ...], Job]:
    """All changes of memory alone that helped; the later of two values of a key."""
    helped = {words for remedy in found for words in remedy.changes}
    keys = {key: value for key, value in _memory_keys(job) if _said(key, value) in helped}
    return tuple(_said(key, value) for key, value in keys.items()), changed(job, keys)
