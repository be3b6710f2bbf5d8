"""A module of the user's own that gets its numbers later, a tensor at a time, where that can be."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from shardwright.estimate.own_model import Built, Call, importable, make
from shardwright.runtime.deferred_init import Deferred, NotDeferredError
from shardwright.runtime.noted import NotedPlace


@dataclass(frozen=True, slots=True)
class Later:
    """What a function built without numbers: inputs and targets are on the meta device.

    ``given`` are the places of inputs, keywords, targets and of what the loss has in ``cells``.
    """

    built: Built
    deferred: Deferred
    given: tuple[Any, Any, Any, Any]
    cells: tuple[CellType, ...]

    def drawn(self, seed: int) -> Built:
        """What was built, with inputs and targets drawn from ``seed``, and the loss's with them."""
        seed_all(seed)
        inputs, keywords, targets, contents = self.deferred.drawn(self.given)
        for cell, content in zip(self.cells, contents, strict=True):
            cell.cell_contents = content
        return self.built._replace(inputs=inputs, keywords=keywords, targets=targets)


def later(call: Call, function: Callable[..., Any], seed: int) -> Later:
    """Run the function without numbers; any error says that it has to be run itself."""
    deferred = Deferred()
    with importable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fake tensors, which the user has not made
        seed_all(seed)
        with deferred:
            made = make(call, function)
    if not isinstance(made, Built):
        raise NotDeferredError("a task of its own")
    cells = tuple(c for c in getattr(made.loss, "__closure__", None) or () if c != CellType())
    contents = [cell.cell_contents for cell in cells]
    given = tree_map(
        lambda v: deferred.place(v) if isinstance(v, FakeTensor) else v,
        (made.inputs, made.keywords, made.targets, contents),
    )
    del contents
    for cell, places in zip(cells, given[3], strict=True):
        cell.cell_contents = places
    deferred.settle(made.module)
    inputs, keywords, targets = tree_map(_without_numbers, given[:3])
    made = made._replace(inputs=inputs, keywords=keywords, targets=targets)
    deferred.check_left()
    return Later(made, deferred, given, cells)


def seed_all(seed: int) -> None:
    """Let everything that draws numbers begin at ``seed``."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _without_numbers(value: Any) -> Any:
    if not isinstance(value, NotedPlace):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
