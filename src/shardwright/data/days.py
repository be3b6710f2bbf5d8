"""Click logs of several days: one file that is cut into days, or a folder with a file for each.

The last day is held out: its first half is for validation, its second half for the test. Rows
without a click may be thinned out, the same ones in every pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from shardwright.core.errors import InputError, expected
from shardwright.data.reading import ClickBatch, ClickLog, Fault, Row

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")

_DAY = re.compile(r"day_(\d+)(?:\.\w+)?")
_DRAWN = 1 << 16  # numbers that are drawn together


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows ``start`` to ``stop`` of a log; to its end where that is None."""

    log: ClickLog
    start: int = 0
    stop: int | None = None


class Days(ClickLog):
    """Stretches of logs of one spelling, one after another.

    Of rows without a click the share ``drop`` is left out, drawn from ``seed`` and the row's place
    in its file.
    """

    def __init__(self, stretches: Sequence[Stretch], drop: float = 0.0, seed: int = 0) -> None:
        first = stretches[0].log
        self.path, self.header_line = first.path, first.header_line
        self.stretches = tuple(stretches)
        self._drop, self._seed = drop, seed
        for stretch in stretches:
            if stretch.log.spelling != first.spelling:
                wanted = f"{first.spelling!r}, as in {first.path}"
                found = f"{stretch.log.spelling!r}"
                raise InputError(expected(str(stretch.log.path), wanted, found))

    @property
    def spelling(self) -> str:
        """That of every log."""
        return self.stretches[0].log.spelling

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are read."""
        return tuple(path for stretch in self.stretches for path in stretch.log.paths)

    def parse(self, lines: Sequence[bytes]) -> ClickBatch | None:
        """As its logs do."""
        return self.stretches[0].log.parse(lines)

    def fault(self, line: bytes) -> Fault | None:
        """As its logs do."""
        return self.stretches[0].log.fault(line)

    def is_unclicked(self, line: bytes) -> bool:
        """As its logs do."""
        return self.stretches[0].log.is_unclicked(line)

    def rows(self) -> Iterator[Row]:
        """Those of every stretch that are not left out."""
        for number, stretch in enumerate(self.stretches):
            rows = islice(stretch.log.rows(), stretch.start, stretch.stop)
            yield from self._thinned(rows, number, stretch) if self._drop else rows

    def check(self) -> None:
        """InputError if the first row of a log is bad."""
        for stretch in self.stretches:
            stretch.log.check()

    def _thinned(self, rows: Iterator[Row], number: int, stretch: Stretch) -> Iterator[Row]:
        draws = np.random.PCG64([self._seed, len(self.stretches) > 1, number])
        draws.advance(stretch.start)  # a number for every row of the file
        numbers = np.random.Generator(draws)
        while block := list(islice(rows, _DRAWN)):
            stays = numbers.random(len(block)) >= self._drop
            for keep, row in zip(stays.tolist(), block, strict=True):
                if keep or not self.is_unclicked(row[2]):
                    yield row


def day_files(folder: Path) -> list[Path]:
    """The files ``day_0``, ``day_1``, ... of a folder, in order; InputError if one is missing."""
    found = {int(m[1]): path for path in folder.iterdir() if (m := _DAY.fullmatch(path.name))}
    missing = sorted(set(range(len(found))) - set(found))
    if len(found) < 2 or missing:
        wanted = f"day_{missing[0]}" if missing else "files day_0, day_1, ..., two at least"
        got = ", ".join(found[day].name for day in sorted(found)[:3]) or "a directory without them"
        raise InputError(expected(str(folder), wanted, got, "Uncompress the days into one folder."))
    return [found[day] for day in sorted(found)]


def bounds(rows: int, days: int) -> tuple[int, int]:
    """The first row that is held out, and the first of the test, of so many in ``days``."""
    first = rows * (days - 1) // days
    return first, (first + rows) // 2


def stretches_of(
    path: Path, days: int | None, opened: Callable[[str], ClickLog]
) -> dict[Part, tuple[Stretch, ...]]:
    """What is trained on and what is held out, of a file with ``days`` or of a folder.

    The rows of the file, or of the folder's last one, are counted. InputError where a part would
    have no row.
    """
    if path.is_dir():
        files = [opened(str(file)) for file in day_files(path)]
        if days not in (None, len(files)):
            found = f"{len(files)} files"
            raise InputError(expected(f"{path}, data.days", f"{days} files of days", found))
        last, first, rows = files[-1], 0, files[-1].count()
        middle, before = rows // 2, tuple(Stretch(file) for file in files[:-1])
    else:
        last = opened(str(path))
        rows = last.count()
        first, middle = bounds(rows, days or 1)
        before = (Stretch(last, 0, first),)
    if not (first or path.is_dir()) or middle in (first, rows):
        wanted = "rows to train on and two that are held out"
        raise InputError(expected(str(path), wanted, f"{rows} rows, data.days = {days}"))
    return {
        "train": before,
        "validation": (Stretch(last, first, middle),),
        "test": (Stretch(last, middle, rows),),
    }
