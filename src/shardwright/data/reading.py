"""Click logs: rows streamed from disk, dealt to the ranks in blocks, parsed in batches.

What a row means is its log's to know, a ``ClickLog``; here is what all logs have in common. Lines
without a character are not rows.

Rows of an endless stream are dealt so that a global batch is the same for every number of ranks:
of every ``batch * world_size`` rows rank r has ``batch``, from the one at ``r * batch`` on. What a
run has dealt is a list of ``DealtRows``, which a checkpoint keeps: another number of ranks goes on
with the rows that are left.
"""

# The global batch must be the same for every number of ranks, or a run could not be compared with,
# or go on as, one of another size. So ranks take neighbouring blocks of one endless stream, and
# none reads a share of its own. A checkpoint keeps what was dealt and to how many: no row may be
# dealt twice or be lost, whatever ranks came and went between.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import InputError, expected
from shardwright.data.lines import Line, Row

T = TypeVar("T")
Bags = tuple[NDArray[np.generic], ...]  # ids [N], offsets [B + 1], perhaps weights [N]

_MEND = "Mend the row, or set data.skip_bad_rows = true to leave such rows out."


@dataclass(frozen=True, slots=True)
class ClickBatch:
    """Rows ready for a model.

    ``dense`` float32 [B, D]. ``ids`` int64 [B, F], one of each feature; or by feature the ids of
    its bags, one after the other, with offsets [B + 1] of the bags in them and, where they are
    weighted, float32 weights. ``labels`` float32 [B]: 0 or 1.
    """

    dense: NDArray[np.float32]
    ids: NDArray[np.int64] | dict[str, Bags]
    labels: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a row."""

    field: str
    wanted: str
    found: str

    def refuse(self, path: Path, number: int) -> NoReturn:
        """InputError that names the line."""
        raise InputError(expected(f"{path}:{number}, {self.field}", self.wanted, self.found, _MEND))


class ClickLog(ABC):
    """Rows of a file, or of several."""

    path: Path
    spelling: str  # the same of logs whose rows can be parsed together
    longest_line = 1 << 16  # bytes; a row of Criteo takes some 300
    bad_rows = 0  # that were found not to be good, and skipped

    @abstractmethod
    def parse(self, lines: Sequence[Line]) -> ClickBatch | None:
        """All the rows at once, or None if ``fault`` would find one in any of them."""

    @abstractmethod
    def fault(self, line: Line) -> Fault | None:
        """What is wrong with a row, or None: the slow twin of ``parse`` that can name the field."""

    @abstractmethod
    def is_unclicked(self, line: Line) -> bool:
        """Whether the row's label is 0."""

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """Data rows of one pass with their numbers: of lines, or of rows where a file has none."""

    def count(self) -> int:
        """Data rows, good or bad, counted in one streaming pass."""
        return sum(1 for _ in self.rows())

    def check(self) -> None:
        """InputError if the first data row is bad; no other is read."""
        for path, number, line in islice(self.rows(), 1):
            if (fault := self.fault(line)) is not None:
                fault.refuse(path, number)

    def parsed(self, rows: Sequence[Row], skip_bad_rows: bool) -> tuple[ClickBatch, int]:
        """A batch of the good ones of ``rows``, and how many are bad; InputError that names the
        first of them unless they are skipped."""
        batch = self.parse([line for _, _, line in rows])
        if batch is not None:
            return batch, 0
        good = [
            line for path, number, line in rows if self.is_good(path, number, line, skip_bad_rows)
        ]
        batch = self.parse(good)
        assert batch is not None
        return batch, len(rows) - len(good)

    def is_good(self, path: Path, number: int, line: Line, skip_bad_rows: bool) -> bool:
        """Whether nothing is wrong with a row; InputError otherwise, unless it is to be skipped."""
        fault = self.fault(line)
        if fault is not None and not skip_bad_rows:
            fault.refuse(path, number)
        self.bad_rows += fault is not None
        return fault is None


class ClickReader:
    """An endless iterator of batches of exactly ``batch_size`` rows for one rank.

    The file repeats for ever. Global batch k is rows [k*W*B, (k+1)*W*B) of that endless file and
    rank r owns rows [k*W*B + r*B, +B) of it, so that the global batch is the same for every world
    size W while W*B is. Other ranks' rows are stepped over unparsed; one line and one batch are in
    memory. After ``dealt`` the reader goes on with the rows that are left.

    A bad row raises InputError with file, line and field. With ``skip_bad_rows`` it is counted in
    ``bad_rows`` and the next row that this rank owns fills the batch; as many bad rows one after
    another as the file has rows raise.
    """

    def __init__(
        self,
        log: ClickLog,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        skip_bad_rows: bool = False,
        dealt: Sequence[DealtRows] = (),
    ) -> None:
        self._log = log
        check_share(batch_size, rank, world_size)
        self._batch_size = batch_size
        self._skip_bad_rows = skip_bad_rows
        self._passes = _Passes()
        # The generators hold no reference to this object: without a cycle the file is closed as
        # soon as the reader is dropped.
        endless = partial(_endless, log, self._passes)
        self._owned = deal(endless, dealt, batch_size, rank, world_size)
        self._bad_in_a_row = 0
        self.bad_rows = 0

    @property
    def epoch(self) -> int:
        """Complete passes over the file; it rises when a row of the next pass is asked for."""
        return self._passes.done

    def __iter__(self) -> ClickReader:
        return self

    def __next__(self) -> ClickBatch:
        rows = list(islice(self._owned, self._batch_size))
        batch = self._log.parse([line for _, _, line in rows])
        if batch is not None:
            return batch
        return self._sift(rows)

    def _sift(self, rows: list[Row]) -> ClickBatch:
        good: list[Line] = []
        while rows:
            for path, number, line in rows:
                fault = self._log.fault(line)
                if fault is None:
                    good.append(line)
                    self._bad_in_a_row = 0
                else:
                    self._leave_out(path, number, fault)
            rows = list(islice(self._owned, self._batch_size - len(good)))
        batch = self._log.parse(good)
        assert batch is not None
        return batch

    def _leave_out(self, path: Path, number: int, fault: Fault) -> None:
        if not self._skip_bad_rows:
            fault.refuse(path, number)
        self.bad_rows += 1
        self._bad_in_a_row += 1
        if 0 < self._passes.rows <= self._bad_in_a_row:
            last = f"{fault.field} of line {number} is {fault.found}"
            found = f"{self._bad_in_a_row} bad ones in succession, where {last}"
            remedy = "Check that data.path names a click log like that."
            raise InputError(expected(str(path), "a good row in a pass", found, remedy))


def evaluation_batches(
    log: ClickLog,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    limit: int | None = None,
    skip_bad_rows: bool = False,
) -> Iterator[tuple[ClickBatch, NDArray[np.int64]]]:
    """One rank's batches of a single pass in file order, each with its row indices, int64 [b].

    Rows are dealt as in ClickReader. The last batches may be short or have no row, and every rank
    yields the same number of batches, so that collectives stay in step. ``limit`` reads only the
    first rows of the file. With ``skip_bad_rows`` a batch is shorter by its bad rows; without it a
    bad row raises InputError. Indices count data rows from 0.
    """
    check_share(batch_size, rank, world_size)
    if limit is not None and limit < 1:
        raise InputError(expected("limit", "a positive number of rows, or None", repr(limit)))
    rows = islice(enumerate(log.rows()), limit)

    def batches() -> Iterator[tuple[ClickBatch, NDArray[np.int64]]]:
        while True:
            # Rows of lower ranks count as well: a rank without rows of its own yields an empty
            # batch as long as others have some, for the forward of sharded tables is collective.
            before = step_over(rows, rank * batch_size)
            own = list(islice(rows, batch_size))
            if not before and not own:
                return
            batch = log.parse([line for _, (_, _, line) in own])
            if batch is None:
                own = [(index, row) for index, row in own if log.is_good(*row, skip_bad_rows)]
                batch = log.parse([line for _, (_, _, line) in own])
                assert batch is not None
            yield batch, np.array([index for index, _ in own], dtype=np.int64)
            step_over(rows, (world_size - 1 - rank) * batch_size)

    return batches()


@dataclass(slots=True)
class _Passes:
    done: int = 0
    rows: int = 0  # of the last complete pass


def _endless(log: ClickLog, passes: _Passes, start: int) -> Iterator[Row]:
    """From row ``start`` of the endless file on."""
    while True:
        rows = 0
        for rows, row in enumerate(log.rows(), 1):
            if rows > start:
                yield row
        if not rows:
            found = "no longer any"
            raise InputError(expected(str(log.path), "data rows", found, "Restore the file."))
        whole = max(start // rows, 1)  # whole passes before the start are not read again
        passes.done += whole
        passes.rows = rows
        start = max(start - whole * rows, 0)


def check_share(batch_size: int, rank: int, world_size: int) -> None:
    """InputError unless a rank can have batches of that size."""
    if batch_size < 1:
        raise InputError(expected("batch_size", "a positive number of rows", f"{batch_size}"))
    if world_size < 1 or not 0 <= rank < world_size:
        raise InputError(expected("rank", "0 <= rank < world_size", f"{rank} of {world_size}"))


@dataclass(frozen=True, slots=True)
class DealtRows:
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
    dealt: Sequence[DealtRows], batch: int, world_size: int
) -> tuple[tuple[DealtRows, ...], tuple[int, ...]]:
    """What was dealt to others before, and what each of these ranks has taken since."""
    if dealt and (dealt[-1].batch, dealt[-1].world_size) == (batch, world_size):
        return tuple(dealt[:-1]), dealt[-1].taken
    return tuple(dealt), (0,) * world_size


def deal(
    stream: Callable[[int], Iterator[T]],
    dealt: Sequence[DealtRows],
    batch: int,
    rank: int,
    world_size: int,
) -> Iterator[T]:
    """The rows of ``rank`` that it has not taken yet; ``stream`` gives all from a number on."""
    before, taken = split(dealt, batch, world_size)
    # Of all ranks, in the batches that this one took whole.
    own = (taken[rank] - taken[rank] % batch) * world_size
    even = [each for each in before if each.even]
    # The usual case by far, and the cheap one: nothing before that number need be walked through.
    if len(even) == len(before):  # all rows up to a number are taken
        rows = stream(sum(sum(each.taken) for each in even) + own)
    else:
        rows = stream(0)
        for each in before:
            rows = _left(rows, each)
        step_over(rows, own)
    return _own(rows, batch, rank, world_size, taken[rank] % batch)


def _own(rows: Iterator[T], batch: int, rank: int, world_size: int, first: int) -> Iterator[T]:
    """The rows of one rank, of its first batch those from ``first`` on."""
    step_over(rows, rank * batch + first)
    yield from islice(rows, batch - first)
    while True:
        step_over(rows, (world_size - 1) * batch)
        yield from islice(rows, batch)


def _left(rows: Iterator[T], dealt: DealtRows) -> Iterator[T]:
    """The rows that no rank has taken."""
    taken, batch = dealt.taken, dealt.batch
    rounds = -(-max(taken) // batch)
    for start in range(0, rounds * batch, batch):
        for count in taken:
            step_over(rows, min(max(count - start, 0), batch))
            yield from islice(rows, batch - min(max(count - start, 0), batch))
    yield from rows


def step_over(rows: Iterator[object], count: int) -> int:
    """Leave out ``count`` rows; the number that there were."""
    if isinstance(rows, Numbers):
        rows.following += count
        return count
    return sum(1 for _ in islice(rows, count))


class Numbers(Iterator[int]):
    """All numbers from ``following`` on, of which many are stepped over at once."""

    def __init__(self, following: int) -> None:
        self.following = following

    def __next__(self) -> int:
        self.following += 1
        return self.following - 1


def numbered_batches(
    read: Callable[[NDArray[np.int64]], T],
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    dealt: Sequence[DealtRows] = (),
) -> Iterator[T]:
    """One rank's batches, without end, of what is read by numbers that count on from pass to pass;
    dealt as a ClickReader's rows are. A rank reads its own alone."""
    check_share(batch_size, rank, world_size)
    numbers = deal(Numbers, dealt, batch_size, rank, world_size)
    return (read(np.fromiter(islice(numbers, batch_size), np.int64)) for _ in repeat(None))
