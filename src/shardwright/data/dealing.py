"""How the rows of an endless stream are dealt to ranks, and to other ranks later.

Of every ``batch * world_size`` rows rank r has ``batch``, from the one at ``r * batch`` on. What a
run has dealt is a list of ``Dealt``: another number of ranks goes on with the rows that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar, runtime_checkable

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Dealt:
    """Rows were dealt by ``batch`` to as many ranks as there are numbers in ``taken``, each of
    which took so many of its own."""

    batch: int
    taken: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Ranks that they were dealt to."""
        return len(self.taken)

    @property
    def even(self) -> bool:
        """Whether every rank took as many, whole batches: then nothing before the next is left."""
        return len(set(self.taken)) == 1 and self.taken[0] % self.batch == 0


def split(
    dealt: Sequence[Dealt], batch: int, world_size: int
) -> tuple[tuple[Dealt, ...], tuple[int, ...]]:
    """What was dealt to others before, and what each of these ranks has taken since."""
    if dealt and (dealt[-1].batch, dealt[-1].world_size) == (batch, world_size):
        return tuple(dealt[:-1]), dealt[-1].taken
    return tuple(dealt), (0,) * world_size


def deal(
    stream: Callable[[int], Iterator[Row]],
    dealt: Sequence[Dealt],
    batch: int,
    rank: int,
    world_size: int,
) -> Iterator[Row]:
    """The rows of ``rank`` that it has not taken yet; ``stream`` gives all from a number on."""
    before, taken = split(dealt, batch, world_size)
    own = _whole(taken[rank], batch) * world_size  # rows of all ranks in the batches it took
    even = [each for each in before if each.even]
    if len(even) == len(before):  # all rows up to a number are taken
        rows = stream(sum(sum(each.taken) for each in even) + own)
    else:
        rows = stream(0)
        for each in before:
            rows = _left(rows, each)
        step_over(rows, own)
    return _own(rows, batch, rank, world_size, taken[rank] % batch)


def _whole(count: int, batch: int) -> int:
    return count - count % batch


def _own(rows: Iterator[Row], batch: int, rank: int, world_size: int, first: int) -> Iterator[Row]:
    """The rows of one rank, of its first batch those from ``first`` on."""
    step_over(rows, rank * batch + first)
    yield from islice(rows, batch - first)
    while True:
        step_over(rows, (world_size - 1) * batch)
        yield from islice(rows, batch)


def _left(rows: Iterator[Row], dealt: Dealt) -> Iterator[Row]:
    """The rows that no rank has taken."""
    taken, batch = dealt.taken, dealt.batch
    rounds = -(-max(taken) // batch)
    for start in range(0, rounds * batch, batch):
        for count in taken:
            step_over(rows, min(max(count - start, 0), batch))
            yield from islice(rows, batch - min(max(count - start, 0), batch))
    yield from rows


@runtime_checkable
class Skippable(Protocol):
    """Rows of which many can be stepped over at once."""

    def step_over(self, count: int) -> int:
        """Leave out ``count`` of them; the number that there were."""
        ...


def step_over(rows: Iterator[object], count: int) -> int:
    """Leave out ``count`` rows; the number that there were."""
    if isinstance(rows, Skippable):
        return rows.step_over(count)
    return sum(1 for _ in islice(rows, count))
