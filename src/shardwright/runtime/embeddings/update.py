"""Exact fused updates of embedding rows: no dense gradient, no optimizer pass.

Gradients of a row that repeats are summed first where the rule is not linear, so an update is that
of the unsharded optimizer on the summed gradient. Rows that a step did not look up stay as they
are, moments included, as with ``torch.optim.SparseAdam``. ``rowwise_adagrad`` and
``partial_rowwise_adam`` keep one number a row, of the mean over columns of the squared gradient,
where the others keep one an element. Denominators are sqrt(state) + epsilon.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from shardwright.core.errors import InputError

EPSILON = 1e-8
BETAS = (0.9, 0.999)
_INT32 = 2**31
_NARROW = 16  # columns: fewer are added faster row after row


def add_rows(weight: torch.Tensor, rows: torch.Tensor, change: torch.Tensor) -> None:
    """``weight[rows] += change``; weight [R, D], rows [N] int64 that may repeat, change [N, D]."""
    if weight.device.type == "cpu" and weight.shape[1] < _NARROW:
        weight.index_put_((rows,), change, accumulate=True)
    else:  # an order of magnitude faster than index_add_ on CPU
        weight.scatter_add_(0, rows.unsqueeze(1).expand_as(change), change)


class Touched(NamedTuple):
    """The distinct rows [M] of an update, ascending, and their summed gradients [M, D]."""

    rows: torch.Tensor
    gradient: torch.Tensor


def in_order(values: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The different ones among ``values`` [N] int64 below ``limit``, ascending; where each value of
    all is once they are sorted, and where in that order a different one starts."""
    if limit <= _INT32:  # sorted in less than half the time
        values = values.int()
    ordered, permutation = torch.sort(values)
    del values
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    starts = first.nonzero().squeeze(1)
    return ordered.index_select(0, starts).long(), permutation, starts


class Distinct(NamedTuple):
    """The different ``values`` [M], ascending, of some [N]: that at n is ``values[places[n]]``, and
    value m is at ``order[starts[m]]`` and what follows there up to the next."""

    values: torch.Tensor
    places: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor

    @staticmethod
    def of(values: torch.Tensor, limit: int) -> Distinct:
        """Those among ``values`` [N] below ``limit``."""
        distinct, order, starts = in_order(values, limit)
        counted = torch.zeros_like(order).index_fill_(0, starts, 1)
        places = torch.empty_like(order).scatter_(0, order, counted.cumsum_(0).sub_(1))
        return Distinct(distinct, places, order, starts)

    def summed(self, given: torch.Tensor) -> torch.Tensor:
        """What is ``given`` [N, D] for each, added up for equal ones [M, D]."""
        if not len(self.starts):
            return given.new_zeros(0, given.shape[1])
        # Equal values are a run in ``order``, and embedding_bag sums runs: each sum is written
        # once, and in one order. index_add_ would add in place, and on a GPU in any order.
        return functional.embedding_bag(self.order, given, self.starts, mode="sum")


class Looked(NamedTuple):
    """Rows [N] that were looked up. Segment k is ``lengths[k]`` of them, None: one each, and of
    each the gradient counts ``weights`` times, None: once."""

    rows: torch.Tensor
    lengths: torch.Tensor | None = None
    weights: torch.Tensor | None = None

    def spread(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient [N, D] of every row from that of segments [S, D]."""
        segments, weights = self._segments, self.weights
        if segments is None:
            return gradient if weights is None else gradient * weights.unsqueeze(1)
        found = gradient.index_select(0, segments)
        return found if weights is None else found.mul_(weights.unsqueeze(1))

    def summed(self, gradient: torch.Tensor, limit: int) -> Touched:
        """The rows, all below ``limit``, each once, from the gradient of segments [S, D]."""
        none = Touched(self.rows[:0], gradient[:0])
        return next(self.sums(gradient, limit, max(len(self.rows), 1)), none)

    def sums(self, gradient: torch.Tensor, limit: int, most: int) -> Iterator[Touched]:
        """The same, ``most`` rows at a time."""
        distinct, source, starts = in_order(self.rows, limit)
        weights = None if self.weights is None else self.weights.index_select(0, source)
        if (segments := self._segments) is not None:
            source = segments.index_select(0, source)
            starts = starts.int()
        del segments
        # Cut between different rows only, so that each row's gradient is whole in one piece.
        ends = [*starts[::most].tolist(), len(source)]
        for first, (begin, end) in zip(
            range(0, len(distinct), most), itertools.pairwise(ends), strict=True
        ):
            at = slice(first, first + most)
            beside = None if weights is None else weights[begin:end]
            # Offsets of embedding_bag begin at 0 in every piece.
            bags = starts[at] - begin if begin else starts[at]
            yield Touched(
                distinct[at],
                functional.embedding_bag(
                    source[begin:end], gradient, bags, mode="sum", per_sample_weights=beside
                ),
            )

    @property
    def _segments(self) -> torch.Tensor | None:
        """Of every row the segment that it is in; None: that of its number."""
        return None if self.lengths is None else torch.repeat_interleave(self.lengths.int())


# Takes states, gradient [M, D], the mean of its squares [M] where it is by row, the learning rate
# and the number of this update from 1; changes the states and gives what to add to the weight,
# which may be in the gradient's memory.
Step = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor | None, float, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """An optimizer of rows: its states of one number an element and of one a row, its step, and
    whether a row that was looked up changes even if its gradient is zero."""

    elements: tuple[str, ...]
    rows: tuple[str, ...]
    step: Step
    moves: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """Names of all, in the order of ``step``."""
        return self.elements + self.rows


def _adagrad(
    states: list[torch.Tensor],
    gradient: torch.Tensor,
    squares: torch.Tensor | None,
    rate: float,
    number: int,
) -> torch.Tensor:
    (running,) = states
    if squares is None:
        running.addcmul_(gradient, gradient)
        return gradient.div_(running.sqrt().add_(EPSILON)).mul_(-rate)
    # One number a row, and so one step size for all of its columns: the state is a width-th of the
    # usual one.
    running.add_(squares)
    scale = running.sqrt().add_(EPSILON).reciprocal_().mul_(-rate)
    return gradient.mul_(scale.unsqueeze(1))


def _adam(
    states: list[torch.Tensor],
    gradient: torch.Tensor,
    squares: torch.Tensor | None,
    rate: float,
    number: int,
) -> torch.Tensor:
    mean, square = states
    first, second = BETAS
    mean.mul_(first).add_(gradient, alpha=1 - first)
    square.mul_(second).add_(gradient.square() if squares is None else squares, alpha=1 - second)
    # By the number of updates of the table and not of the row, as torch.optim.SparseAdam counts.
    size = (square / (1 - second**number)).sqrt_().add_(EPSILON)
    return (mean / (size if squares is None else size.unsqueeze(1))).mul_(
        -rate / (1 - first**number)
    )


RULES = {
    "sgd": UpdateRule((), (), lambda _, gradient, squares, rate, number: gradient.mul_(-rate)),
    "adagrad": UpdateRule(("sum",), (), _adagrad),
    "rowwise_adagrad": UpdateRule((), ("sum",), _adagrad),
    "adam": UpdateRule(("exp_avg", "exp_avg_sq"), (), _adam, moves=True),
    "partial_rowwise_adam": UpdateRule(("exp_avg",), ("exp_avg_sq",), _adam, moves=True),
}


def check_rule(optimizer: str, fqn: str) -> None:
    """InputError for an optimizer that rows have not."""
    if optimizer not in RULES:
        wanted = f"one of {', '.join(RULES)}, of which only Adam's have momentum"
        raise InputError(f"optimizer of {fqn}", wanted, f"'{optimizer}'")
