"""What the columns of a file may be to a DLRM: its label, numbers, and tables of ids, told by names
and by what the first rows have in them.
"""

# A guess is written into a job with what it rests on, for people to look at; nothing else reads
# it. So a rule that can be said in a line is better here than one that is right more often.

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from shardwright.core.errors import InputError, expected, listed
from shardwright.data.days import day_files, is_days
from shardwright.data.files import open_rows
from shardwright.data.lines import RowFile, TextRows, fields_of, shown
from shardwright.data.logs import (
    CATEGORY_NAMES,
    CLICKED,
    FIELD_NAMES,
    FORMS,
    HASH,
    INTEGER_NAMES,
    ColumnLog,
    CriteoLog,
    DenseColumn,
    is_float,
    words_of,
)

LOOKED_AT = 100_000  # rows at most
NOTHING = ("NULL", "null", "NaN", "nan", "NA", "N/A", "n/a", "None", "none", r"\N", "<NA>", "#N/A")
LABELS = ("label", "click", "clicked", "is_click", "is_clicked", "target", "y", "conversion")
# Whole numbers of a column that is named so are a quantity, and ids otherwise.
QUANTITY = re.compile(
    r"(?:^|_)(?:age|amount|avg|count|cnt|days?|duration|height|hours?|I\d+|income|len|length|mean|"
    r"minutes|num|number|pct|price|quantity|qty|rate|rating|score|seconds|size|sum|time|timestamp|"
    r"total|views?|weight|width|years?)(?:_|$)",
    re.IGNORECASE,
)
_CHUNK = 4096  # rows
_SPARSE = 10  # ids of which fewer than one in so many is there are hashes
_SMALL = 100_000  # rows of a table that may be that empty
_WIDE = 10  # times the median: a number of which the logarithm is taken
_WHOLE_HASH = 2**40


@dataclass(frozen=True, slots=True)
class GuessedTable:
    """A column of ids: ``rows`` are enough for those that there were, of which ``distinct`` are
    different, ``length`` in a row on average; ``hashed`` ones lie far apart."""

    column: str
    rows: int
    distinct: int
    length: float
    hashed: bool


@dataclass(frozen=True, slots=True)
class Guess:
    """Columns of a file by what they may be; ``unused`` ones with the reason. ``whole``: all
    ``rows`` were looked at."""

    is_criteo: bool
    rows: int
    whole: bool
    label: str
    dense: list[DenseColumn]
    tables: list[GuessedTable]
    missing: list[str]
    unused: dict[str, str]

    @property
    def exact(self) -> bool:
        """Whether every id that there is has a row of its own."""
        return self.whole and not any(each.hashed for each in self.tables)


def guess(path: str | Path) -> Guess:
    """Look at the first rows of a log; InputError for what has no label, number or id."""
    first = day_files(Path(path))[0] if is_days(Path(path)) else Path(path)
    file = open_rows(first, FORMS, ColumnLog.longest_line)
    names = _names_of(file)
    if set(FIELD_NAMES) <= set(names):
        return _criteo(first)
    seen = {name: _Seen() for name in dict.fromkeys(names)}
    rows, count = file.rows(names), 0
    separator = file.separator if isinstance(file, TextRows) else b"\0"
    while block := list(islice(rows, min(_CHUNK, LOOKED_AT - count))):
        count += len(block)
        good = [
            fields for *_, line in block if len(fields := fields_of(line, separator)) == len(names)
        ]
        for place, name in enumerate(names):
            seen[name].add([fields[place] for fields in good])
    whole = next(rows, None) is None
    return _sorted_out(str(first), seen, count, whole)


def _names_of(file: RowFile) -> tuple[str, ...]:
    """Of its columns; Criteo's where text has as many and no header."""
    if not isinstance(file, TextRows):
        return file.names
    fields = file.first.split(file.separator)
    if len(fields) == len(FIELD_NAMES) and fields[0] in (b"0", b"1"):
        return FIELD_NAMES
    file.read_header()
    return file.names


def _criteo(path: Path) -> Guess:
    """Of a Criteo log: as many rows of each table as there are different hashes."""
    log = CriteoLog(path, [_WHOLE_HASH] * len(CATEGORY_NAMES))
    rows, count = log.rows(), 0
    distinct: list[set[int]] = [set() for _ in CATEGORY_NAMES]
    while block := list(islice(rows, min(_CHUNK, LOOKED_AT - count))):
        count += len(block)
        batch, _ = log.parsed(block, skip_bad_rows=True)
        assert isinstance(batch.ids, np.ndarray)
        for known, ids in zip(distinct, batch.ids.T, strict=True):
            known.update(ids.tolist())
    tables = [
        GuessedTable(name, max(len(known), 2), len(known), 1.0, True)
        for name, known in zip(CATEGORY_NAMES, distinct, strict=True)
    ]
    dense = [DenseColumn(name, True) for name in INTEGER_NAMES]
    return Guess(True, count, next(rows, None) is None, FIELD_NAMES[0], dense, tables, [], {})


@dataclass(slots=True)
class _Seen:
    """What a column had in it so far, and what it can still be."""

    label: bool = True
    number: bool = True
    ids: bool = True
    example: bytes = b""
    bags: int = 0
    words: int = 0
    longest: int = 0
    missing: set[str] = field(default_factory=set)
    clicks: set[int] = field(default_factory=set)
    numbers: list[float] = field(default_factory=list)
    distinct: set[int] = field(default_factory=set)

    def add(self, fields: Sequence[bytes]) -> None:
        """More fields of it."""
        for each in map(bytes.strip, fields):
            self.bags += 1
            if not each or (word := each.decode("latin-1")) in NOTHING:
                self.missing |= {word} if each else set()
                self.label = False
                continue
            self.example = self.example or each
            self.label = self.label and each in CLICKED
            if self.label:
                self.clicks.add(CLICKED[each])
            self.number = self.number and is_float(each)
            if self.number:
                self.numbers.append(float(each))
            if self.ids:
                self._add_ids(each)

    def _add_ids(self, bag: bytes) -> None:
        words = words_of(bag, ())
        found = [HASH.fullmatch(word.partition(b":")[0]) for word in words]
        self.ids = all(found)
        self.words += len(words)
        self.longest = max(self.longest, len(words))
        self.distinct.update(int(match[1]) for match in found if match)

    @property
    def several(self) -> bool:
        """Whether a row has more than one id."""
        return self.ids and self.longest > 1

    def table(self, name: str) -> GuessedTable:
        """As a column of ids."""
        most, distinct = max(self.distinct), len(self.distinct)
        hashed = most >= max(_SPARSE * distinct, _SMALL)
        rows = max(distinct, 2) if hashed else most + 1
        return GuessedTable(name, rows, distinct, round(self.words / self.bags, 4), hashed)

    def dense(self, name: str) -> DenseColumn:
        """As a column of numbers, which comes to a mean of 0 and a deviation of 1."""
        values = np.array(self.numbers)
        wide = values.min() >= 0 and values.max() > _WIDE * max(float(np.median(values)), 1.0)
        values = np.log1p(values) if wide else values
        center, spread = (float(f"{x:.4g}") for x in (values.mean(), values.std()))
        return DenseColumn(name, bool(wide), center, spread)


def _sorted_out(path: str, seen: dict[str, _Seen], rows: int, whole: bool) -> Guess:
    """Columns by what they may be."""
    labels = [name for name, each in seen.items() if each.label and each.clicks]
    named = [name for name in seen if name.lower() in LABELS and name in labels]
    if not labels:
        found = f"none among {listed([repr(name) for name in seen], 6)}"
        raise InputError(expected(path, "a column of 0 and 1, the label", found))
    label = (named or labels)[0]
    dense: list[DenseColumn] = []
    tables: list[GuessedTable] = []
    unused: dict[str, str] = {}
    for name, each in seen.items():
        if name == label:
            continue
        if reason := _unused(each):
            unused[name] = reason
        elif each.ids and (each.several or not (each.number and QUANTITY.search(name))):
            tables.append(each.table(name))
        else:
            dense.append(each.dense(name))
    for wanted, columns in (("numbers", dense), ("ids", tables)):
        if not columns:
            found = f"none among {listed([repr(name) for name in seen], 6)}"
            raise InputError(expected(path, f"a column of {wanted}, which a DLRM takes", found))
    used = {label, *(each.name for each in dense), *(each.column for each in tables)}
    missing = sorted({word for name in used for word in seen[name].missing})
    return Guess(False, rows, whole, label, dense, tables, missing, unused)


def _unused(column: _Seen) -> str:
    """Why a column is not read; empty where it is."""
    if not column.example:
        return "empty"
    if not column.number and not column.ids:
        return f"text, as {shown(column.example)}"
    if len(column.distinct if column.ids else set(column.numbers)) == 1:
        return f"always {shown(column.example)}"
    return ""


def described(found: Guess) -> Iterator[str]:
    """What the guess is, and rests on, line by line."""
    part = "all" if found.whole else "the first"
    yield f"Guessed from {part} {found.rows:,} rows; look it over:"
    yield f"label {found.label}; dense {', '.join(each.name for each in found.dense)}"
    for each in found.tables:
        far = ", far apart: taken modulo the rows" if each.hashed else ""
        yield f"ids {each.column}: {each.distinct:,} different ones{far}"
    for name, reason in found.unused.items():
        yield f"not used {name}: {reason}"
    if not found.is_criteo:
        yield "Whole numbers are ids unless their name is that of a quantity, as age or price."
