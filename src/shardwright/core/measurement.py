"""What a run measured, what of it one rank leaves behind, and predicted beside measured.

How well clicks were told while training is found from sums that add up over ranks: clicks and other
rows by the logit that they were given, in ``BINS`` equal bins, and five totals. All figures but AUC
are exact; for AUC pairs within one bin count half, which is wrong by half of them at most, and that
is said with it.
"""

# Predicted and measured numbers are joined by (rank, phase, kind, name), so a measurement keeps
# them in the form that a plan has. Figures of clicks come from sums that add up over ranks,
# because rows of a rank are no sample of all, and a mean of AUCs is no AUC.

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.document import Shown, read_document, write_document
from shardwright.core.errors import check_type
from shardwright.core.profile import ProfiledStage, RankProfile
from shardwright.core.timeline import Event, EventRun, check_runs

BINS = 8192
EDGE = 16.0  # logits beyond it, on either side, fall into the last bin
TOTALS = ("rows", "clicks", "log_loss", "predicted", "right")  # behind both halves of the bins
SIZE = 2 * BINS + len(TOTALS)


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


def scores_of(step: int, sums: Sequence[float]) -> Scores:
    """The figures of ``sums`` [SIZE]: bins of other rows, bins of clicks, totals."""
    others, clicked = sums[:BINS], sums[BINS : 2 * BINS]
    rows, clicks, loss, predicted, right = sums[2 * BINS :]
    share = clicks / rows
    found = Scores(step, int(rows), loss / rows, right / rows, max(share, 1 - share))
    if not 0 < clicks < rows:
        return (
            found if not clicks else msgspec.structs.replace(found, calibration=predicted / clicks)
        )
    pairs = clicks * (rows - clicks)
    below = ordered = tied = 0.0
    for other, click in zip(others, clicked, strict=True):
        ordered += click * below
        tied += click * other
        below += other
    base = -(share * math.log(share) + (1 - share) * math.log1p(-share))
    return msgspec.structs.replace(
        found,
        auc=(ordered + tied / 2) / pairs,
        auc_error=tied / 2 / pairs,
        normalized_entropy=loss / rows / base,
        calibration=predicted / clicks,
    )


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
    how long a rank computed on while an exchange was under way. ``failures`` are the reasons why
    the comparison failed.
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

    def __repr__(self) -> str:
        ranks = len({line.rank for line in (*self.exact, *self.peaks)})
        said = f"{len(self.failures):,} failures" if self.failures else "as predicted"
        return f"<Comparison on {ranks:,} ranks: {said}, plan {self.plan_fingerprint[:12]}>"
