"""What the training loop asks of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardwright.core.errors import InputError, expected
from shardwright.job.job import Job

Batch = Any  # tensors or arrays, alone or in tuples, lists and dictionaries


@runtime_checkable
class Task(Protocol):
    """A model, its batches, and its loss; rows of scores for what is held out. One that holds rows
    out for validation too has ``validation``, called as ``held_out``; one whose ids may travel
    ahead has ``inputs``: the (arguments, keywords) of a batch with which ``loss`` calls the model.

    Every rank has a task of its own. A batch is made of tensors or arrays, alone or in tuples,
    lists and dictionaries; ``loss`` and ``scores`` get it as tensors on the model's device. The
    function that a job names as ``[model] python`` may return one.
    """

    def model(self, device: torch.device) -> nn.Module:
        """The model, the same on every rank, with its buffers on ``device``; parameters may be on
        the meta device where the model has ``initial_block``, as ``apply`` asks."""
        ...

    def batches(self, rank: int, world_size: int) -> Iterator[Batch]:
        """The batches of a rank, without end.

        With a parameter ``dealt`` they go on after what was (``data.reading``); without one the
        same ranks leave out what they have had, and others are refused.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss of a batch, a scalar."""
        ...

    def held_out(self, rank: int, world_size: int) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """A rank's batches of what is held out, with row numbers; as many on every rank."""
        ...

    def scores(
        self, model: nn.Module, batch: Batch, numbers: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Three columns for each held-out row, its number first: of a task that a user wrote then
        its weight (tokens, say), and its loss times that."""
        ...

    @property
    def bad_rows(self) -> int:
        """Rows that were left out so far."""
        ...


InputsOf = Callable[[Batch], tuple[Any, Any]]


def inputs_of(task: Task, job: Job) -> InputsOf:
    """How a task calls its model; InputError where it does not say, for ids are to travel ahead."""
    found: InputsOf | None = getattr(task, "inputs", None)
    if found is None:
        wanted = "'rows' or 'none' for a task without a function inputs"
        remedy = (
            "Let inputs(batch) return the (arguments, keywords) that loss calls the model with."
        )
        raise InputError(expected("train.overlap", wanted, f"'{job.train.overlap}'", remedy))
    return found
