"""Variants of a job, and what each asks of its fullest rank. Every variant is estimated once.

A trace takes most of the time of an estimate of a module of the user's own. Where two batches left
the same pieces, with numbers between which those of a third lie on a line of whole numbers, the
third is not traced. What an answer rests on is traced all the same, and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from shardwright.core.cluster import MAX_PLANNED
from shardwright.core.document import to_kind
from shardwright.core.errors import NoPlanError
from shardwright.core.footprint import Estimate, Footprint
from shardwright.core.llama import MAX_WORLD
from shardwright.core.quantities import counted
from shardwright.core.recording import Recording
from shardwright.estimate.fit.search import Limits, Point
from shardwright.estimate.with_tables import Paths, Recorded
from shardwright.job.job import (
    Job,
    checkpointing_of,
    degrees_of,
    memory_of,
    parallel_of,
)
from shardwright.job.model_of_job import is_planned
from shardwright.planner.variation import changed

# A policy that keeps less stands further down; a job's own other one comes first. Kinds that are
# only planned have none.
POLICIES = ("none", "core_attention", "selective", "full")
AS_PLANNED = "as planned"  # where a plan chooses the policy
MOST_SAMPLES = 2**16  # per rank and step
MOST_TOKENS = 2**22  # per sample
ROUND = 128  # sequences are looked at in steps of up to so many tokens

Footprints = Callable[[Job], Footprint]
Family = tuple[bytes, Paths | None]  # a job whatever its batch, and what of it is routed


class Variants:
    """Variants of a ``job``, which is the first of them, with the estimate of each that was made;
    ``progress`` gets a line about each further one before it is made."""

    def __init__(self, job: Job, footprints: Footprints, progress: Callable[[str], None]) -> None:
        self.footprints = footprints
        self._progress = progress
        self._known: dict[bytes, Estimate] = {}
        self.first = footprints(job)
        self._known[msgspec.msgpack.encode(job)] = estimate_of(self.first)

    @property
    def count(self) -> int:
        """How many estimates were made."""
        return len(self._known)

    def estimate(self, job: Job, what: str = "") -> Estimate:
        """What a variant asks of the rank that needs most; one of a byte too much where it has to
        be planned and cannot be. ``what`` is changed, where it is not a size."""
        key = msgspec.msgpack.encode(job)
        if key not in self._known:
            self._begin(job, what)
            # No plan, no footprint: a search only needs to know that it is too large, and by how
            # much nobody can say. The job itself is told properly, by an error.
            try:
                found = estimate_of(self.footprints(job))
            except NoPlanError:
                most = (self.first.capacity or 0) + 1
                found = Estimate(most, "", "no plan fits", most, most, "does not fit", {})
            self._known[key] = found
        return self._known[key]

    def _begin(self, job: Job, what: str = "") -> None:
        ranks = job.cluster.world_size
        on = f" on {counted(ranks, 'rank')}" if ranks else ""
        size = f"{job.batch.size} x {job.batch.sequence}{on}, checkpointing {own_policy(job)}"
        self._progress(f"estimate {self.count + 1}: {what or size}")


def estimate_of(footprint: Footprint) -> Estimate:
    """A footprint's fullest class in short; the verdict is of all."""
    fullest = max(footprint.ranks, key=lambda rank: footprint.needs(rank)[1])
    least = max(footprint.needs(rank)[0] for rank in footprint.ranks)
    time = footprint.time
    return Estimate(
        peak_bytes=fullest.peak_bytes,
        peak_phase=fullest.peak_phase,
        rank_class=fullest.name,
        least_bytes=least,
        most_bytes=footprint.needs(fullest)[1],
        verdict=footprint.verdict,
        by_category=fullest.by_category,
        step_seconds=time.seconds if time else UNSET,
        mfu=time.mfu if time else UNSET,
        device_tokens_per_second=time.tokens_per_second / time.devices if time else UNSET,
    )


def point_of(job: Job, world_size: int) -> Point:
    """Where a job stands among its variants."""
    shards = degrees_of(job, world_size).data_shard
    return Point(job.batch.size, job.batch.sequence, shards, own_policy(job))


def own_policy(job: Job) -> str:
    """The checkpointing that a job asks for, or that its plan is left to choose."""
    is_open = is_planned(job) and len(checkpointing_of(job)) > 1
    return AS_PLANNED if is_open else memory_of(job).policy


def at(job: Job, point: Point, world_size: int) -> Job:
    """The job with a point's sizes, on as many ranks as these make."""
    here = degrees_of(job, world_size).data_shard
    world = world_size // here * point.shards
    # A policy stands in two keys, of which plans read one and estimates of other runtimes the
    # other.
    keys: dict[str, Any] = {"batch.size": point.batch, "batch.sequence": point.sequence}
    if own_policy(job) != point.policy:
        keys["memory.checkpointing"] = point.policy
        keys["planner.dense.checkpointing"] = (point.policy,)
    if parallel_of(job).data_shard != -1:
        keys["parallel.data_shard"] = point.shards
    return on_ranks(changed(job, keys), world)


def on_ranks(job: Job, world_size: int) -> Job:
    """The job on another number of ranks; its ranks per host go where they do not divide it."""
    local = job.cluster.local_world_size
    kept = local if local and (world_size <= local or world_size % local == 0) else None
    keys = {"cluster.world_size": world_size, "cluster.local_world_size": kept}
    return changed(job, keys)


def limits_of(job: Job, world_size: int) -> Limits:
    """Which variants of a job there are."""
    degrees, section = degrees_of(job, world_size), parallel_of(job)
    own = own_policy(job)
    planned = is_planned(job)
    known = POLICIES if job.model.traits.is_estimated else ()
    others = degrees.world_size // degrees.data_shard
    group = degrees.context * degrees.tensor
    stream = 2 * group if degrees.context > 1 else group
    return Limits(
        policies=known if own in known else (own, *known),
        batch_step=section.microbatches or 1,
        batch_limit=MOST_SAMPLES,
        sequence_step=math.lcm(math.gcd(job.batch.sequence, ROUND), stream),
        sequence_limit=MOST_TOKENS if job.batch.sequence > 1 else 0,
        shard_step=degrees.expert // math.gcd(degrees.expert, group),
        shard_limit=(MAX_PLANNED if planned else MAX_WORLD) // others,
        steady=not planned,
    )


class UnevenError(Exception):
    """Two recordings do not say of a third what it is."""


class Scaled:
    """``record`` with fewer traces: ``made`` are those of each family by the size of the batch,
    ``drawn`` what was found without one, with its job."""

    def __init__(self, record: Recorded) -> None:
        self.record = record
        self.made: dict[Family, dict[int, Recording]] = {}
        self.drawn: dict[Family, dict[int, tuple[Job, Recording]]] = {}

    def __call__(self, job: Job, routed: Paths | None = ()) -> Recording:
        """The step of a job, as ``record`` gives it."""
        size = job.batch.size
        family = msgspec.json.encode(changed(job, {"batch.size": 1})), routed
        made, drawn = (known.setdefault(family, {}) for known in (self.made, self.drawn))
        # Two traces are made first, for with one there is no line. Only a user's own function takes
        # long to trace.
        if job.model.traits.is_function and size not in made and len(made) > 1:
            try:
                found = drawn_between(made, size)
                drawn[size] = job, found
                return found
            except UnevenError:
                pass
        if size not in made:
            made[size] = self.record(job, routed)
        return made[size]

    def agree(self, sizes: Collection[int]) -> bool:
        """Whether what was drawn for batches of these ``sizes`` is what a trace gives."""
        return all(
            self.record(job, routed) == found
            for (_, routed), its in self.drawn.items()
            for size, (job, found) in its.items()
            if size in sizes
        )


def drawn_between(made: Mapping[int, Recording], size: int) -> Recording:
    """What lies on the line through the smallest and the largest batch that were recorded;
    UnevenError where there is none."""
    near, far = min(made), max(made)
    ends = (msgspec.to_builtins(made[each]) for each in (near, far))
    found = _on_line(*ends, size - near, far - near)
    return to_kind(found, Recording)


def _on_line(near: Any, far: Any, part: int, whole: int) -> Any:
    """``near`` and ``part`` of ``whole`` of the way to ``far``, number by number."""
    if type(near) is not type(far):
        raise UnevenError
    if isinstance(near, list | tuple) and len(near) == len(far):
        return [_on_line(*pair, part, whole) for pair in zip(near, far, strict=True)]
    if isinstance(near, dict) and near.keys() == far.keys():
        return {key: _on_line(near[key], far[key], part, whole) for key in near}
    if near == far:
        return near
    # Names, kinds and rates do not lie on a line: what differs in them between two batches is
    # another step.
    if type(near) is not int:
        raise UnevenError
    way, rest = divmod((far - near) * part, whole)
    # Whole numbers only: a number of bytes between two would be a guess, and this is to be what a
    # trace gives.
    if rest or near + way < 0:
        raise UnevenError
    return near + way
