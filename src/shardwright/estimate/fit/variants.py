"""Variants of a job, and what each asks of its fullest rank. Every variant is estimated once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from shardwright.core.cluster import MAX_PLANNED
from shardwright.core.errors import NoPlanError
from shardwright.core.footprint import Estimate, Footprint
from shardwright.estimate.fit.search import Point, Space
from shardwright.job.job import (
    Job,
    checkpointing_of,
    degrees_of,
    memory_of,
    parallel_of,
    with_checkpointing,
    with_memory,
)
from shardwright.job.model_of_job import is_planned
from shardwright.job.parallel import MAX_WORLD
from shardwright.report.wording import counted

# A policy that keeps less stands further down; a job's own other one comes first. Kinds that are
# only planned have none.
POLICIES = ("none", "core_attention", "selective", "full")
AS_PLANNED = "as planned"  # where a plan chooses the policy
MOST_SAMPLES = 2**16  # per rank and step
MOST_TOKENS = 2**22  # per sample
ROUND = 128  # sequences are looked at in steps of up to so many tokens

Footprints = Callable[[Job], Footprint]


class Variants:
    """``footprints`` with a memory; ``progress`` gets a line about each new estimate."""

    def __init__(self, footprints: Footprints, progress: Callable[[str], None]) -> None:
        self.footprints = footprints
        self._progress = progress
        self._known: dict[bytes, Estimate] = {}
        self.estimates = 0
        self.first: Footprint | None = None

    def estimate(self, job: Job) -> Estimate:
        """What a job asks of the rank that needs most."""
        key = msgspec.msgpack.encode(job)
        if key not in self._known:
            begun = time.perf_counter()
            self._known[key] = self._made(job)
            self.estimates += 1
            batch, policy = job.batch, own_policy(job)
            self._progress(
                f"{counted(self.estimates, 'estimate')}; {batch.size} x {batch.sequence} on "
                f"{job.cluster.world_size or self.world_size} ranks, checkpointing {policy}: "
                f"{time.perf_counter() - begun:.1f} s"
            )
        return self._known[key]

    @property
    def world_size(self) -> int:
        """Ranks of the job itself."""
        return self.first.world_size if self.first else 0

    def _made(self, job: Job) -> Estimate:
        """The estimate; of what has to be planned and cannot be, one that is a byte too large."""
        if self.first is None:
            self.first = self.footprints(job)
            return estimate_of(self.first)
        try:
            return estimate_of(self.footprints(job))
        except NoPlanError:
            most = (self.first.capacity or 0) + 1
            return Estimate(most, "", "no plan fits", most, most, "does not fit", {})


def estimate_of(footprint: Footprint) -> Estimate:
    """A footprint's fullest class in short; the verdict is of all."""
    fullest = max(footprint.ranks, key=lambda rank: footprint.needs(rank)[1])
    least = max(footprint.needs(rank)[0] for rank in footprint.ranks)
    return Estimate(
        peak_bytes=fullest.peak_bytes,
        peak_phase=fullest.peak_phase,
        rank_class=fullest.name,
        least_bytes=least,
        most_bytes=footprint.needs(fullest)[1],
        verdict=footprint.verdict,
        by_category=fullest.by_category,
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
    changed = changed_job(job, "batch", size=point.batch, sequence=point.sequence)
    if own_policy(job) != point.policy:
        changed = changed_job(changed, "memory", checkpointing=point.policy)
        changed = with_checkpointing(changed, point.policy)
    if parallel_of(job).data_shard != -1:
        changed = changed_job(changed, "parallel", data_shard=point.shards)
    return on_ranks(changed, world)


def on_ranks(job: Job, world_size: int) -> Job:
    """The job on another number of ranks; its ranks per host go where they do not divide it."""
    local = job.cluster.local_world_size
    kept = local if local and (world_size <= local or world_size % local == 0) else None
    return changed_job(job, "cluster", world_size=world_size, local_world_size=kept)


def changed_job(job: Job, section: str, **keys: Any) -> Job:
    """The job with other values in a section."""
    if section == "memory":
        return with_memory(job, **keys)
    old = parallel_of(job) if section == "parallel" else getattr(job, section)
    return msgspec.structs.replace(job, **{section: msgspec.structs.replace(old, **keys)})


def space_of(job: Job, world_size: int) -> Space:
    """Which variants of a job there are."""
    degrees, section = degrees_of(job, world_size), parallel_of(job)
    own = own_policy(job)
    planned = is_planned(job)
    known = POLICIES if job.model.traits.is_estimated else ()
    others = degrees.world_size // degrees.data_shard
    group = degrees.context * degrees.tensor
    stream = 2 * group if degrees.context > 1 else group
    return Space(
        policies=known if own in known else (own, *known),
        batch_step=section.microbatches or 1,
        batch_limit=MOST_SAMPLES,
        sequence_step=math.lcm(math.gcd(job.batch.sequence, ROUND), stream),
        sequence_limit=MOST_TOKENS if job.batch.sequence > 1 else 0,
        shard_step=degrees.expert // math.gcd(degrees.expert, group),
        shard_limit=(MAX_PLANNED if planned else MAX_WORLD) // others,
        steady=not planned,
    )
