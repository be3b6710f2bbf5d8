"""Operations that were noted on fake tensors: where tensors lie, and what is read and written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwright.runtime.fills import ELEMENTWISE, FILLS, SERIAL, Fill


@dataclass(frozen=True, slots=True)
class NotedPlace:
    """Where a tensor lies: the number of its storage, and what of it."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor over real memory."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload,no-any-return]

    def as_noted(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` laid out as this place is."""
        if tensor.stride() == self.stride and not tensor.storage_offset():
            return tensor
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).copy_(tensor)


@dataclass(slots=True)
class Stream:
    """Random operations that follow one another, and the states of their generator so far."""

    states: list[torch.Tensor]
    operations: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Operation:
    """A noted call, with places instead of tensors.

    It makes some storages and writes into some that are there, of which it fills some altogether;
    ``reads`` are those whose numbers it needs. ``turn`` is its place in a stream of random ones.
    """

    function: Any
    arguments: Any
    keywords: dict[str, Any]
    results: list[Any]
    makes: frozenset[int]
    writes: frozenset[int]
    fills: frozenset[int]
    reads: frozenset[int]
    turn: tuple[Stream, int] | None

    @property
    def touches(self) -> frozenset[int]:
        """All storages that it has to do with."""
        return self.makes | self.writes | self.reads

    def fill_of(self, place: NotedPlace) -> Fill | None:
        """What it does to rows of the tensor at ``place``, and to nothing else."""
        target, *others = self.arguments or (None,)
        if not isinstance(target, NotedPlace) or target.storage != place.storage or not place.shape:
            return None
        width = max(math.prod(place.shape[1:]), 1)
        rows, over = divmod(math.prod(target.shape), width)
        first, beside = divmod(target.offset, width)
        whole = over == beside == 0 and _is_contiguous(target) and target.dtype == place.dtype
        alone = self.writes == {place.storage} and self.reads <= {place.storage}
        if not whole or not alone or places_in((others, self.keywords)):
            return None
        return Fill(self.function, first, rows, tuple(others), self.keywords)


def places_in(values: Any) -> list[NotedPlace]:
    """All in a nest of values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, NotedPlace)]


def _is_contiguous(place: NotedPlace) -> bool:
    reached = 1
    for stride, extent in zip(reversed(place.stride), reversed(place.shape), strict=True):
        if extent != 1 and stride != reached:
            return False
        reached *= extent
    return True


def is_serial(fills: Sequence[Fill | None], place: NotedPlace | None) -> bool:
    """Whether ``fills`` make a matrix of which the numbers are drawn row after row."""
    if place is None or len(place.shape) != 2 or math.prod(place.shape) < 16 or place.offset:
        return False
    for number, fill in enumerate(fills):
        known = SERIAL if number == 0 else (FILLS | ELEMENTWISE) - SERIAL
        if fill is None or fill.name not in known or (number and fill.draws):
            return False
    return fills[0] is not None and fills[0].rows == place.shape[0]
