"""The rows a rank keeps: one tensor per group, with the optimizer's states beside it."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from shardwright.core.optimizers import BY_ROW
from shardwright.core.schedule import BAGS_OF_ONE, rows_at_once
from shardwright.core.timeline import Kind
from shardwright.runtime.embeddings import update
from shardwright.runtime.embeddings.initial import TILE, InitialBlock
from shardwright.runtime.embeddings.route import HeldBlock, TableGroup
from shardwright.runtime.embeddings.update import Looked, Touched
from shardwright.runtime.probe import Probe
from shardwright.runtime.units.parameter import DTYPES

_LARGE_PAGE = 2**21
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_PIECE_BYTES = 2**22  # of starting values that are made at a time


class Store:
    """``weight`` [R, width] of all blocks of a group on this rank, each at its base row.

    ``states`` are those of the group's optimizer by torch's names, [R, width] or, of what it keeps
    by row, [R]; fp32 whatever the weight's dtype. Updates are numbered from 1.
    """

    def __init__(
        self,
        group: TableGroup,
        rank: int,
        initial: InitialBlock,
        probe: Probe,
        device: torch.device,
    ) -> None:
        self.held = group.held.get(rank, ())
        self.width, self.optimizer = group.key.width, group.key.optimizer
        self.rule = update.RULES[self.optimizer]
        # Of the whole row, although only some of its columns are here: the mean is over all of
        # them.
        self.dim = group.key.dim if self.optimizer in BY_ROW else 0
        self.device = device
        rows = sum(item.rows for item in self.held)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.rule.elements, (rows, self.width))
        shapes |= dict.fromkeys(self.rule.rows, (rows,))
        like = {"weight": ((rows, self.width), DTYPES[group.key.dtype])}
        like |= {name: (shape, torch.float32) for name, shape in shapes.items()}
        kept = self._allocate(like)
        self.weight, self.states = kept["weight"], {name: kept[name] for name in shapes}
        self._fill(initial)
        self.still: list[tuple[int, int]] = []  # ranges of rows that no step changes
        self.moving_rows = rows if self.rule.moves else 0  # change without a gradient, too
        self.gradient_bytes = 0  # of the last backward, if it is dense
        for tensor, kind in self.lasting():
            probe.holds(tensor, kind)

    def _allocate(
        self, like: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        """Room for the weight, and the states, which are 0."""
        found = {
            name: torch.empty(shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in like.items()
        }
        for name, tensor in found.items():
            use_large_pages(tensor)
            if name != "weight":  # which is filled
                tensor.zero_()
        return found

    def _fill(self, initial: InitialBlock) -> None:
        """Weights start from ``initial``, piece by piece, for a block may be most of memory."""
        row_bytes = max(self.width * self.weight.element_size(), 1)
        step = max(_PIECE_BYTES // row_bytes // TILE[0], 1) * TILE[0]
        for item in self.held:
            (first, column), (rows, columns) = item.block.offsets, item.block.sizes
            cuts = [first, *range(first - first % step + step, first + rows, step), first + rows]
            # at tiles, of which none is made twice
            for low, high in itertools.pairwise(cuts if rows else ()):
                start = item.base + low - first
                self.weight[start : start + high - low] = initial(
                    item.block.tensor, (low, column), (high - low, columns)
                )

    def lasting(self) -> Iterator[tuple[torch.Tensor, Kind]]:
        """The memory of the store, and what it is for."""
        yield self.weight, "weight"
        for state in self.states.values():
            yield state, "optimizer_state"

    def kept(self, item: HeldBlock) -> dict[Kind, int]:
        """Bytes that one block takes for as long as the store is there."""
        found: dict[Kind, int] = {"weight": self.block_view(item).nbytes}
        if self.states:
            found["optimizer_state"] = sum(s.nbytes for s in self.state_views(item).values())
        return found

    def settle(self) -> None:
        """``weight`` and ``states`` are complete, and may be changed, until the next lookup."""

    def block_view(self, item: HeldBlock) -> torch.Tensor:
        """The weights of one block, sharing storage."""
        self.settle()
        return self.weight[item.base : item.base + item.rows]

    def state_views(self, item: HeldBlock) -> dict[str, torch.Tensor]:
        """The optimizer's states of one block."""
        self.settle()
        rows = slice(item.base, item.base + item.rows)
        return {name: state[rows] for name, state in self.states.items()}

    def look_up(self, looked: Looked) -> torch.Tensor:
        """The sum [S, width] fp32 of the rows of every segment."""
        return self._summed(self.weight, looked)

    def _summed(self, table: torch.Tensor, looked: Looked) -> torch.Tensor:
        rows, lengths, weights = looked
        # Single rows by index_select; embedding_bag would make an offset for each.
        if lengths is None and weights is None and not _fetches_ahead(table, rows):
            return table.index_select(0, rows).float()
        if lengths is None:
            starts = torch.arange(len(rows), device=rows.device)
        else:
            starts = lengths.cumsum(0).sub_(lengths)
        if not len(starts):
            return table.new_zeros(0, self.width, dtype=torch.float32)
        if table.dtype != torch.float32:  # sums are made in fp32
            table = table.index_select(0, rows).float()
            rows = torch.arange(len(rows), device=rows.device)
        # Bags without any ids are zeros: there is no row to read.
        if not len(table):
            return table.new_zeros(len(starts), self.width)
        return functional.embedding_bag(rows, table, starts, mode="sum", per_sample_weights=weights)

    def update(self, looked: Looked, gradient: torch.Tensor, rate: float, number: int) -> None:
        """Apply the summed-over-ranks ``gradient`` [S, width] of segments."""
        # SGD adds the gradients of a row that repeats one by one and comes to their sum. Every
        # other rule needs the sum first, and so does a narrow dtype, which would round after each.
        in_place = self.optimizer == "sgd" and self.weight.dtype == torch.float32
        if in_place and looked.lengths is None and looked.weights is None:
            update.add_rows(self.weight, looked.rows, gradient.mul_(-rate))
            return
        # Some rows at a time, whose gradients are still in a core's cache when the rows are
        # changed. All at once would also be a second gradient in memory.
        for touched in looked.sums(gradient, len(self.weight), rows_at_once(self.width)):
            if in_place:
                update.add_rows(self.weight, touched.rows, touched.gradient.mul_(-rate))
            else:
                self.step(touched, self.squares(touched) if self.dim else None, rate, number)
            del touched  # before the next are made

    def squares(self, touched: Touched) -> torch.Tensor:
        """The share of this store's columns in the mean of the squared gradient [M]."""
        norms = torch.linalg.vector_norm(touched.gradient, dim=1)  # in one pass without a copy
        return norms.square_().div_(self.dim)

    def step(
        self, touched: Touched, squares: torch.Tensor | None, rate: float, number: int
    ) -> None:
        """Change the rows of ``touched``; ``squares`` [M] are means over all columns."""
        (rows, gradient), squares = self.moved(touched, squares)
        if not len(rows):
            return
        # Copies of the rows' states: ``rows`` are distinct, so each is written back once.
        states = [state.index_select(0, rows) for state in self.states.values()]
        change = self.rule.step(states, gradient, squares, rate, number)
        for state, changed in zip(self.states.values(), states, strict=True):
            state.index_copy_(0, rows, changed)
        if self.weight.dtype == torch.float32:
            update.add_rows(self.weight, rows, change)
        else:
            # In fp32 and rounded once, as a small change added in 16 bits would be lost whole.
            weight = self.weight.index_select(0, rows).float().add_(change)
            self.weight.index_copy_(0, rows, weight.to(self.weight.dtype))

    def moved(
        self, touched: Touched, squares: torch.Tensor | None
    ) -> tuple[Touched, torch.Tensor | None]:
        """Those of rows that a step changes."""
        if not self.still:
            return touched, squares
        rows = touched.rows
        keeps = torch.zeros_like(rows, dtype=torch.bool)
        for low, high in self.still:
            keeps |= (rows >= low) & (rows < high)
        places = keeps.logical_not_().nonzero().squeeze(1)
        left = Touched(*(part.index_select(0, places) for part in touched))
        return left, None if squares is None else squares.index_select(0, places)

    def update_all(
        self, gradient: torch.Tensor, looked: torch.Tensor | None, rate: float, number: int
    ) -> None:
        """Apply a dense gradient [R, width] of the whole store; where rows that were looked up
        change without one, ``looked`` [R] is above 0 for these."""
        # A dense gradient does not tell a row that nobody looked up from one whose gradient is 0,
        # and rules with moments move the latter.
        if looked is not None:
            rows = looked.nonzero().squeeze(1)
            touched = Touched(rows, gradient.index_select(0, rows))
            self.step(touched, self.squares(touched) if self.dim else None, rate, number)
            return
        squares = gradient.square().mean(1) if self.dim else None
        change = self.rule.step([*self.states.values()], gradient, squares, rate, number)
        self.weight.copy_(self.weight.float().add_(change))


def _fetches_ahead(table: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether bags of one row each are read faster than rows: on a CPU they are asked for from
    memory before they are needed, which many rows are worth."""
    on_cpu = table.device.type == "cpu" and table.dtype == torch.float32
    return on_cpu and len(rows) >= BAGS_OF_ONE


def use_large_pages(tensor: torch.Tensor) -> None:
    """Ask the system for large pages, whose addresses a CPU has at hand where rows are read at
    random, under a tensor that nothing was written to yet; one that has none, or no memory of its
    own, stays as it is."""
    if _ADVICE is None or type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return
    start = tensor.data_ptr()
    first = -(-start // _LARGE_PAGE) * _LARGE_PAGE
    # Only pages that are all of this tensor's, as the advice is for whole ones.
    size = (start + tensor.nbytes - first) // _LARGE_PAGE * _LARGE_PAGE
    if size > 0:
        _system().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _ADVICE)


@cache
def _system() -> Any:
    return ctypes.CDLL(None)
