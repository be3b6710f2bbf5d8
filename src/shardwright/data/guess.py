"""What the columns of a file may be to a DLRM: its label, numbers, and tables of ids, told by names
and by what the first rows have in them.
"""

# A guess is written into a job with what it rests on, for people to look at; nothing else reads
# it. So a rule that can be said in a line is better here than one that is right more often.

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from shardwright.core.errors import InputError, expected, listed
from shardwright.data.days import bounds, day_files, is_days
from shardwright.data.files import open_rows
from shardwright.data.lines import RowFile, TextRows, fields_of, shown
from shardwright.data.logs import (
    CATEGORY_NAMES,
    CLICKED,
    FIELD_NAMES,
    INTEGER_NAMES,
    ColumnLog,
    CriteoLog,
    DenseColumn,
    Ids,
    is_float,
    number_of,
    words_of,
)

LOOKED_AT = 100_000  # rows at most
HELD_OUT = 10  # one part of so many, the last one
NOTHING = frozenset(rb"NULL null NaN nan NA N/A n/a None none \N <NA> #N/A".split())
LABELS = ("label", "click", "clicked", "is_click", "is_clicked", "target", "y", "conversion")
# Whole numbers of a column that is named so are a quantity, and ids otherwise.
QUANTITY = re.compile(
    r"(?:^|_)(?:age|amount|avg|count|cnt|days?|duration|height|hours?|I\d+|income|len|length|mean|"
    r"minutes|num|number|pct|price|quantity|qty|rate|rating|score|seconds|size|sum|time|timestamp|"
    r"total|views?|weight|width|years?)(?:_|$)",
    re.IGNORECASE,
)
_FORMS = "a click log: Parquet, or text with tabs, commas, semicolons or bars between fields"
_DATE = re.compile(rb"\d{1,4}([-/])\d\d?\1\d{1,4}(?!\d).*")
_COMMA = re.compile(rb"[+-]?\d+,\d+")
_CHUNK = 4096  # rows
_ODD = 3  # different words that may stand for nothing among numbers
_MOSTLY = 0.9  # of all fields of such a column are numbers
_SPARSE = 10  # ids of which fewer than one in so many is there are hashes
_SMALL = 100_000  # rows of a table that may be that empty
_ROOM = 4  # rows for every hash that was seen: about one in five shares its own then
_MANY = 1000  # rows of which every one has another id, as requests are numbered
_WIDE = 10  # times the median: a number of which the logarithm is taken
_WHOLE_HASH = 2**40


@dataclass(frozen=True, slots=True)
class GuessedTable:
    """A column of ids to be read as ``ids``: ``rows`` are enough for those that there were, of
    which ``distinct`` are different, ``length`` in a row on average."""

    column: str
    rows: int
    distinct: int
    length: float
    ids: Ids


@dataclass(frozen=True, slots=True)
class Guess:
    """Columns of a file by what they may be; ``unused`` ones with the reason. ``whole``: all
    ``rows`` were looked at. ``clicks`` are the labels of good ones, in their order,
    ``header`` the names of columns that have none."""

    label: str
    clicks: list[int]
    dense: list[DenseColumn]
    tables: list[GuessedTable]
    missing: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)
    is_criteo: bool = False
    rows: int = 0
    whole: bool = False

    @property
    def ids(self) -> Ids:
        """As all of them are read; as they stand only where each is known to have a row."""
        found = {each.ids for each in self.tables}
        exact: Ids = "exact" if self.whole and found == {"exact"} else "modulo"
        return "hash" if "hash" in found else exact

    @property
    def can_hold_out(self) -> bool:
        """Whether there are rows for it."""
        return not self.whole or self.rows >= 2 * HELD_OUT


def guess(path: str | Path) -> Guess:
    """Look at the first rows of a log; InputError for what has no label, number or id."""
    days = day_files(Path(path)) if is_days(Path(path)) else []
    first = days[0] if days else Path(path)
    file = open_rows(first, _FORMS, ColumnLog.longest_line)
    names = _names_of(file)
    if set(FIELD_NAMES) <= set(names):
        return _criteo(first, bool(days))
    unused = file.unreadable()
    unused |= {name: "several columns of that name" for name in names if names.count(name) > 1}
    read = [name for name in names if name not in unused]
    rows, count, separator = file.rows(read), 0, b"\0"
    header: list[str] = []
    if isinstance(file, TextRows):  # whose rows have all columns
        separator = file.separator
        header = [] if file.header_line else list(names)
    else:
        names = tuple(read)
    seen = {name: _Seen(name) for name in read}
    while block := list(islice(rows, min(_CHUNK, LOOKED_AT - count))):
        every = [fields_of(line, separator) for *_, line in block]
        good = [fields for fields in every if len(fields) == len(names)]
        if not count and not good:
            wanted, told = f"{len(names)} fields, as in the first line", str(len(every[0]))
            raise InputError(expected(f"{path}:{block[0][1]}, all rows", wanted, told))
        count += len(block)
        for name, fields in zip(names, zip(*good, strict=True), strict=False):
            if name in seen:
                seen[name].add(fields)
    found = _sorted_out(str(path), list(seen.values()), unused)
    whole = next(rows, None) is None and not days
    return replace(found, rows=count, whole=whole, header=header)


def _names_of(file: RowFile) -> tuple[str, ...]:
    """Of its columns; Criteo's where text has as many and no header."""
    if not isinstance(file, TextRows):
        return file.names
    fields = file.first.split(file.separator)
    if len(fields) == len(FIELD_NAMES) and fields[0] in (b"0", b"1"):
        return FIELD_NAMES
    # A frame without names has their numbers for names.
    counted = [b"%d" % at for at in range(len(fields) + 1)]
    names = [field.decode("utf-8", "backslashreplace").lower() for field in fields]
    is_row = bool(CLICKED.keys() & set(fields)) and not set(names) & set(LABELS)
    if is_row and fields not in (counted[:-1], counted[1:]):
        file.read_header([f"column_{at}" for at in range(1, len(fields) + 1)])
    else:
        file.read_header()
    file.check_rows()
    return file.names


def _criteo(path: Path, more: bool) -> Guess:
    """Of a Criteo log, which goes on in ``more`` files."""
    log = CriteoLog(path, [_WHOLE_HASH] * len(CATEGORY_NAMES))
    rows, count, clicks = log.rows(), 0, list[int]()
    distinct: list[set[int]] = [set() for _ in CATEGORY_NAMES]
    while block := list(islice(rows, min(_CHUNK, LOOKED_AT - count))):
        count += len(block)
        batch, _ = log.parsed(block, skip_bad_rows=True)
        assert isinstance(batch.ids, np.ndarray)
        clicks += batch.labels.astype(int).tolist()
        for known, ids in zip(distinct, batch.ids.T, strict=True):
            known.update(ids.tolist())
    tables = [
        GuessedTable(name, _ROOM * max(len(known), 1), len(known), 1.0, "modulo")
        for name, known in zip(CATEGORY_NAMES, distinct, strict=True)
    ]
    dense = [DenseColumn(name, True) for name in INTEGER_NAMES]
    found = Guess(FIELD_NAMES[0], clicks, dense, tables, is_criteo=True)
    return replace(found, rows=count, whole=next(rows, None) is None and not more)


@dataclass(slots=True)
class _Seen:
    """What a column had in it so far."""

    name: str
    wrong: bytes | None = None  # the first that is no label
    odd: set[bytes] = field(default_factory=set)  # that are no numbers, a few of them
    bags: int = 0
    filled: int = 0  # of them
    words: int = 0
    first: bytes = b""
    missing: set[bytes] = field(default_factory=set)
    clicks: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    distinct: set[bytes] = field(default_factory=set)  # words

    def add(self, fields: Sequence[bytes]) -> None:
        """More fields of it."""
        self.bags += len(fields)
        for each in map(bytes.strip, fields):
            every = words_of(each, (b"",))
            words = [word for word in every if word not in NOTHING]
            self.missing.update(NOTHING.intersection(every))
            if self.wrong is None and each in CLICKED:
                self.clicks.append(CLICKED[each])
            elif self.wrong is None:
                self.wrong = each
            if words:
                self._add(each, words)

    def _add(self, field: bytes, words: Sequence[bytes]) -> None:
        self.first = self.first or field
        self.filled += 1
        if is_float(field):
            self.numbers.append(float(field))
        elif len(self.odd) <= _ODD:
            self.odd.add(field)
        self.words += len(words)
        self.distinct.update(words)

    @property
    def is_constant(self) -> bool:
        """Whether all rows have the same."""
        return len(self.distinct if self.odd else set(self.numbers)) == 1

    @property
    def is_dense(self) -> bool:
        """Whether it is of numbers that are no ids, but for a few words."""
        few = len(self.odd) <= _ODD and len(self.numbers) > _MOSTLY * self.filled
        fractions = not all(map(float.is_integer, self.numbers))
        return few and (fractions or bool(QUANTITY.search(self.name)))

    def unused(self) -> str:
        """Why it is not read; empty where it is."""
        if not self.first:
            return "empty"
        if self.is_constant:
            return f"always {shown(self.first)}"
        if _DATE.fullmatch(self.first):
            return f"a date, as {shown(self.first)}"
        if self.is_dense:
            return ""
        if QUANTITY.search(self.name) and all(map(_COMMA.fullmatch, self.odd)):
            return f"numbers with a comma in place of a point, as {shown(self.first)}"
        numbers = [float(word) for word in self.distinct if is_float(word)]
        if len(numbers) == len(self.distinct) and not all(map(float.is_integer, numbers)):
            return f"several numbers, as {shown(self.first)}"
        if len(self.distinct) == self.words == self.bags >= _MANY:
            return "another one in every row"
        return ""

    def table(self) -> GuessedTable:
        """As a column of ids."""
        whole = all(number_of(word, "modulo") is not None for word in self.distinct)
        numbers = {number_of(word, "hash") or 0 for word in self.distinct}
        most, distinct = max(numbers), len(numbers)
        far = most >= max(_SPARSE * distinct, _SMALL)
        ids: Ids = ("modulo" if far else "exact") if whole else "hash"
        rows = most + 1 if ids == "exact" else _ROOM * distinct
        return GuessedTable(self.name, rows, distinct, round(self.words / self.bags, 4), ids)

    def dense(self) -> DenseColumn:
        """As a column of numbers, which comes to a mean of 0 and a deviation of 1."""
        values = np.array(self.numbers)
        wide = values.min() >= 0 and values.max() > _WIDE * max(float(np.median(values)), 1.0)
        values = np.log1p(values) if wide else values
        center, spread = (float(f"{x:.4g}") for x in (values.mean(), values.std()))
        return DenseColumn(self.name, bool(wide), center, spread or 1.0)


def _sorted_out(path: str, seen: list[_Seen], unused: dict[str, str]) -> Guess:
    """Columns by what they may be."""
    labels = [each for each in seen if each.wrong is None and each.clicks]
    # One by its name, and of these one with both in it, before others.
    labels.sort(key=lambda each: (each.name.lower() not in LABELS, len(set(each.clicks)) == 1))
    others = [each for each in seen if each not in labels[:1]]
    unused |= {each.name: reason for each in others if (reason := each.unused())}
    if not labels:
        unused |= {e.name: f"has {shown(e.wrong or b'')}" for e in seen if e.name.lower() in LABELS}
    used = [each for each in others if each.name not in unused]
    dense, tables = ([each for each in used if each.is_dense is kind] for kind in (True, False))
    # A model needs a number, and one that is always the same will do.
    dense = dense or [each for each in others if each.is_constant and not each.odd][:1]
    for wanted, columns, remedy in (
        ("a column of 0 and 1, the label", labels, ""),
        ("a column of numbers, which a DLRM takes", dense, "One with a 1 in every row will do."),
        ("a column of ids, which a DLRM takes", tables, ""),
    ):
        if not columns:
            said = [f"'{name}' ({why})" for name, why in unused.items()]
            said += [f"'{each.name}'" for each in seen if each.name not in unused]
            raise InputError(expected(path, wanted, f"none among {listed(said, 6)}", remedy))
    for each in dense:
        unused.pop(each.name, None)
    words = set().union(*(each.missing for each in used), *(each.odd for each in dense))
    missing = sorted(word.decode("utf-8", "replace") for word in words)
    return Guess(
        labels[0].name,
        labels[0].clicks,
        [each.dense() for each in dense],
        [each.table() for each in tables],
        missing,
        unused=unused,
    )


def described(found: Guess) -> Iterator[str]:
    """What the guess is, and rests on, line by line."""
    part = "all" if found.whole else "the first"
    yield f"Guessed from {part} {found.rows:,} rows; look it over:"
    yield f"label {found.label}; dense {', '.join(each.name for each in found.dense)}"
    if found.header:
        yield "The first line is a row: columns have their numbers in data.header for names."
    said = {"exact": "", "modulo": ", far apart: taken modulo the rows", "hash": ", hashed"}
    for each in found.tables:
        room = "" if each.ids == "exact" else f", {_ROOM} rows for each"
        yield f"ids {each.column}: {each.distinct:,} different ones{said[each.ids]}{room}"
    for name, reason in found.unused.items():
        yield f"not used {name}: {reason}"
    if found.missing:
        yield f"nothing is meant by {', '.join(map(repr, found.missing))} (data.missing)"
    if bad := found.rows - len(found.clicks):
        yield f"bad rows: {bad:,}; training stops at the first one without data.skip_bad_rows"
    yield from _of_labels(found)
    if not found.is_criteo:
        yield "Whole numbers are ids unless their name is that of a quantity, as age or price."


def _of_labels(found: Guess) -> Iterator[str]:
    """What scores of held-out rows cannot be told from these labels."""
    if not found.can_hold_out:
        yield f"{found.rows} rows are too few to hold some out: there will be no AUC."
    elif len(set(found.clicks)) == 1:
        yield f"every label is {found.clicks[0]}: nothing can be learned, and AUC has no value."
    elif found.whole:
        first, _ = bounds(len(found.clicks), HELD_OUT)
        if len(set(found.clicks[first:])) == 1:
            yield (
                f"every label of the last rows, which are held out, is {found.clicks[-1]}: AUC has "
                "no value there. Shuffle the rows."
            )
