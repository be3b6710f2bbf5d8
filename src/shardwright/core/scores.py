"""How well the clicks of some rows were told while training, from sums that add up over ranks.

The sums are clicks and other rows by the logit that they were given, in ``BINS`` equal bins, and
five totals. All figures but AUC are exact; for AUC pairs within one bin count half, which is wrong
by half of them at most, and that is said with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

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
