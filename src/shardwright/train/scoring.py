"""Scores of what is trained on, while it is trained on, over all ranks."""

from __future__ import annotations

import torch

from shardwright.core.measurement import BINS, EDGE, SIZE, Scores, scores_of
from shardwright.runtime.comm import Comm


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
