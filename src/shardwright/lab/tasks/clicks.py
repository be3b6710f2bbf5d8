"""DLRM on a click log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardwright.core.job import Job, data_files
from shardwright.data.dealing import Dealt
from shardwright.data.reading import ClickBatch, ClickReader, evaluation_batches
from shardwright.lab.sources.clicks import log_of
from shardwright.lab.tasks.task import Batch
from shardwright.models.dlrm import DLRM

EVALUATION_BATCH = 1024  # rows at least; nothing is saved for a backward


class Clicks:
    """Binary cross-entropy; scores are (row, label, logit)."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.files = data_files(job)
        self._reader: ClickReader | None = None

    def model(self, device: torch.device) -> nn.Module:
        """DLRM with its index buffers in place."""
        model = DLRM(self.job, device="meta")
        for name, buffer in list(model.interact.named_buffers()):
            setattr(model.interact, name, buffer.to(device))
        return model

    def batches(self, rank: int, world_size: int, dealt: Sequence[Dealt] = ()) -> Iterator[Batch]:
        """Dense features [B, D], ids [B, F] or bags by feature, labels [B]."""
        self._reader = ClickReader(
            log_of(self.job, self.files.train),
            self.job.batch.size,
            rank,
            world_size,
            skip_bad_rows=self.job.data.skip_bad_rows,
            dealt=dealt,
        )
        return map(_arrays, self._reader)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean binary cross-entropy."""
        dense, ids, labels = batch
        return nn.functional.binary_cross_entropy_with_logits(model(dense, ids).squeeze(1), labels)

    def held_out(self, rank: int, world_size: int) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """The test file, if there is one."""
        if not self.files.test:
            return
        batches = evaluation_batches(
            log_of(self.job, self.files.test),
            max(self.job.batch.size, EVALUATION_BATCH),
            rank,
            world_size,
            skip_bad_rows=self.job.data.skip_bad_rows,
        )
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
        """Of the training file."""
        return self._reader.bad_rows if self._reader else 0


def _arrays(batch: ClickBatch) -> Batch:
    return batch.dense, batch.ids, batch.labels
