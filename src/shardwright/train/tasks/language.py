"""A transformer or a llama on the bytes of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardwright.core.llama import LlamaShape
from shardwright.data.reading import DealtRows
from shardwright.data.tokens import Text, TokenBatch, held_out_batches, training_batches
from shardwright.estimate.task import Batch
from shardwright.job.job import Job, data_files
from shardwright.models.llama import Llama
from shardwright.models.transformer import Transformer, next_token_loss


class Language:
    """Cross entropy of the next token; scores are (window, tokens, nats)."""

    bad_rows = 0

    def __init__(self, job: Job) -> None:
        self.job = job

    def model(self, device: torch.device) -> nn.Module:
        """The model; a llama's positions are its only buffers."""
        job = self.job
        if not isinstance(job.model.shape, LlamaShape):
            return Transformer(job, device="meta")
        llama = Llama(
            job.model.shape, sequence=job.batch.sequence, device="meta", seed=job.train.seed
        )
        llama.set_positions(device)
        return llama

    def batches(
        self, rank: int, world_size: int, dealt: Sequence[DealtRows] = ()
    ) -> Iterator[Batch]:
        """Inputs and targets [B, T]."""
        job = self.job
        place = (job.batch.size, rank, world_size)
        return map(_arrays, training_batches(self._text(), *place, job.data.seed, dealt))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean over all tokens, in nats."""
        inputs, targets = batch
        return next_token_loss(model(inputs), targets)

    def held_out(self, rank: int, world_size: int) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """The last part of the text."""
        batches = held_out_batches(self._text(), self.job.batch.size, rank, world_size)
        for batch, numbers in batches:
            yield _arrays(batch), numbers

    def scores(
        self, model: nn.Module, batch: Batch, numbers: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Window, its tokens, and their losses together; windows that only fill up are left out."""
        inputs, targets = batch
        logits = model(inputs).flatten(0, 1)
        nats = nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
        sums = nats.view_as(targets).double().sum(1).cpu().numpy()
        found = np.stack([numbers, np.full(len(numbers), targets.shape[1]), sums], 1)
        return found[numbers >= 0]

    def _text(self) -> Text:
        return Text(data_files(self.job).train, self.job.batch.sequence)


def _arrays(batch: TokenBatch) -> Batch:
    return batch.inputs, batch.targets
