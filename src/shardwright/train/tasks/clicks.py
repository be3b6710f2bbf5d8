"""DLRM on a click log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray
from torch import nn

from shardwright.data.cache import CachedRows, cached_evaluation
from shardwright.data.logs import Part
from shardwright.data.reading import (
    ClickBatch,
    ClickReader,
    DealtRows,
    evaluation_batches,
    numbered_batches,
)
from shardwright.estimate.task import Batch
from shardwright.job.job import Job
from shardwright.models.dlrm import DLRM
from shardwright.train.sources.clicks import cache_of, rows_of

TEST_BATCH = 1024  # rows at least where a job names none; nothing is saved for a backward


class Clicks:
    """Binary cross-entropy; scores are (row, label, logit)."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._reader: ClickReader | None = None
        self.scored: tuple[torch.Tensor, torch.Tensor] | None = None  # logits and labels, if asked

    def model(self, device: torch.device) -> nn.Module:
        """DLRM with its index buffers in place."""
        model = DLRM(self.job, device="meta")
        for part in model.modules():
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, buffer.to(device))
        return model

    def batches(
        self, rank: int, world_size: int, dealt: Sequence[DealtRows] = ()
    ) -> Iterator[Batch]:
        """Dense features [B, D], ids [B, F] or bags by feature, labels [B]."""
        place = (self.job.batch.size, rank, world_size)
        if folder := cache_of(self.job, "train"):
            return map(_arrays, numbered_batches(CachedRows(folder).at, *place, dealt=dealt))
        log, skip = rows_of(self.job, "train"), self.job.data.skip_bad_rows
        assert log is not None
        self._reader = ClickReader(log, *place, skip_bad_rows=skip, dealt=dealt)
        return map(_arrays, self._reader)

    def inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with."""
        dense, ids, _ = batch
        return (dense, ids), {}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean binary cross-entropy."""
        dense, ids, labels = batch
        logits = model(dense, ids).squeeze(1)
        if self.job.train.metrics_every:
            self.scored = (logits.detach(), labels)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)

    def held_out(self, rank: int, world_size: int) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """The test file, or the second half of the last day, if there is one."""
        return self._held_out("test", rank, world_size)

    def validation(self, rank: int, world_size: int) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """The first half of the last day, if there is one."""
        return self._held_out("validation", rank, world_size)

    def _held_out(
        self, part: Part, rank: int, world_size: int
    ) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        rows = self.job.data.test_batch
        if rows is UNSET:
            rows = max(self.job.batch.size, TEST_BATCH)
        place = (rows, rank, world_size)
        folder = cache_of(self.job, part)
        if folder and folder.exists():
            batches = cached_evaluation(CachedRows(folder), *place)
        elif folder or not (log := rows_of(self.job, part)):
            return
        else:
            skip = self.job.data.skip_bad_rows
            batches = evaluation_batches(log, *place, skip_bad_rows=skip)
        for batch, numbers in batches:
            yield _arrays(batch), numbers

    def scores(
        self, model: nn.Module, batch: Batch, numbers: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Row number, label and logit."""
        dense, ids, labels = batch
        logits = model(dense, ids).squeeze(1).double().cpu().numpy()
        return np.stack([numbers, labels.cpu().numpy(), logits], 1)

    @property
    def bad_rows(self) -> int:
        """Of the training file; those of a cache were left out when it was written."""
        return self._reader.bad_rows if self._reader else 0


def _arrays(batch: ClickBatch) -> Batch:
    return batch.dense, batch.ids, batch.labels
