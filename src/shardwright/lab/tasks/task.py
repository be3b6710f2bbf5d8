"""What the training loop asks of a task; one object per rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Arrays = tuple[NDArray[Any], ...]
Tensors = tuple[torch.Tensor, ...]


class Task(Protocol):
    """A model, its batches, and its loss; rows of scores for what is held out."""

    def model(self, device: torch.device) -> nn.Module:
        """The model, parameters on the meta device and buffers on ``device``."""
        ...

    def batches(self) -> Iterator[Arrays]:
        """This rank's batches, without end."""
        ...

    def loss(self, model: nn.Module, batch: Tensors) -> torch.Tensor:
        """The mean loss of a batch, a scalar."""
        ...

    def held_out(self) -> Iterator[tuple[Arrays, NDArray[np.int64]]]:
        """This rank's batches of what is held out, with row numbers; as many on every rank."""
        ...

    def scores(
        self, model: nn.Module, batch: Tensors, numbers: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Three columns for each held-out row, its number first."""
        ...

    @property
    def bad_rows(self) -> int:
        """Rows that were left out so far."""
        ...
