"""What of a job fits on its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from shardwright.core.errors import InputError, NoPlanError, expected
from shardwright.core.footprint import Fit
from shardwright.cost import constants
from shardwright.estimate.fit.remedies import remedies
from shardwright.estimate.fit.scaled import Scaled
from shardwright.estimate.fit.search import Findings, search
from shardwright.estimate.fit.variants import (
    Footprints,
    Variants,
    at,
    changed_job,
    point_of,
    space_of,
)
from shardwright.estimate.recordings import recorded
from shardwright.estimate.with_tables import Recorded
from shardwright.job.job import Job
from shardwright.job.model_of_job import is_planned
from shardwright.planner.search.watch import Hear

__all__ = ["fit"]


def fit(
    job: Job,
    footprints: Footprints | None = None,
    progress: Callable[[str], None] = lambda _: None,
    hear: Hear | None = None,
) -> Fit:
    """Search around a job; ``footprints`` estimates one, by default as ``shardwright memory`` does,
    and ``hear`` is then called in every round of a search.

    InputError where no capacity is known, before anything is estimated.
    """
    begun = time.perf_counter()
    if not is_planned(job) and not constants.says_capacity(job.cluster):
        raise InputError(
            expected(
                "job: cluster",
                "a capacity to fit into",
                "none",
                "Name one: --set cluster.preset=h100-8, or --set cluster.hbm_cap='80 GB'.",
            )
        )
    scaled = Scaled(recorded)
    exact = footprints or _footprints(hear, recorded)
    variants = Variants(footprints or _footprints(hear, scaled), progress)
    try:
        found = _searched(job, variants)
    except NoPlanError:
        _footprints(hear, scaled, ways=True)(job)  # raises it with what would help
        raise
    decisive = {row.largest_batch.size for row in found.rows}
    if not scaled.agree(decisive):
        variants = Variants(exact, progress)
        found = _searched(job, variants)
    variants.footprints = exact
    first = variants.first
    assert first is not None
    assert first.capacity is not None
    here, space = point_of(job, first.world_size), space_of(job, first.world_size)
    own = next(row for row in found.rows if row.checkpointing == here.policy)
    tried = ()
    if not own.largest_batch.size:
        small = changed_job(job, "batch", size=space.batch_step)
        tried = remedies(variants.estimate, small, first.world_size, found.shards)
    others = first.world_size // here.shards
    return Fit(
        model=first.model,
        capacity=first.capacity,
        batch=here.batch,
        sequence=here.sequence,
        world_size=first.world_size,
        checkpointing=here.policy,
        policies=found.rows,
        longest_sequence=found.sequence,
        fewest_ranks=None if found.shards is None else found.shards * others,
        remedies=tried,
        skipped=found.skipped,
        assumptions=first.assumptions,
        estimates=variants.estimates,
        seconds=time.perf_counter() - begun,
        dtype=first.settings.get("param_dtype", ""),
    )


def _searched(job: Job, variants: Variants) -> Findings:
    """All answers around a job, which is estimated first."""
    variants.estimate(job)
    first = variants.first
    assert first is not None
    assert first.capacity is not None
    return search(
        lambda point: variants.estimate(at(job, point, first.world_size)),
        point_of(job, first.world_size),
        space_of(job, first.world_size),
        first.capacity,
    )


def _footprints(hear: Hear | None, record: Recorded, *, ways: bool = False) -> Footprints:
    """``ways`` out of what does not fit take far longer than to see that: no variant has them."""
    from shardwright.estimate.footprint import footprint

    return partial(footprint, hear=hear, record=record, ways=ways)
