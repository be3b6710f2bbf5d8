"""Click logs by what their rows mean: Criteo's, and those of one's own.

A row of Criteo's is a label (0 or 1), 13 counts I1..I13 and 26 hashed categories C1..C26 (at most
32 bits, hexadecimal); any field but the label may be empty. Two spellings are read: the headerless
tab-separated original, and text under the header ``label,I1..I13,C1..C26``; files that name their
columns so are read as well, with hashes as text or as numbers.
The value rules are those of the original DLRM pipeline.

In a log of one's own columns have names. The label is 0 or 1, a dense field a number or nothing
(0), and the field of a feature has the ids of its bag: none, one or many, with blanks, commas,
bars, carets or semicolons between, perhaps in brackets. An id may be weighted, ``17:0.5``, and
text, of which a hash is taken. Other columns are not looked at.
"""

# `parse` takes a batch at once and says nothing of what is wrong in it; `fault` looks at one row,
# slowly, and names the field. The two have to agree on every row: where parse refuses and fault
# finds nothing there is no batch to give and no field to name; where parse takes what fault
# refuses, a row is good or bad by what else is in its batch.

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import InputError, expected, listed, there_are
from shardwright.data.blocks import LABEL
from shardwright.data.files import open_rows
from shardwright.data.lines import Line, Row, RowFile, TextRows, as_lines, fields_of, shown
from shardwright.data.reading import Bags, ClickBatch, ClickLog, Fault

INTEGER_NAMES = tuple(f"I{i}" for i in range(1, 14))
CATEGORY_NAMES = tuple(f"C{i}" for i in range(1, 27))
FIELD_NAMES = (LABEL, *INTEGER_NAMES, *CATEGORY_NAMES)

_FIELDS = len(FIELD_NAMES)
_FIRST_CATEGORY = 1 + len(INTEGER_NAMES)
_HEX_DIGITS = 8  # 32 bits

NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")
_PLAIN = b"0123456789abcdefABCDEF+-.\t,"  # every byte that a good field can have, and fewer
_NAMES_OF_CRITEO = "label,I1..I13,C1..C26"
_OWN = 'A log of your own has data.kind = "columns".'
FORMS = "40 tab-separated fields, or the header line label,I1..I13,C1..C26"


class FileLog(ClickLog):
    """The rows of a file, of which ``columns`` are read, whole numbers of ``hexadecimal`` ones in
    that form."""

    def __init__(self, path: str | Path, forms: str) -> None:
        self._file: RowFile = open_rows(path, forms, self.longest_line)
        self.path = self._file.path
        self._columns: tuple[str, ...] = ()
        self._hexadecimal: tuple[str, ...] = ()

    def rows(self) -> Iterator[Row]:
        """Data rows of one pass with their numbers."""
        return self._file.rows(self._columns, self._hexadecimal)

    def count(self) -> int:
        """Data rows, good or bad, counted in one streaming pass where the file does not say it."""
        known = self._file.count()
        return super().count() if known is None else known


class CriteoLog(FileLog):
    """A Criteo log for tables of ``table_rows`` [26].

    ``dense`` [B, 13] of a batch: log(x + 1) of the counts, with missing and negative counts as 0;
    what TorchRec has stored as logarithms as it stands. ``ids`` [B, 26]: the hash modulo the rows
    of its table, with missing ids as 0. ``spelling`` is ``"tsv"`` or ``"csv"``. A path that is no
    Criteo log raises InputError.
    """

    def __init__(self, path: str | Path, table_rows: Sequence[int]) -> None:
        super().__init__(path, FORMS)
        self._tables = _checked_tables(table_rows)
        self._columns, self._hexadecimal = FIELD_NAMES, CATEGORY_NAMES
        self.spelling, self._separator = "tsv", b"\t"
        if isinstance(self._file, TextRows):
            self._read_first_line(self._file)
        elif missing := [name for name in FIELD_NAMES if name not in self._file.names]:
            wanted = f"columns {_NAMES_OF_CRITEO}"
            found = f"none called {listed(missing, 3)}"
            raise InputError(expected(str(self.path), wanted, found, _OWN))

    def _read_first_line(self, file: TextRows) -> None:
        """Which spelling it is of, and whether the line is a header."""
        self._separator, where = file.separator, f"{self.path}:{file.first_number}"
        fields = file.first.split(file.separator)
        if self._separator != b"\t":
            file.read_header()
            _check_header(self.path, file.first_number, [n.encode() for n in file.names])
            file.check_rows()
            self.spelling = "csv" if self._separator == b"," else f"csv {file.separator.decode()}"
        elif fields == [name.encode() for name in FIELD_NAMES]:
            file.read_header()
            file.check_rows()
        elif not any(map(NUMBER.fullmatch, fields)):
            found = f"a header that names {listed([shown(name) for name in fields], 3)}"
            raise InputError(expected(where, "a row of a Criteo log", found, _OWN))
        self._plain = _PLAIN + self._separator

    _plain = _PLAIN

    def parse(self, lines: Sequence[Line]) -> ClickBatch | None:
        """All the rows at once, or None if ``fault`` would find one in any of them."""
        rows, separator = len(lines), self._separator
        plain = as_lines(lines, separator)
        if any(line.count(separator) != _FIELDS - 1 for line in plain):
            return None
        text = separator.join(plain)
        if text.translate(None, self._plain):
            return None
        fields = text.split(separator) if rows else []
        labels = fields[::_FIELDS]
        if not set(labels) <= {b"0", b"1"}:
            return None
        # Column by column: a slice with a stride is the cheapest way through a flat list.
        numbers = [fields[i::_FIELDS] for i in range(1, _FIRST_CATEGORY)]
        dense = _dense(numbers, self._file.logarithms)
        hashes = _hashes([f for i in range(_FIRST_CATEGORY, _FIELDS) for f in fields[i::_FIELDS]])
        if dense is None or hashes is None:
            return None
        ids = np.ascontiguousarray(hashes.reshape(len(CATEGORY_NAMES), rows).T) % self._tables
        clicked = np.array([label == b"1" for label in labels], dtype=np.float32)
        return ClickBatch(dense, ids, clicked)

    def is_unclicked(self, line: Line) -> bool:
        """Whether the row's label is 0."""
        # Without parsing: of thinned rows most are dropped, and only their label is ever needed.
        if isinstance(line, bytes):
            return line.startswith(b"0" + self._separator)
        return line[0] == b"0"

    def fault(self, line: Line) -> Fault | None:
        """What is wrong with a row, or None."""
        fields = as_lines([line], self._separator)[0].split(self._separator)
        if len(fields) != _FIELDS:
            hint = " (the unlabelled test split has 39)" if len(fields) == _FIELDS - 1 else ""
            return Fault("row", f"{_FIELDS} fields", f"{len(fields)}{hint}")
        if fields[0] not in (b"0", b"1"):
            return Fault("field label", "0 or 1", shown(fields[0]))
        for name, field in zip(FIELD_NAMES[1:], fields[1:], strict=True):
            if name in INTEGER_NAMES and self._file.logarithms:
                good, wanted = is_float(field), "a finite number or nothing"
            elif name in INTEGER_NAMES:
                good = bool(NUMBER.fullmatch(field)) and float(field).is_integer()
                wanted = "a finite whole number or nothing"
            else:
                good, wanted = bool(_HEX.fullmatch(field)), "1 to 8 hexadecimal digits or nothing"
            if field and not good:
                return Fault(f"field {name}", wanted, shown(field))
        return None


def _check_header(path: Path, number: int, names: list[bytes]) -> None:
    wanted = (*map(repr, FIELD_NAMES), "no such column")
    found = (*map(shown, names[: _FIELDS + 1]), *["no such column"] * (_FIELDS + 1 - len(names)))
    for column, (name, other) in enumerate(zip(wanted, found, strict=True), 1):
        if name != other:
            remedy = f"Name the columns {_NAMES_OF_CRITEO}, or use tabs and no header. {_OWN}"
            where = f"{path}:{number}, column {column} of the header"
            raise InputError(expected(where, name, other, remedy))


def _dense(columns: list[list[bytes]], logarithms: bool) -> NDArray[np.float32] | None:
    try:
        counts = np.array([[float(f) if f else 0.0 for f in column] for column in columns]).T
    except ValueError:
        return None
    if logarithms:
        fits = (np.abs(counts) <= _LARGEST).all()
        return np.ascontiguousarray(counts, dtype=np.float32) if fits else None
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


_NAMED_FORMS = "a header line that names columns, with tabs, commas, semicolons or bars between"
_LARGEST = float(np.finfo(np.float32).max)
_NAMES = "Name columns in data.label, data.dense and the tables' features."
_DIGITS = 18  # of an id that is no hash
_ID = re.compile(rb"([0-9]{1,18})(?:\.0*)?")
_HASH = re.compile(rb"([0-9]{1,20})(?:\.0*)?")  # of 64 bits
_BAG = bytes.maketrans(b",|^;[](){}", b" " * 10)  # what else may stand around ids
CLICKED = {
    word: clicked
    for clicked, words in enumerate((b"0 0.0 false False FALSE", b"1 1.0 true True TRUE"))
    for word in words.split()
}


@dataclass(frozen=True, slots=True)
class DenseColumn:
    """A column of numbers: of ``logarithm`` ones log(x + 1) is taken, 0 of negative ones; then
    ``center`` is taken off, and what is left divided by ``spread``. Nothing is 0 after that."""

    name: str
    logarithm: bool = False
    center: float = 0.0
    spread: float = 1.0

    def of(self, numbers: NDArray[np.float64]) -> NDArray[np.float32]:
        """What a model is given of numbers, which are NaN where there are none; ValueError where
        that is no float32."""
        with np.errstate(over="ignore"):
            found = np.log1p(np.maximum(numbers, 0.0)) if self.logarithm else numbers
            found = (found - self.center) / self.spread
        found[np.isnan(numbers)] = 0.0
        if (np.abs(found) > _LARGEST).any():
            raise ValueError
        return found.astype(np.float32)


Ids = Literal["exact", "modulo", "hash"]


@dataclass(frozen=True, slots=True)
class BagColumn:
    """A column of bags of ids below ``rows``; of others than ``"exact"`` ones `number_of` is taken
    modulo that."""

    name: str
    rows: int
    weighted: bool = False
    ids: Ids = "exact"


class ColumnLog(FileLog):
    """A log whose columns are ``label``, ``dense`` numbers and ``features``. Words of ``missing``
    stand for nothing, in dense fields and in bags. ``header`` has the names of all columns of text
    whose first line is a row.

    ``dense`` [B, D] of a batch are the numbers, ``ids`` a mapping of features to (ids, offsets),
    and weights of weighted ones; without ``bags`` they are [B, F], and a row has one id of each
    feature. InputError where a column is missing.
    """

    longest_line = 1 << 20

    def __init__(
        self,
        path: str | Path,
        label: str,
        dense: Sequence[DenseColumn | str],
        features: Sequence[BagColumn],
        *,
        bags: bool = True,
        missing: Collection[str] = (),
        header: Sequence[str] = (),
    ) -> None:
        super().__init__(path, _NAMED_FORMS)
        self._in_bags, self._label = bags, label
        self._dense = tuple(DenseColumn(c) if isinstance(c, str) else c for c in dense)
        self._features = tuple(features)
        self._missing = frozenset((b"", *(word.encode() for word in missing)))
        self._columns = tuple(dict.fromkeys((label, *(c.name for c in (*self._dense, *features)))))
        self._separator, self.spelling, where = b"\0", "\0".join(self._columns), str(self.path)
        names = self._columns
        if isinstance(self._file, TextRows):
            where = self._file.read_header(header)
            self._file.check_rows()
            names, self._separator = self._file.names, self._file.separator
            self.spelling = self._separator.decode().join(names)
        elif header:
            wanted = f"none, for {self.path} names its columns"
            raise InputError(expected("data.header", wanted, listed(header, 3)))
        self._width = len(names)
        for name in self._columns:
            if self._file.names.count(name) != 1:
                several = name in self._file.names
                remedy = _NAMES if several else f"{there_are(name, self._file.names)} {_NAMES}"
                found = "several" if several else "none"
                raise InputError(expected(where, f"one column '{name}'", found, remedy))
        self._place = {name: names.index(name) for name in self._columns}

    def parse(self, lines: Sequence[Line]) -> ClickBatch | None:
        """All the rows at once, or None if ``fault`` would find one in any of them."""
        rows = [fields_of(line, self._separator) for line in lines]
        if any(len(row) != self._width for row in rows):
            return None
        columns = {name: [row[place] for row in rows] for name, place in self._place.items()}
        try:
            clicked = [CLICKED[field.strip()] for field in columns[self._label]]
            dense = [c.of(_numbers(columns[c.name], self._missing)) for c in self._dense]
            bags = {f.name: _bags(f, columns[f.name], self._missing) for f in self._features}
            ids = bags if self._in_bags else _one_each(bags.values())
        except (KeyError, ValueError, OverflowError):
            return None
        numbers = np.array(dense, dtype=np.float32).reshape(len(dense), len(rows)).T
        labels = np.array(clicked, dtype=np.float32)
        return ClickBatch(np.ascontiguousarray(numbers), ids, labels)

    def is_unclicked(self, line: Line) -> bool:
        """Whether the row's label is 0."""
        fields = fields_of(line, self._separator)
        own = fields[self._place[self._label] :][:1]
        return bool(own) and CLICKED.get(own[0].strip()) == 0

    def fault(self, line: Line) -> Fault | None:
        """What is wrong with a row, or None."""
        fields = fields_of(line, self._separator)
        if len(fields) != self._width:
            return Fault("row", f"{self._width} fields, as the header", str(len(fields)))
        label = fields[self._place[self._label]]
        if label.strip() not in CLICKED:
            return Fault(f"column '{self._label}'", "0 or 1", shown(label))
        for column in self._dense:
            field = fields[self._place[column.name]]
            try:
                column.of(_numbers([field], self._missing))
            except ValueError:
                wanted = "a finite number or nothing"
                return Fault(f"column '{column.name}'", wanted, _shown(field))
        for feature in self._features:
            words = words_of(fields[self._place[feature.name]], self._missing)
            if not self._in_bags and len(words) != 1:
                return Fault(f"column '{feature.name}'", "one id", str(len(words)))
            for one in words:
                if (wanted := _wrong(feature, one)) is not None:
                    return Fault(f"column '{feature.name}'", wanted, _shown(one))
        return None


def is_float(field: bytes) -> bool:
    """float() alone takes more, "nan" and "1_0" among it, and float32 less."""
    return bool(NUMBER.fullmatch(field)) and abs(float(field)) <= _LARGEST


def _shown(field: bytes) -> str:
    """A field; and of a word, as what it may be taken."""
    word = field.strip()
    hint = f' (data.missing = ["{word.decode()}"] takes it for nothing)' if word.isalpha() else ""
    return shown(field) + hint


def _numbers(fields: Sequence[bytes], missing: Collection[bytes] = (b"",)) -> NDArray[np.float64]:
    """The numbers in ``fields``, NaN of what is ``missing``; ValueError where one is no float32."""
    fields = list(map(bytes.strip, fields))
    given = [field for field in fields if field not in missing]
    if not all(map(NUMBER.fullmatch, given)):
        raise ValueError
    numbers = np.array(list(map(float, given)), dtype=np.float64)
    if (np.abs(numbers) > _LARGEST).any():
        raise ValueError
    if len(given) == len(fields):
        return numbers
    found = np.full(len(fields), np.nan)
    found[[field not in missing for field in fields]] = numbers
    return found


def words_of(field: bytes, missing: Collection[bytes]) -> list[bytes]:
    """The words of a bag; an apostrophe inside of one is its own."""
    words = [word.strip(b"'\"") for word in field.translate(_BAG).split()]
    return [word for word in words if word not in missing]


def number_of(word: bytes, ids: Ids) -> int | None:
    """The number that an id stands for, None where it is none. A whole number is itself; of text
    of ``"hash"`` it is the first 64 bits of the SHA-256 of its bytes."""
    if match := (_ID if ids == "exact" else _HASH).fullmatch(word):
        return int(match[1])
    return int.from_bytes(sha256(word).digest()[:8], "big") if ids == "hash" and word else None


def _id_and_weight(feature: BagColumn, word: bytes) -> tuple[bytes, bytes]:
    """Both of a word, in which a colon may belong to text; a weight of 1 where there is none."""
    if feature.ids == "hash" and not feature.weighted:
        return word, b"1"
    one, colon, weight = word.rpartition(b":")
    return (one, weight) if colon else (word, b"1")


def _bags(feature: BagColumn, fields: Sequence[bytes], missing: Collection[bytes]) -> Bags:
    """Ids [N], offsets [B + 1] and perhaps weights [N]. ValueError where ``_wrong`` says more."""
    # Nearly all files have nothing but digits and blanks: these are split at once.
    plain = len(missing) == 1 and all(map(bytes.isdigit, b" ".join(fields).split()))
    bags = [field.split() if plain else words_of(field, missing) for field in fields]
    words = [word for bag in bags for word in bag]
    offsets = np.zeros(len(bags) + 1, dtype=np.int64)
    np.cumsum([len(bag) for bag in bags], out=offsets[1:])
    weights = None
    if feature.weighted:
        pairs = [_id_and_weight(feature, word) for word in words]
        words = [id_ for id_, _ in pairs]
        numbers = _numbers([weight for _, weight in pairs], ())
        weights = numbers.astype(np.float32)
    values = list(map(int, words)) if plain else []
    if not plain or max(map(len, words), default=0) > _DIGITS:
        found = [number_of(word, feature.ids) for word in words]
        values = [value for value in found if value is not None]
        if len(values) < len(words):
            raise ValueError
    if feature.ids != "exact":
        values = [value % feature.rows for value in values]
    elif values and max(values) >= feature.rows:
        raise ValueError
    ids = np.array(values, dtype=np.int64)
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
    one, weight = _id_and_weight(feature, word)
    if one != word and not feature.weighted:
        return "ids without weights (a weighted table has constraint_weighted = true)"
    if not is_float(weight):
        return "a number behind the colon of a weighted id"
    if (number := number_of(one, feature.ids)) is None:
        digits = _DIGITS if feature.ids == "exact" else 20
        return f'ids of up to {digits} digits, separated by spaces (data.ids = "hash" takes text)'
    if feature.ids == "exact" and number >= feature.rows:
        return f'ids from 0 to {feature.rows - 1} (data.ids = "modulo" takes others)'
    return None
