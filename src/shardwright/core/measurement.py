"""What a run measured, what of it one rank leaves behind, and predicted beside measured."""

# Predicted and measured numbers are joined by (rank, phase, kind, name), so a measurement keeps
# them in the form that a plan has: events in runs over ranks, which a report decodes once.

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.document import Shown, read_document, write_document
from shardwright.core.errors import check_type
from shardwright.core.timeline import Event, EventRun, check_runs

MOST_KERNELS = 100  # lines of a profile that are kept; what is left is one line more


class Scores(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the ``rows`` that all ranks trained on since the last ones, up to ``step``, each as it was
    predicted before it was learned. ``auc`` is off by ``auc_error`` at most; it and the normalized
    entropy are None where all labels are alike, ``calibration`` where there is no click."""

    step: int
    rows: int
    log_loss: float
    accuracy: float
    majority: float
    auc: float | None = None
    auc_error: float | None = None
    normalized_entropy: float | None = None
    calibration: float | None = None


def scores_text(found: Scores) -> str:
    """In a few words, for a line of progress."""
    parts = [f"log loss {found.log_loss:.4f}"]
    if found.auc is not None:
        parts.insert(0, f"AUC {found.auc:.4f}")
    if found.normalized_entropy is not None:
        parts.append(f"normalized entropy {found.normalized_entropy:.4f}")
    if found.calibration is not None:
        parts.append(f"calibration {found.calibration:.3f}")
    return ", ".join([*parts, f"accuracy {found.accuracy:.4f} ({found.majority:.4f})"])


RECORD_SCHEMA = "shardwright.record/1"
SCHEMA = "shardwright.measurement/1"
COMPARISON_SCHEMA = "shardwright.comparison/1"


class Meeting(msgspec.Struct, frozen=True, array_like=True):
    """Collective ``number`` of a ``group`` as one rank saw it: it ``arrived`` (the collective
    could begin), and was held by it from ``began`` to ``ended``."""

    group: str
    number: int
    kind: str
    label: str
    bytes: int
    arrived: float
    began: float
    ended: float
    phase: str = ""


class RankProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank saw of ``steps`` steps of a stage: seconds of every call of each kernel, seconds
    of the steps by phase, and its collectives. ``clock_error`` seconds is the most by which its
    clock may be off that of rank 0."""

    stage: str
    rank: int
    steps: int
    kernels: dict[str, tuple[float, ...]]
    phases: dict[str, float]
    meetings: tuple[Meeting, ...]
    clock_error: float = 0.0


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calls of a kernel on all ranks and their seconds; ``share`` of those of all kernels."""

    name: str
    calls: int
    seconds: float
    mean: float
    median: float
    longest: float
    share: float


class PhaseTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's seconds of a phase in a step, and those of them that it waited for a rank that came
    later, and that it moved bytes."""

    rank: int
    phase: str
    seconds: float
    waiting: float
    moving: float


class Awaited(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds in a step that the other ranks together waited for ``rank``, which came last."""

    rank: int
    seconds: float


class ProfiledStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The profile of one stage, such as training: seconds by kernel, by rank and phase, and for
    whom ranks waited. ``unmatched`` collectives were not seen by all of their ranks."""

    name: str
    steps: int
    kernels: tuple[Kernel, ...]
    phases: tuple[PhaseTime, ...]
    awaited: tuple[Awaited, ...]
    clock_error: float
    unmatched: int = 0


def by_phase(stage: ProfiledStage) -> dict[str, list[PhaseTime]]:
    """The lines of each phase, on the ranks that have it."""
    order = list(dict.fromkeys(line.phase for line in stage.phases))
    lines = sorted(stage.phases, key=lambda line: order.index(line.phase))
    return {phase: list(own) for phase, own in groupby(lines, key=lambda line: line.phase)}


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


# Fields that came later have defaults, so that records and measurements of before still load.
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
    of the majority class everywhere, ``normalized_entropy`` the log loss over that of the share of
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
    profile: tuple[ProfiledStage, ...] | UnsetType = UNSET
    validation: Quality | UnsetType = UNSET
    scores: tuple[Scores, ...] | UnsetType = UNSET


def write_measurement(measurement: Measurement, path: Path | str) -> None:
    """Write ``measurement`` as JSON."""
    check_type(measurement, Measurement, "measurement", "gather of measure makes one.")
    write_document(measurement, path)


def read_measurement(path: Path | str) -> Measurement:
    """Read a measurement."""
    found = read_document(path, Measurement, SCHEMA, made_by="shardwright train JOB.toml")
    check_runs(found.timeline, found.world_size, str(path))
    return found


class ComparedNumber(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    how long a rank computed on while an exchange was under way. ``unjudged`` says why seconds say
    nothing about the prediction. ``failures`` are the reasons why the comparison failed.
    """

    schema: Literal["shardwright.comparison/1"]
    plan_fingerprint: str
    tolerance: float
    exact: tuple[ComparedNumber, ...]
    peaks: tuple[ComparedNumber, ...]
    phase_peaks: tuple[ComparedNumber, ...]
    seconds: tuple[ComparedNumber, ...]
    failures: tuple[str, ...]
    exchanges: tuple[ComparedNumber, ...] | UnsetType = UNSET
    unjudged: str | UnsetType = UNSET

    def __repr__(self) -> str:
        ranks = len({line.rank for line in (*self.exact, *self.peaks)})
        said = f"{len(self.failures):,} failures" if self.failures else "as predicted"
        return f"<Comparison on {ranks:,} ranks: {said}, plan {self.plan_fingerprint[:12]}>"
