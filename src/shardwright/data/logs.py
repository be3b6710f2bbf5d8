"""Click logs by what their rows mean: Criteo's, those of one's own, and logs of several days.

A row of Criteo's is a label (0 or 1), 13 counts I1..I13 and 26 hashed categories C1..C26 (at most
32 bits, hexadecimal); any field but the label may be empty. Two spellings are read: the headerless
tab-separated original, and comma-separated text under the header ``label,I1..I13,C1..C26``.
The value rules are those of the original DLRM pipeline.

In a log of one's own a header line names the columns, separated by tabs, else by commas. The label
is 0 or 1, a dense field a number or nothing (0), and the field of a feature has the ids of its bag,
separated by spaces: none, one or many. An id may be weighted, ``17:0.5``. Other columns are not
looked at.

Days are one file that is cut, or a folder with a file for each. The last day is held out: its first
half is for validation, its second half for the test. Rows without a click may be thinned out, the
same ones in every pass, whoever reads them: what is left out follows from the seed and the row's
place in its file alone."""

# `parse` takes a batch at once and says nothing of what is wrong in it; `fault` looks at one row,
# slowly, and names the field. The two have to agree on every row: where parse refuses and fault
# finds nothing there is no batch to give and no field to name; where parse takes what fault
# refuses, a row is good or bad by what else is in its batch. Which rows `drop` leaves out follows
# from the seed and the row's place in its file alone, or ranks would not share one stream.

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import InputError, expected, there_are
from shardwright.data.reading import Bags, ClickBatch, ClickLog, Fault, Row, first_lines, shown

INTEGER_NAMES = tuple(f"I{i}" for i in range(1, 14))
CATEGORY_NAMES = tuple(f"C{i}" for i in range(1, 27))
FIELD_NAMES = ("label", *INTEGER_NAMES, *CATEGORY_NAMES)

_FIELDS = len(FIELD_NAMES)
_FIRST_CATEGORY = 1 + len(INTEGER_NAMES)
_HEX_DIGITS = 8  # 32 bits

_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")
_PLAIN = b"0123456789abcdefABCDEF+-.\t,"  # every byte that a good row can have
_FORMS = "40 tab-separated fields, or the header line label,I1..I13,C1..C26"


class CriteoLog(ClickLog):
    """A Criteo log for tables of ``table_rows`` [26].

    ``dense`` [B, 13] of a batch: log(x + 1) of the counts, with missing and negative counts as 0.
    ``ids`` [B, 26]: the hash modulo the rows of its table, with missing ids as 0. ``spelling`` is
    ``"tsv"`` or ``"csv"``. A path that is no Criteo log raises InputError.
    """

    def __init__(self, path: str | Path, table_rows: Sequence[int]) -> None:
        self.path = Path(path)
        self._tables = _checked_tables(table_rows)
        number, first, second = first_lines(self.path, _FORMS, self.longest_line)
        if b"\t" in first:
            self.spelling, self._separator, self.header_line = "tsv", b"\t", 0
            return
        _check_header(self.path, number, first.rstrip(b"\r\n").split(b","))
        if not second:
            found = "only a header"
            raise InputError(expected(str(path), "data rows", found, "Check data.path."))
        self.spelling, self._separator, self.header_line = "csv", b",", number

    def parse(self, lines: Sequence[bytes]) -> ClickBatch | None:
        """All the rows at once, or None if ``fault`` would find one in any of them."""
        rows, separator = len(lines), self._separator
        if any(line.count(separator) != _FIELDS - 1 for line in lines):
            return None
        text = separator.join(lines)
        if text.translate(None, _PLAIN):
            return None
        fields = text.split(separator) if rows else []
        labels = fields[::_FIELDS]
        if not set(labels) <= {b"0", b"1"}:
            return None
        # Column by column: a slice with a stride is the cheapest way through a flat list.
        dense = _dense([fields[i::_FIELDS] for i in range(1, _FIRST_CATEGORY)])
        hashes = _hashes([f for i in range(_FIRST_CATEGORY, _FIELDS) for f in fields[i::_FIELDS]])
        if dense is None or hashes is None:
            return None
        ids = np.ascontiguousarray(hashes.reshape(len(CATEGORY_NAMES), rows).T) % self._tables
        clicked = np.array([label == b"1" for label in labels], dtype=np.float32)
        return ClickBatch(dense, ids, clicked)

    def is_unclicked(self, line: bytes) -> bool:
        """Whether the row's label is 0."""
        # Without parsing: of thinned rows most are dropped, and only their label is ever needed.
        return line.startswith(b"0" + self._separator)

    def fault(self, line: bytes) -> Fault | None:
        """What is wrong with a row, or None."""
        fields = line.split(self._separator)
        if len(fields) != _FIELDS:
            hint = " (the unlabelled test split has 39)" if len(fields) == _FIELDS - 1 else ""
            return Fault("row", f"{_FIELDS} fields", f"{len(fields)}{hint}")
        if fields[0] not in (b"0", b"1"):
            return Fault("field label", "0 or 1", shown(fields[0]))
        for name, field in zip(FIELD_NAMES[1:], fields[1:], strict=True):
            if name in INTEGER_NAMES:
                good = _NUMBER.fullmatch(field) and float(field).is_integer()
                wanted = "a finite whole number or nothing"
            else:
                good, wanted = _HEX.fullmatch(field), "1 to 8 hexadecimal digits or nothing"
            if field and not good:
                return Fault(f"field {name}", wanted, shown(field))
        return None


def _check_header(path: Path, number: int, names: list[bytes]) -> None:
    wanted = (*map(repr, FIELD_NAMES), "no such column")
    found = (*map(shown, names[: _FIELDS + 1]), *["no such column"] * (_FIELDS + 1 - len(names)))
    for column, (name, other) in enumerate(zip(wanted, found, strict=True), 1):
        if name != other:
            remedy = "Name the columns label,I1..I13,C1..C26, or use tabs and no header."
            where = f"{path}:{number}, column {column} of the header"
            raise InputError(expected(where, name, other, remedy))


def _dense(columns: list[list[bytes]]) -> NDArray[np.float32] | None:
    try:
        counts = np.array([[float(f) if f else 0.0 for f in column] for column in columns]).T
    except ValueError:
        return None
    if not np.isfinite(counts).all() or (counts != np.floor(counts)).any():
        return None
    return np.ascontiguousarray(np.log1p(np.maximum(counts, 0.0)), dtype=np.float32)


def _hashes(fields: list[bytes]) -> NDArray[np.int64] | None:
    """Hexadecimal text [n] as int64 [n]: 44 % of real ids do not fit in int32."""
    # NumPy would cut longer texts to the length of its dtype without a word.
    if max(map(len, fields), default=0) > _HEX_DIGITS:
        return None
    # Left-aligned with zero bytes behind. The caller has let through only hex digits, signs, dots
    # and separators; the latter three all lie below "0".
    text = np.array(fields, dtype=f"S{_HEX_DIGITS}").view(np.uint8).reshape(-1, _HEX_DIGITS)
    if ((text != 0) & (text < ord("0"))).any():
        return None
    digits = (text & 15) + 9 * (text >> 6)  # the low bits of "a" and "A" are 1, their bit 6 is set
    places = 16 ** np.arange(_HEX_DIGITS - 1, -1, -1, dtype=np.int64)
    empty = _HEX_DIGITS - np.count_nonzero(text, axis=1)
    return (digits.astype(np.int64) * places).sum(axis=1) >> (4 * empty)


def _checked_tables(table_rows: Sequence[int]) -> NDArray[np.int64]:
    if len(table_rows) != len(CATEGORY_NAMES):
        raise InputError(expected("table_rows", "26 table sizes", f"{len(table_rows)} of them"))
    for name, rows in zip(CATEGORY_NAMES, table_rows, strict=True):
        if rows < 1:
            raise InputError(expected(f"table_rows, {name}", "a positive size", f"{rows}"))
    return np.array(table_rows, dtype=np.int64)


_NAMED_FORMS = "a header line that names columns, separated by tabs or commas"
_LARGEST = float(np.finfo(np.float32).max)
_ID = re.compile(rb"[0-9]{1,18}")
_NAMES = "Name columns in data.label, data.dense and the tables' features."
_CLICKED = {b"0": False, b"1": True}


@dataclass(frozen=True, slots=True)
class BagColumn:
    """A column of bags of ids below ``rows``; with ``hashed`` any id is taken modulo that."""

    name: str
    rows: int
    weighted: bool = False
    hashed: bool = False


class ColumnLog(ClickLog):
    """A log whose columns are ``label``, ``dense`` numbers and ``features``.

    ``dense`` [B, D] of a batch are the numbers as they stand, ``ids`` a mapping of features to
    (ids, offsets), and weights of weighted ones; without ``bags`` they are [B, F], and a row has
    one id of each feature. InputError where a column is missing.
    """

    longest_line = 1 << 20

    def __init__(
        self,
        path: str | Path,
        label: str,
        dense: Sequence[str],
        features: Sequence[BagColumn],
        *,
        bags: bool = True,
    ) -> None:
        self.path, self._in_bags = Path(path), bags
        self._label, self._dense_names, self._features = label, tuple(dense), tuple(features)
        self.header_line, first, second = first_lines(self.path, _NAMED_FORMS, self.longest_line)
        self._separator = b"\t" if b"\t" in first else b","
        self.spelling = first.decode("ascii").rstrip("\r\n")
        names = [n.decode("ascii") for n in first.rstrip(b"\r\n").split(self._separator)]
        if not second:
            found = "only a header"
            raise InputError(expected(str(path), "data rows", found, "Check data.path."))
        self._columns = len(names)
        self._place: dict[str, int] = {}
        for name in (label, *dense, *(feature.name for feature in features)):
            if names.count(name) != 1:
                found = "several" if name in names else "none"
                spot = f"{path}:{self.header_line}, the header"
                remedy = _NAMES if name in names else f"{there_are(name, names)} {_NAMES}"
                raise InputError(expected(spot, f"one column '{name}'", found, remedy))
            self._place[name] = names.index(name)

    def parse(self, lines: Sequence[bytes]) -> ClickBatch | None:
        """All the rows at once, or None if ``fault`` would find one in any of them."""
        rows = [line.split(self._separator) for line in lines]
        if any(len(row) != self._columns for row in rows):
            return None
        try:
            clicked = [_CLICKED[row[self._place[self._label]]] for row in rows]
            dense = self._dense(rows)
            bags = {
                f.name: _bags(f, [row[self._place[f.name]] for row in rows]) for f in self._features
            }
            ids = bags if self._in_bags else _one_each(bags.values())
        except (KeyError, ValueError, OverflowError):
            return None
        return ClickBatch(dense, ids, np.array(clicked, dtype=np.float32))

    def _dense(self, rows: Sequence[Sequence[bytes]]) -> NDArray[np.float32]:
        columns = [self._place[name] for name in self._dense_names]
        found = _floats([row[column] for row in rows for column in columns])
        return found.reshape(len(rows), len(columns))

    def is_unclicked(self, line: bytes) -> bool:
        """Whether the row's label is 0."""
        fields = line.split(self._separator)
        return fields[self._place[self._label] :][:1] == [b"0"]

    def fault(self, line: bytes) -> Fault | None:
        """What is wrong with a row, or None."""
        fields = line.split(self._separator)
        if len(fields) != self._columns:
            return Fault("row", f"{self._columns} fields, as the header", str(len(fields)))
        label = fields[self._place[self._label]]
        if label not in _CLICKED:
            return Fault(f"column '{self._label}'", "0 or 1", shown(label))
        for name in self._dense_names:
            field = fields[self._place[name]]
            if field and not _is_float(field):
                return Fault(f"column '{name}'", "a finite number or nothing", shown(field))
        for feature in self._features:
            words = fields[self._place[feature.name]].split()
            if not self._in_bags and len(words) != 1:
                return Fault(f"column '{feature.name}'", "one id", str(len(words)))
            for one in words:
                if (wanted := _wrong(feature, one)) is not None:
                    return Fault(f"column '{feature.name}'", wanted, shown(one))
        return None


def _is_float(field: bytes) -> bool:
    """float() alone takes more, "nan" and "1_0" among it, and float32 less."""
    return bool(_NUMBER.fullmatch(field)) and abs(float(field)) <= _LARGEST


def _floats(fields: Sequence[bytes]) -> NDArray[np.float32]:
    """The numbers in ``fields``, 0 of an empty one; ValueError where one is no float32."""
    if not all(not field or _is_float(field) for field in fields):
        raise ValueError
    return np.array([float(field or 0) for field in fields], dtype=np.float32)


def _bags(feature: BagColumn, fields: Sequence[bytes]) -> Bags:
    """Ids [N], offsets [B + 1] and perhaps weights [N]. ValueError where ``_wrong`` says more."""
    bags = [field.split() for field in fields]
    words = [word for bag in bags for word in bag]
    offsets = np.zeros(len(bags) + 1, dtype=np.int64)
    np.cumsum([len(bag) for bag in bags], out=offsets[1:])
    weights = None
    if feature.weighted:
        pairs = [word.partition(b":") for word in words]
        words = [id_ for id_, _, _ in pairs]
        weights = _floats([weight if colon else b"1" for _, colon, weight in pairs])
        if any(colon and not weight for _, colon, weight in pairs):
            raise ValueError
    if not all(map(_ID.fullmatch, words)):
        raise ValueError
    ids = np.array(list(map(int, words)), dtype=np.int64)
    if feature.hashed:
        ids %= feature.rows
    elif ids.size and ids.max() >= feature.rows:
        raise ValueError
    return (ids, offsets) if weights is None else (ids, offsets, weights)


def _one_each(bags: Iterable[Bags]) -> NDArray[np.int64]:
    """Ids [B, F]; ValueError where a bag has not one."""
    columns = []
    for ids, offsets, *_ in bags:
        if (np.diff(offsets) != 1).any():
            raise ValueError
        columns.append(ids.astype(np.int64, copy=False))
    return np.stack(columns, 1)


def _wrong(feature: BagColumn, word: bytes) -> str | None:
    """What was expected of an id, or None of a good one."""
    one, colon, weight = word.partition(b":")
    if colon and not feature.weighted:
        return "ids without weights (a weighted table has constraint_weighted = true)"
    if colon and not _is_float(weight):
        return "a number behind the colon of a weighted id"
    if not _ID.fullmatch(one):
        return "ids of up to 18 digits, separated by spaces"
    if not feature.hashed and int(one) >= feature.rows:
        return f'ids from 0 to {feature.rows - 1} (data.ids = "modulo" takes others)'
    return None


Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")

_DAY = re.compile(r"day_(\d+)(?:\.\w+)?")
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
        self.path, self.header_line = first.path, first.header_line
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

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are read."""
        return tuple(path for part in self.slices for path in part.log.paths)

    def parse(self, lines: Sequence[bytes]) -> ClickBatch | None:
        """As its logs do."""
        return self.slices[0].log.parse(lines)

    def fault(self, line: bytes) -> Fault | None:
        """As its logs do."""
        return self.slices[0].log.fault(line)

    def is_unclicked(self, line: bytes) -> bool:
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


def slices_of(
    path: Path, days: int | None, opened: Callable[[str], ClickLog]
) -> dict[Part, tuple[LogSlice, ...]]:
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
        middle, before = rows // 2, tuple(LogSlice(file) for file in files[:-1])
    else:
        last = opened(str(path))
        rows = last.count()
        first, middle = bounds(rows, days or 1)
        before = (LogSlice(last, 0, first),)
    if not (first or path.is_dir()) or middle in (first, rows):
        wanted = "rows to train on and two that are held out"
        raise InputError(expected(str(path), wanted, f"{rows} rows, data.days = {days}"))
    return {
        "train": before,
        "validation": (LogSlice(last, first, middle),),
        "test": (LogSlice(last, middle, rows),),
    }
