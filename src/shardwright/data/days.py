"""Logs of several days, of which the last is held out, and rows that are thinned out.

Days are one file that is cut, or a folder with a file for each. The last day is held out: its first
half is for validation, its second half for the test. Rows without a click may be thinned out, the
same ones in every pass, whoever reads them."""

# Which rows `drop` leaves out follows from the seed and the row's place in its file alone, or ranks
# would not share one stream.

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from shardwright.core.errors import InputError, expected, listed
from shardwright.data.files import is_one_log
from shardwright.data.lines import Line, Row
from shardwright.data.reading import ClickBatch, ClickLog, Fault

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")

# As it comes, packed, dlrm's arrays, the first of TorchRec's.
_DAY = re.compile(r"day_(\d+)(?:(?:\.\w+){0,2}|(?:_\w+)?\.npz|_dense\.npy)")
_DRAWN = 1 << 16  # numbers that are drawn together


@dataclass(frozen=True, slots=True)
class LogSlice:
    """Rows ``start`` to ``stop`` of a log; to its end where that is None."""

    log: ClickLog
    start: int = 0
    stop: int | None = None


class Days(ClickLog):
    """Slices of logs of one spelling, one after another.

    Of rows without a click the share ``drop`` is left out, drawn from ``seed`` and the row's place
    in its file.
    """

    def __init__(self, slices: Sequence[LogSlice], drop: float = 0.0, seed: int = 0) -> None:
        first = slices[0].log
        self.path = first.path
        self.slices = tuple(slices)
        self._drop, self._seed = drop, seed
        for part in slices:
            if part.log.spelling != first.spelling:
                wanted = f"{first.spelling!r}, as in {first.path}"
                found = f"{part.log.spelling!r}"
                raise InputError(expected(str(part.log.path), wanted, found))

    @property
    def spelling(self) -> str:
        """That of every log."""
        return self.slices[0].log.spelling

    def parse(self, lines: Sequence[Line]) -> ClickBatch | None:
        """As its logs do."""
        return self.slices[0].log.parse(lines)

    def fault(self, line: Line) -> Fault | None:
        """As its logs do."""
        return self.slices[0].log.fault(line)

    def is_unclicked(self, line: Line) -> bool:
        """As its logs do."""
        return self.slices[0].log.is_unclicked(line)

    def rows(self) -> Iterator[Row]:
        """Those of every part that are not left out."""
        for number, part in enumerate(self.slices):
            rows = islice(part.log.rows(), part.start, part.stop)
            yield from self._thinned(rows, number, part) if self._drop else rows

    def check(self) -> None:
        """InputError if the first row of a log is bad."""
        for part in self.slices:
            part.log.check()

    def _thinned(self, rows: Iterator[Row], number: int, part: LogSlice) -> Iterator[Row]:
        draws = np.random.PCG64([self._seed, len(self.slices) > 1, number])
        # A part of a file draws as the whole would: training and held-out rows of one log are
        # thinned alike wherever it is cut.
        draws.advance(part.start)  # a number for every row of the file
        numbers = np.random.Generator(draws)
        while block := list(islice(rows, _DRAWN)):
            # One number a row, clicked or not: which numbers later rows get must not depend on
            # labels before.
            stays = numbers.random(len(block)) >= self._drop
            for keep, row in zip(stays.tolist(), block, strict=True):
                if keep or not self.is_unclicked(row[2]):
                    yield row


def day_files(folder: Path) -> list[Path]:
    """The files ``day_0``, ``day_1``, ... of a folder, in order; InputError if one is missing."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        if match := _DAY.fullmatch(path.name):
            day = int(match[1])
            if day in found:
                both = f"{found[day].name} and {path.name}"
                remedy = "Leave one of them in the folder."
                raise InputError(expected(str(folder), f"one file of day_{day}", both, remedy))
            found[day] = path
    missing = sorted(set(range(len(found))) - set(found))
    if len(found) < 2 or missing:
        wanted = f"day_{missing[0]}" if missing else "files day_0, day_1, ..., two at least"
        names = [found[day].name for day in sorted(found)]
        names = names or [path.name for path in sorted(folder.iterdir())] or ["an empty folder"]
        remedy = "Put all days, or Parquet of one log, into one folder; join parts of text."
        raise InputError(expected(str(folder), wanted, listed(names, 3), remedy))
    return [found[day] for day in sorted(found)]


def is_days(path: Path) -> bool:
    """Whether a log is a folder of days."""
    return not is_one_log(path)


def bounds(rows: int, days: int) -> tuple[int, int]:
    """The first row that is held out, and the first of the test, of so many in ``days``."""
    first = rows * (days - 1) // days
    return first, (first + rows) // 2


def slices_of(
    path: Path, days: int | None, opened: Callable[[str], ClickLog]
) -> dict[Part, tuple[LogSlice, ...]]:
    """What is trained on and what is held out, of a file with ``days`` or of a folder.

    The rows of the file, or of the folder's last one, are counted. InputError where a part would
    have no row.
    """
    if is_days(path):
        files = [opened(str(file)) for file in day_files(path)]
        if days not in (None, len(files)):
            found = f"{len(files)} files"
            raise InputError(expected(f"{path}, data.days", f"{days} files of days", found))
        last, first, rows = files[-1], 0, files[-1].count()
        middle, before = rows // 2, tuple(LogSlice(file) for file in files[:-1])
    else:
        last = opened(str(path))
        rows = last.count()
        first, middle = bounds(rows, days or 1)
        before = (LogSlice(last, 0, first),)
    if not (first or is_days(path)) or middle in (first, rows):
        wanted = "rows to train on and two that are held out"
        raise InputError(expected(str(path), wanted, f"{rows} rows, data.days = {days}"))
    return {
        "train": before,
        "validation": (LogSlice(last, first, middle),),
        "test": (LogSlice(last, middle, rows),),
    }
