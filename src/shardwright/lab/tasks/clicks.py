"""DLRM on a click log."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardwright.core.job import Job, data_files
from shardwright.data.criteo import ClickBatch, CriteoReader, evaluation_batches
from shardwright.lab.tasks.task import Arrays, Tensors
from shardwright.models.dlrm import DLRM

EVALUATION_BATCH = 1024  # rows at least; nothing is saved for a backward


class Clicks:
    """Binary cross-entropy; scores are (row, label, logit)."""

    def __init__(self, job: Job, rank: int, world_size: int) -> None:
        self.job = job
        self.files = data_files(job)
        self.rank = rank
        self.world_size = world_size
        self.table_rows = [table.rows for table in job.tables]
        self._reader: CriteoReader | None = None

    def model(self, device: torch.device) -> nn.Module:
        """DLRM with its index buffers in place."""
        model = DLRM(self.job, device="meta")
        model.interact.to(device)
        return model

    def batches(self) -> Iterator[Arrays]:
        """Dense features [B, 13], ids [B, 26], labels [B]."""
        self._reader = CriteoReader(
            self.files.train,
            self.table_rows,
            self.job.batch.size,
            self.rank,
            self.world_size,
            skip_bad_rows=self.job.data.skip_bad_rows,
        )
        return map(_arrays, self._reader)

    def loss(self, model: nn.Module, batch: Tensors) -> torch.Tensor:
        """Mean binary cross-entropy."""
        dense, ids, labels = batch
        return nn.functional.binary_cross_entropy_with_logits(model(dense, ids).squeeze(1), labels)

    def held_out(self) -> Iterator[tuple[Arrays, NDArray[np.int64]]]:
        """The test file, if there is one."""
        if not self.files.test:
            return
        batches = evaluation_batches(
            self.files.test,
            self.table_rows,
            max(self.job.batch.size, EVALUATION_BATCH),
            self.rank,
            self.world_size,
            skip_bad_rows=self.job.data.skip_bad_rows,
        )
        for batch, numbers in batches:
            yield _arrays(batch), numbers

    def scores(
        self, model: nn.Module, batch: Tensors, numbers: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Row number, label and logit."""
        dense, ids, labels = batch
        logits = model(dense, ids).squeeze(1).double().cpu().numpy()
        return np.stack([numbers, labels.cpu().numpy(), logits], 1)

    @property
    def bad_rows(self) -> int:
        """Of the training file."""
        return self._reader.bad_rows if self._reader else 0


def _arrays(batch: ClickBatch) -> Arrays:
    return batch.dense, batch.ids, batch.labels
