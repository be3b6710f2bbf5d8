"""A transformer or a llama on the bytes of a text: any file, or a made-up one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from shardwright.core.errors import InputError, expected
from shardwright.core.llama import LlamaShape
from shardwright.core.measurement import Quality
from shardwright.data.reading import DealtRows
from shardwright.data.tokens import (
    VOCAB,
    Text,
    TokenBatch,
    held_out_batches,
    training_batches,
    write_text,
)
from shardwright.job.job import Job, data_files, memory_of
from shardwright.train.sources.made_up import make_up, read_facts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwright.estimate.own_model import Batch, Task


class Language:
    """Cross entropy of the next token; scores are (window, tokens, nats)."""

    bad_rows = 0

    def __init__(self, job: Job) -> None:
        self.job = job

    def check(self) -> None:
        """Raise InputError unless bytes can be tokens and the file, if named, is long enough."""
        job, model = self.job, self.job.model
        if job.data.kind != "text":
            wanted = f"'text' for a {model.kind}"
            raise InputError(expected("data.kind", wanted, f"'{job.data.kind}'"))
        if job.data.test_path:
            wanted, remedy = "none for text", "The last tenth of data.path is held out."
            raise InputError(expected("data.test_path", wanted, f"'{job.data.test_path}'", remedy))
        vocab = model.vocab if model.shape is UNSET else model.shape.vocab
        if vocab < VOCAB:
            wanted = f"at least {VOCAB} for text, whose bytes are the tokens"
            raise InputError(expected("model.vocab", wanted, str(vocab)))
        if job.data.path:
            self._text()

    def prepare(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Make the text up if none is named, and see that it is long enough."""
        if not self.job.data.path:
            make_up(self._path, partial(write_text, seed=self.job.data.seed))
        self._text()

    def samples(self) -> int:
        """Windows of the text that are not held out."""
        return self._text().training

    def quality(self, scores: NDArray[np.float64], part: str = "test") -> Quality | None:
        """Nats per token and bits per byte of windows (number, tokens, nats)."""
        _, tokens, nats = scores.T
        if not len(tokens):
            return None
        loss = math.fsum(nats) / tokens.sum()
        return Quality(
            rows=int(tokens.sum()),
            auc=None,
            log_loss=float(loss),
            best_log_loss=read_facts(self._path).get("bayes_log_loss"),
            bits_per_byte=float(loss / math.log(2)),
        )

    def task(self) -> Task:
        """Itself: a text and the model on it are one's."""
        return self

    def model(self, device: torch.device) -> nn.Module:
        """The model; a llama's positions are its only buffers."""
        from shardwright.models.llama import Llama
        from shardwright.models.transformer import Transformer
        from shardwright.tracker.tensors import DTYPES

        job = self.job
        if not isinstance(job.model.shape, LlamaShape):
            return Transformer(job, device="meta")
        llama = Llama(
            job.model.shape, sequence=job.batch.sequence, device="meta", seed=job.train.seed
        )
        if dtype := memory_of(job).param_dtype:
            llama.store_frozen(DTYPES[dtype])
        # Positions are buffers: computed here, since apply fills parameters alone.
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
        from shardwright.models.transformer import next_token_loss

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
        from torch.nn.functional import cross_entropy

        inputs, targets = batch
        logits = model(inputs).flatten(0, 1)
        nats = cross_entropy(logits, targets.flatten(), reduction="none")
        sums = nats.view_as(targets).double().sum(1).cpu().numpy()
        found = np.stack([numbers, np.full(len(numbers), targets.shape[1]), sums], 1)
        return found[numbers >= 0]

    @property
    def _path(self) -> Path:
        return Path(data_files(self.job).train)

    def _text(self) -> Text:
        return Text(self._path, self.job.batch.sequence)


def _arrays(batch: TokenBatch) -> Batch:
    return batch.inputs, batch.targets
