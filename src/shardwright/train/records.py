"""What every rank's record says, as one measurement of the run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.measurement import Curve, Measurement, Quality, Record, Saved, Straggler
from shardwright.core.profile import stages_of
from shardwright.core.timeline import encode
from shardwright.job.plan import Plan

CURVE_POINTS = 500
LATE = 0.2  # of a step: a rank that is busy for so much longer than others is a straggler


def merge(
    plan: Plan,
    records: Sequence[Record],
    quality: Quality | None = None,
    validation: Quality | None = None,
) -> Measurement:
    """One measurement from every rank's record, in their order."""
    first = records[0]
    steps = max((*first.memory_steps, *first.time_steps), default=len(first.losses))
    slowest = max(record.seconds_per_step for record in records)
    samples = plan.job.batch.size * plan.world_size
    return Measurement(
        schema="shardwright.measurement/1",
        plan_fingerprint=plan.fingerprint,
        world_size=plan.world_size,
        steps=steps,
        memory_steps=first.memory_steps,
        time_steps=first.time_steps,
        timeline=encode([event for record in records for event in record.events]),
        curve=_curve([record.losses for record in records], steps),
        quality=quality,
        validation=validation or UNSET,
        scores=first.scores or UNSET,
        samples_per_second=samples / slowest if slowest else 0.0,
        bad_rows=sum(record.bad_rows for record in records),
        versions=first.versions,
        machine=first.machine,
        skipped=first.skipped,
        straggler=_straggler(records),
        profile=stages_of([record.profile for record in records]) or UNSET,
        saved=_saved([record.saved for record in records if record.saved is not UNSET]),
    )


def _straggler(records: Sequence[Record]) -> Straggler | UnsetType:
    """The rank that is busiest, if that costs the others a good part of a step."""
    slowest = max(records, key=lambda record: record.busy_seconds)
    others = [record.busy_seconds for record in records if record is not slowest]
    if not others:
        return UNSET
    usual = statistics.median(others)
    if slowest.busy_seconds - usual < LATE * slowest.seconds_per_step:
        return UNSET
    return Straggler(slowest.rank, slowest.busy_seconds, usual)


def _saved(of_ranks: Sequence[Saved]) -> Saved | UnsetType:
    """Of all ranks together: all bytes, and the seconds of the slowest."""
    if not of_ranks:
        return UNSET
    return msgspec.structs.replace(
        of_ranks[0],
        nbytes=sum(own.nbytes for own in of_ranks),
        stall_seconds=max(own.stall_seconds for own in of_ranks),
        seconds=max(own.seconds for own in of_ranks),
    )


def _curve(losses: Sequence[Sequence[float]], steps: int) -> Curve:
    """The mean over ranks, in so many points; nothing where steps have no loss."""
    if any(len(own) != steps for own in losses):
        return Curve()
    means = [sum(values) / len(values) for values in zip(*losses, strict=True)]
    stride = max(1, steps // CURVE_POINTS)
    kept = range(stride - 1, steps, stride)
    return Curve(
        tuple(k + 1 for k in kept),
        tuple(sum(means[k - stride + 1 : k + 1]) / stride for k in kept),
    )
