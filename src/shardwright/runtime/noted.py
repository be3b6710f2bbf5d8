"""Operations that were noted on fake tensors: where tensors lie, and what is read and written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from shardwright.tracker.private import operator_name

# What fills its first argument without reading it.
FILLS = {
    *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_"),
    *("normal_", "random_", "uniform_", "zero_"),
}
# Besides, what changes every element by itself, in place.
ELEMENTWISE = {
    *("abs_", "add_", "clamp_", "clamp_max_", "clamp_min_", "div_", "erfinv_", "exp_", "log_"),
    *("mul_", "neg_", "pow_", "round_", "sqrt_", "square_", "sub_", "tanh_"),
}
# What draws numbers element after element, of contiguous ones: so do its parts, one after another.
SERIAL = {"normal_", "uniform_"}
CHUNK = 4096  # rows that are drawn at a time: in sixteens of elements, as ``normal_`` makes them


class Fill(NamedTuple):
    """An operation in place on ``rows`` of a tensor from ``first`` on."""

    function: Any
    first: int
    rows: int
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        """``normal_``."""
        return operator_name(self.function).removeprefix("aten::")

    @property
    def draws(self) -> bool:
        """Whether its numbers are random."""
        return torch.Tag.nondeterministic_seeded in self.function.tags

    def to(self, part: torch.Tensor, top: int, generator: torch.Generator | None = None) -> None:
        """Do it to those of its rows that are in ``part``, whose first is row ``top``."""
        low, high = max(self.first, top), min(self.first + self.rows, top + len(part))
        if low < high:
            options = self.keywords | ({"generator": generator} if self.draws else {})
            self.function(part[low - top : high - top], *self.arguments, **options)


class Serial:
    """A matrix that ``fills`` make, the first of them with the numbers that follow ``state`` of a
    generator: any rectangle of it, of which no more than two chunks of rows are ever there.

    Rows are drawn from the first one on; who asks for them in order has each drawn once.
    """

    def __init__(
        self, fills: Sequence[Fill], shape: tuple[int, int], dtype: torch.dtype, state: Any
    ) -> None:
        self.fills, self.shape, self.dtype, self.begin = fills, shape, dtype, state
        self.generator = torch.Generator()
        self.chunk: torch.Tensor | None = None
        self.number = -1  # of the chunk

    def block(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """The rectangle ``sizes`` at ``offsets``."""
        (row, column), (rows, columns) = offsets, sizes
        found = torch.empty(rows, columns, dtype=self.dtype)
        low = row
        while low < row + rows:
            chunk, top = self._chunk(min(low // CHUNK, self._chunks - 1))
            high = min(row + rows, top + len(chunk))
            found[low - row : high - row] = chunk[low - top : high - top, column : column + columns]
            low = high
        return found

    def after(self) -> torch.Tensor:
        """The state of the generator once all of it was drawn."""
        self._chunk(self._chunks - 1)
        return self.generator.get_state()

    @property
    def _chunks(self) -> int:
        """The last one has what is left over, so that none is of fewer than sixteen elements."""
        return max(self.shape[0] // CHUNK, 1)

    def _chunk(self, number: int) -> tuple[torch.Tensor, int]:
        if self.chunk is None or number < self.number:
            self.generator.set_state(self.begin)
            self.number = -1
        while self.number < number:
            self.number += 1
            top = self.number * CHUNK
            rows = self.shape[0] - top if self.number == self._chunks - 1 else CHUNK
            self.chunk = torch.empty(rows, self.shape[1], dtype=self.dtype)
            for fill in self.fills:
                fill.to(self.chunk, top, self.generator)
        assert self.chunk is not None
        return self.chunk, number * CHUNK


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
