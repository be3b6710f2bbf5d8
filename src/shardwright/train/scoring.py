"""Scores of what is trained on, while it is trained on, over all ranks.

How well clicks were told is found from sums that add up over ranks: clicks and other rows by the
logit that they were given, in ``BINS`` equal bins, and five totals. All figures but AUC are exact;
for AUC pairs within one bin count half, which is wrong by half of them at most, and that is said
with it.
"""

# A mean of ranks' AUCs is no AUC, and all logits of a run are too many to keep: bins add up, in one
# collective every so many steps.

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from shardwright.core.measurement import Scores
from shardwright.runtime.comm import Comm

BINS = 8192
EDGE = 16.0  # logits beyond it, on either side, fall into the last bin
TOTALS = ("rows", "clicks", "log_loss", "predicted", "right")  # behind both halves of the bins
SIZE = 2 * BINS + len(TOTALS)


class Scoring:
    """Adds up every batch on its rank, and every so many steps over all ranks: one collective then,
    and none on other steps."""

    def __init__(self, comm: Comm, every: int, before: tuple[Scores, ...] = ()) -> None:
        self.found = list(before)
        self._comm, self._every = comm, every
        self._sums = torch.zeros(SIZE, dtype=torch.float64, device=comm.mesh.device_type)

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """A batch: ``logits`` [B] as they were before the update, ``labels`` [B] of 0 and 1."""
        logits, labels = logits.detach().double(), labels.double()
        width = 2 * EDGE / BINS
        bins = ((logits + EDGE) / width).floor().clamp(0, BINS - 1).long()
        self._sums.scatter_add_(0, bins + BINS * labels.long(), torch.ones_like(logits))
        clicks = labels.sum()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        right = ((logits >= 0) == (labels > 0.5)).sum()
        totals = (clicks.new_tensor(len(labels)), clicks, loss, logits.sigmoid().sum(), right)
        self._sums[2 * BINS :] += torch.stack([total.double() for total in totals])

    def after(self, step: int) -> Scores | None:
        """The scores of all ranks since the last ones, where ``step`` has some."""
        if step % self._every:
            return None
        self._comm.all_reduce("scores", self._sums)
        sums = self._sums.tolist()
        self._sums.zero_()
        if not sums[2 * BINS]:  # every step was left out
            return None
        self.found.append(scores_of(step, sums))
        return self.found[-1]


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
