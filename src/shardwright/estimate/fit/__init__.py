"""What of a job fits on its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec

from shardwright.core.errors import InputError, NoPlanError, expected
from shardwright.core.footprint import Estimate, Fit, PolicyFit, Remedy
from shardwright.cost import constants
from shardwright.estimate.fit.remedies import remedies
from shardwright.estimate.fit.search import Point, by_policy, fewest_shards, longest_sequence
from shardwright.estimate.fit.variants import (
    Footprints,
    Scaled,
    Variants,
    at,
    limits_of,
    point_of,
)
from shardwright.estimate.recordings import recorded
from shardwright.estimate.with_tables import Recorded
from shardwright.job.job import Job
from shardwright.job.model_of_job import is_planned
from shardwright.planner.search.watch import Hear
from shardwright.planner.variation import changed
from shardwright.report.wording import largest_words, policy_words, range_text, verdict_sentence

__all__ = ["fit"]


def fit(
    job: Job,
    footprints: Footprints | None = None,
    progress: Callable[[str], None] = lambda _: None,
    hear: Hear | None = None,
    known: Callable[[str], None] = lambda _: None,
) -> Fit:
    """Search around a job; ``footprints`` estimates one, by default as ``shardwright memory`` does,
    and ``hear`` is then called in every round of a search. ``progress`` is told what is estimated
    next, ``known`` every answer as soon as there is one.

    InputError where no capacity is known, before anything is estimated.
    """
    begun = time.perf_counter()
    if not is_planned(job) and not constants.says_capacity(job.cluster):
        raise InputError(
            expected(
                "job: cluster",
                "a capacity to fit into",
                "none",
                "Name one: --on 8xH100, or --set cluster.hbm_cap='80 GB'.",
            )
        )
    scaled = Scaled(recorded)
    try:
        found, variants = _searched(job, footprints or _footprints(hear, scaled), progress, known)
    except NoPlanError:
        _footprints(hear, scaled, ways=True)(job)  # raises it with what would help
        raise
    exact = footprints or _footprints(hear, recorded)
    # What the answers rest on is traced after all. Where a line was wrong all questions are asked
    # again with traces alone, which is slow and right.
    if not scaled.agree({row.largest_batch.size for row in found.policies}):
        found, variants = _searched(job, exact, progress, known)
    variants.footprints = exact
    world, fewest = found.world_size, found.fewest_ranks
    tried: tuple[Remedy, ...] = ()
    if not found.own.largest_batch.size:
        small = changed(job, {"batch.size": limits_of(job, world).batch_step})
        shards = None if fewest is None else fewest * point_of(job, world).shards // world
        least = variants.estimate(small).most_bytes

        def estimate(job: Job, what: str) -> Estimate:
            its = variants.estimate(job, what)
            if what and its.most_bytes < least:
                needs = range_text(its.least_bytes, its.most_bytes)
                known(f"{what}: {needs}, {its.verdict}")
            return its

        tried = remedies(estimate, small, world, shards)
    return msgspec.structs.replace(
        found, remedies=tried, estimates=variants.count, seconds=time.perf_counter() - begun
    )


def _searched(
    job: Job,
    footprints: Footprints,
    progress: Callable[[str], None],
    known: Callable[[str], None],
) -> tuple[Fit, Variants]:
    """All answers around a job but the ways out, and the variants that were estimated for them."""
    variants = Variants(job, footprints, progress)
    first = variants.first
    verdict = verdict_sentence(first)
    known(f"As it is: {verdict[0].lower()}{verdict[1:]}")
    assert first.capacity is not None
    world = first.world_size
    here, limits = point_of(job, world), limits_of(job, world)

    def ask(point: Point) -> Estimate:
        return variants.estimate(at(job, point, world))

    def told(row: PolicyFit) -> None:
        largest = largest_words(row.largest_batch)
        known(f"Largest batch, checkpointing {policy_words(row.checkpointing)}: {largest}")

    rows, skipped = by_policy(ask, here, limits, first.capacity, told)
    longest = longest_sequence(ask, here, limits, first.capacity)
    if longest:
        known(f"Longest sequence with batch {here.batch}: {largest_words(longest)}")
    shards = fewest_shards(ask, here, limits, first.capacity)
    found = Fit(
        model=first.model,
        capacity=first.capacity,
        batch=here.batch,
        sequence=here.sequence,
        world_size=world,
        checkpointing=here.policy,
        policies=rows,
        longest_sequence=longest,
        fewest_ranks=None if shards is None else shards * (world // here.shards),
        skipped=skipped,
        assumptions=first.assumptions,
        dtype=first.settings.get("param_dtype", ""),
        reduce_dtype=first.settings.get("reduce_dtype", ""),
        time=first.time,
    )
    return found, variants


def _footprints(hear: Hear | None, record: Recorded, *, ways: bool = False) -> Footprints:
    """``ways`` out of what does not fit take far longer than to see that: no variant has them."""
    from shardwright.estimate.footprint import footprint

    return partial(footprint, hear=hear, record=record, ways=ways)
