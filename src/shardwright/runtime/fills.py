"""Initialisations that treat every element by itself, done to some rows of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

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
