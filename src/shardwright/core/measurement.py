"""What a run measured, what of it one rank leaves behind, and predicted beside measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.document import Shown, read_document, write_document
from shardwright.core.errors import check_type
from shardwright.core.profile import RankProfile, Stage, stages_of
from shardwright.core.scores import Scores
from shardwright.core.timeline import Event, EventRun, check_runs, encode
from shardwright.job.plan import Plan

RECORD_SCHEMA = "shardwright.record/1"
SCHEMA = "shardwright.measurement/1"
COMPARISON_SCHEMA = "shardwright.comparison/1"
CURVE_POINTS = 500
LATE = 0.2  # of a step: a rank that is busy for so much longer than others is a straggler


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Checkpoints that a run saved and failed to save, and what that took.

    ``nbytes`` of the newest, ``stall_seconds`` that training stood still for all of them, and
    ``seconds`` of the longest, files included. ``resumed`` are the steps after which earlier runs
    ended that this one goes on from.
    """

    count: int
    failed: int
    nbytes: int
    stall_seconds: float
    seconds: float
    resumed: tuple[int, ...] = ()


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's events, its own losses (mean over its batch, every step) and its throughput."""

    schema: Literal["shardwright.record/1"]
    plan_fingerprint: str
    rank: int
    events: tuple[Event, ...]
    losses: tuple[float, ...]
    seconds_per_step: float
    memory_steps: tuple[int, ...]
    time_steps: tuple[int, ...]
    bad_rows: int
    versions: dict[str, str]
    machine: dict[str, str]
    saved: Saved | UnsetType = UNSET
    skipped: int | UnsetType = UNSET  # steps that updated nothing
    busy_seconds: float = 0.0  # of a step, without waits for other ranks
    profile: tuple[RankProfile, ...] = ()
    scores: tuple[Scores, ...] = ()  # while it trained, of all ranks


class Straggler(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank that the others waited for: its own ``seconds`` per step, and the median of theirs."""

    rank: int
    seconds: float
    others: float


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Training loss by step: the global batch's mean, every step that was kept."""

    steps: tuple[int, ...] = ()
    loss: tuple[float, ...] = ()


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Held-out quality, beside the best possible where the law behind the rows is known.

    Of text, ``rows`` are tokens, ``log_loss`` is in nats per token and there is nothing else;
    clicks of one kind have no AUC and no normalized entropy either. ``majority`` is the accuracy
    of the commoner label everywhere, ``normalized_entropy`` the log loss over that of the share of
    clicks everywhere (below 1 something was learned), ``calibration`` predicted clicks over real
    ones.
    """

    rows: int
    auc: float | None
    log_loss: float
    best_auc: float | None = None
    best_log_loss: float | None = None
    bits_per_byte: float | None = None
    accuracy: float | None = None
    best_accuracy: float | None = None
    majority: float | None = None
    normalized_entropy: float | None = None
    calibration: float | None = None


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events of every rank, the loss curve, quality, and what it was measured with.

    Memory comes from ``memory_steps``, seconds (medians) from ``time_steps``: metering memory
    slows a step, so the two never share one.
    """

    schema: Literal["shardwright.measurement/1"]
    plan_fingerprint: str
    world_size: int
    steps: int
    memory_steps: tuple[int, ...]
    time_steps: tuple[int, ...]
    timeline: tuple[EventRun, ...]
    curve: Curve
    quality: Quality | None
    samples_per_second: float
    bad_rows: int
    versions: dict[str, str]
    machine: dict[str, str]
    saved: Saved | UnsetType = UNSET
    skipped: int | UnsetType = UNSET
    straggler: Straggler | UnsetType = UNSET
    profile: tuple[Stage, ...] | UnsetType = UNSET
    validation: Quality | UnsetType = UNSET
    scores: tuple[Scores, ...] | UnsetType = UNSET


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


def write_measurement(measurement: Measurement, path: Path | str) -> None:
    """Write ``measurement`` as JSON."""
    check_type(measurement, Measurement, "measurement", "gather of measure makes one.")
    write_document(measurement, path)


def read_measurement(path: Path | str) -> Measurement:
    """Read a measurement."""
    found = read_document(path, Measurement, SCHEMA, made_by="shardwright train JOB.toml")
    check_runs(found.timeline, found.world_size, str(path))
    return found


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number of both timelines; None where one side does not have it. Bytes or seconds."""

    rank: int
    phase: str
    kind: str
    name: str
    predicted: float | None
    measured: float | None

    @property
    def difference(self) -> float:
        """Predicted minus measured; a missing side counts as zero."""
        return (self.predicted or 0) - (self.measured or 0)

    @property
    def error(self) -> float | None:
        """The difference relative to the measurement; None where nothing was measured."""
        return self.difference / self.measured if self.measured else None


class Comparison(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``exact`` bytes must be equal, ``peaks`` (one per rank) within ``tolerance``.

    ``phase_peaks`` and ``seconds`` (per rank and phase) are shown with their error; seconds are
    gated only on a calibrated cluster. ``exchanges`` are seconds of what tables exchange while
    ranks compute, ``hidden`` and ``exposed``: predicted is what costs a step nothing, measured is
    how long a rank computed on while an exchange was under way. ``failures`` are the reasons why
    the comparison failed.
    """

    schema: Literal["shardwright.comparison/1"]
    plan_fingerprint: str
    tolerance: float
    exact: tuple[Line, ...]
    peaks: tuple[Line, ...]
    phase_peaks: tuple[Line, ...]
    seconds: tuple[Line, ...]
    failures: tuple[str, ...]
    exchanges: tuple[Line, ...] | UnsetType = UNSET

    def __repr__(self) -> str:
        ranks = len({line.rank for line in (*self.exact, *self.peaks)})
        said = f"{len(self.failures):,} failures" if self.failures else "as predicted"
        return f"<Comparison on {ranks:,} ranks: {said}, plan {self.plan_fingerprint[:12]}>"
