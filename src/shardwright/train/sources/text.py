"""Text for a transformer or a llama: any file, or a made-up one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from shardwright.core.errors import InputError, expected
from shardwright.core.measurement import Quality
from shardwright.data.tokens import VOCAB, Text, write_text
from shardwright.job.job import Job, data_files
from shardwright.train.sources.made_up import make_up, read_facts


def check(job: Job) -> None:
    """Raise InputError unless bytes can be the tokens and the file, if named, is long enough."""
    model = job.model
    if job.data.kind != "text":
        wanted = f"'text' for a {model.kind}"
        raise InputError(expected("data.kind", wanted, f"'{job.data.kind}'"))
    if job.data.test_path:
        raise InputError(
            expected(
                "data.test_path",
                "none for text",
                f"'{job.data.test_path}'",
                "The last tenth of data.path is held out.",
            )
        )
    vocab = model.vocab if model.shape is UNSET else model.shape.vocab
    if vocab < VOCAB:
        wanted = f"at least {VOCAB} for text, whose bytes are the tokens"
        raise InputError(expected("model.vocab", wanted, str(vocab)))
    if job.data.path:
        Text(job.data.path, job.batch.sequence)


def prepare(job: Job, say: Callable[[str], None] = lambda text: None) -> None:
    """Make the text up if none is named, and see that it is long enough."""
    path = Path(data_files(job).train)
    if not job.data.path:
        make_up(path, partial(write_text, seed=job.data.seed))
    Text(path, job.batch.sequence)


def samples(job: Job) -> int:
    """Windows of the text that are not held out."""
    return Text(data_files(job).train, job.batch.sequence).training


def quality(job: Job, scores: NDArray[np.float64], part: str = "test") -> Quality | None:
    """Nats per token and bits per byte of windows (number, tokens, nats)."""
    _, tokens, nats = scores.T
    if not len(tokens):
        return None
    loss = math.fsum(nats) / tokens.sum()
    return Quality(
        rows=int(tokens.sum()),
        auc=None,
        log_loss=float(loss),
        best_log_loss=read_facts(Path(data_files(job).train)).get("bayes_log_loss"),
        bits_per_byte=float(loss / math.log(2)),
    )
