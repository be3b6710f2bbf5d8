"""Criteo click logs: 40 fields a row, streamed from disk and dealt to the ranks in blocks.

A row is a label (0 or 1), 13 counts I1..I13 and 26 hashed categories C1..C26 (at most 32 bits,
hexadecimal); any field but the label may be empty. Two spellings are read: the headerless
tab-separated original, and comma-separated text under the header ``label,I1..I13,C1..C26``.
Lines without a character are not rows. The value rules are those of the original DLRM pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import InputError, expected
from shardwright.data.dealing import Dealt, deal, step_over

INTEGER_NAMES = tuple(f"I{i}" for i in range(1, 14))
CATEGORY_NAMES = tuple(f"C{i}" for i in range(1, 27))
FIELD_NAMES = ("label", *INTEGER_NAMES, *CATEGORY_NAMES)

_FIELDS = len(FIELD_NAMES)
_FIRST_CATEGORY = 1 + len(INTEGER_NAMES)
_HEX_DIGITS = 8  # 32 bits
_LONGEST_LINE = 1 << 16  # a row takes some 300 bytes; a longer line is no row of a click log
_SHOWN = 40  # characters of a bad field that a message repeats

_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")
_PLAIN = b"0123456789abcdefABCDEF+-.\t,"  # every byte that a good row can have

_MEND = "Mend the row, or set data.skip_bad_rows = true to leave such rows out."
_FORMS = "40 tab-separated fields, or the header line label,I1..I13,C1..C26"


@dataclass(frozen=True, slots=True)
class ClickBatch:
    """Rows ready for a model.

    ``dense`` float32 [B, 13]: log(x + 1) of the counts, with missing and negative counts as 0.
    ``ids`` int64 [B, 26]: the hash modulo the rows of its table, with missing ids as 0.
    ``labels`` float32 [B]: 0 or 1.
    """

    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    labels: NDArray[np.float32]


class CriteoReader:
    """An endless iterator of batches of exactly ``batch_size`` rows for one rank.

    The file repeats for ever. Global batch k is rows [k*W*B, (k+1)*W*B) of that endless file and
    rank r owns rows [k*W*B + r*B, +B) of it, so that the global batch is the same for every world
    size W while W*B is. Other ranks' rows are stepped over unparsed; one line and one batch are in
    memory. ``table_rows`` gives the 26 table sizes that the ids are reduced to. After ``dealt`` the
    reader goes on with the rows that are left.

    A bad row raises InputError with file, line and field. With ``skip_bad_rows`` it is counted in
    ``bad_rows`` and the next row that this rank owns fills the batch; as many bad rows one after
    another as the file has rows raise. A path that is no click log raises on construction.
    """

    def __init__(
        self,
        path: str | Path,
        table_rows: Sequence[int],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        skip_bad_rows: bool = False,
        dealt: Sequence[Dealt] = (),
    ) -> None:
        self._path = Path(path)
        self._table_rows = _checked_tables(table_rows)
        _check_share(batch_size, rank, world_size)
        self._batch_size = batch_size
        self._skip_bad_rows = skip_bad_rows
        self._spelling = _detect(self._path)
        self._passes = _Passes()
        # The generators hold no reference to this object: without a cycle the file is closed as
        # soon as the reader is dropped.
        endless = partial(_endless, self._path, self._spelling, self._passes)
        self._owned = deal(endless, dealt, batch_size, rank, world_size)
        self._bad_in_a_row = 0
        self.bad_rows = 0

    @property
    def epoch(self) -> int:
        """Complete passes over the file; it rises when a row of the next pass is asked for."""
        return self._passes.done

    def __iter__(self) -> CriteoReader:
        return self

    def __next__(self) -> ClickBatch:
        rows = list(islice(self._owned, self._batch_size))
        batch = _parse([line for _, line in rows], self._spelling, self._table_rows)
        if batch is not None:
            self._bad_in_a_row = 0
            return batch
        return self._sift(rows)

    def _sift(self, rows: list[_Row]) -> ClickBatch:
        good: list[bytes] = []
        while rows:
            for number, line in rows:
                fault = _fault(line, self._spelling)
                if fault is None:
                    good.append(line)
                    self._bad_in_a_row = 0
                else:
                    self._leave_out(number, fault)
            rows = list(islice(self._owned, self._batch_size - len(good)))
        batch = _parse(good, self._spelling, self._table_rows)
        assert batch is not None
        return batch

    def _leave_out(self, number: int, fault: _Fault) -> None:
        if not self._skip_bad_rows:
            fault.refuse(self._path, number)
        self.bad_rows += 1
        self._bad_in_a_row += 1
        if 0 < self._passes.rows <= self._bad_in_a_row:
            last = f"{fault.field} of line {number} is {fault.found}"
            found = f"{self._bad_in_a_row} bad ones in succession, where {last}"
            remedy = "Check that data.path names a Criteo click log."
            raise InputError(expected(str(self._path), "a good row in a pass", found, remedy))


def evaluation_batches(
    path: str | Path,
    table_rows: Sequence[int],
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    limit: int | None = None,
    skip_bad_rows: bool = False,
) -> Iterator[tuple[ClickBatch, NDArray[np.int64]]]:
    """One rank's batches of a single pass in file order, each with its row indices, int64 [b].

    Rows are dealt as in CriteoReader. The last batches may be short or have no row, and every rank
    yields the same number of batches, so that collectives stay in step. ``limit`` reads only the
    first rows of the file. With ``skip_bad_rows`` a batch is shorter by its bad rows; without it a
    bad row raises InputError. Indices count data rows from 0.
    """
    tables = _checked_tables(table_rows)
    _check_share(batch_size, rank, world_size)
    if limit is not None and limit < 1:
        raise InputError(expected("limit", "a positive number of rows, or None", repr(limit)))
    path = Path(path)
    spelling = _detect(path)
    rows = islice(enumerate(_rows(path, spelling)), limit)

    def usable(number: int, line: bytes) -> bool:
        fault = _fault(line, spelling)
        if fault is not None and not skip_bad_rows:
            fault.refuse(path, number)
        return fault is None

    def batches() -> Iterator[tuple[ClickBatch, NDArray[np.int64]]]:
        while True:
            before = step_over(rows, rank * batch_size)
            own = list(islice(rows, batch_size))
            if not before and not own:
                return
            batch = _parse([line for _, (_, line) in own], spelling, tables)
            if batch is None:
                own = [(index, row) for index, row in own if usable(*row)]
                batch = _parse([line for _, (_, line) in own], spelling, tables)
                assert batch is not None
            yield batch, np.array([index for index, _ in own], dtype=np.int64)
            step_over(rows, (world_size - 1 - rank) * batch_size)

    return batches()


def check_file(path: str | Path) -> str:
    """The spelling of a click log, ``"tsv"`` or ``"csv"``, after parsing its first data row only.

    Raises InputError if the path is no readable click log or that row is bad.
    """
    path = Path(path)
    spelling = _detect(path)
    number, line = next(_rows(path, spelling))
    if (fault := _fault(line, spelling)) is not None:
        fault.refuse(path, number)
    return spelling.name


def count_rows(path: str | Path) -> int:
    """Data rows of a click log, good or bad, counted in one streaming pass."""
    path = Path(path)
    return sum(1 for _ in _rows(path, _detect(path)))


_Row = tuple[int, bytes]  # line number from 1, line


@dataclass(frozen=True, slots=True)
class _Spelling:
    name: str
    separator: bytes
    header_line: int  # 0 without a header


@dataclass(slots=True)
class _Passes:
    done: int = 0
    rows: int = 0  # of the last complete pass


@dataclass(frozen=True, slots=True)
class _Fault:
    field: str
    wanted: str
    found: str

    def refuse(self, path: Path, number: int) -> NoReturn:
        raise InputError(expected(f"{path}:{number}, {self.field}", self.wanted, self.found, _MEND))


def _detect(path: Path) -> _Spelling:
    """Recognizes the spelling by the first line, or says why the file is neither."""
    if not path.is_file():
        found = "a directory" if path.is_dir() else "something else" if path.exists() else "nothing"
        raise InputError(expected(str(path), "a file", found, "Check data.path."))
    try:
        with path.open("rb") as file:
            number, first = _first_line(file)
            _, second = _first_line(file)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(expected(str(path), "a readable file", reason, "Check it.")) from error
    if not first:
        raise InputError(expected(str(path), _FORMS, "an empty file", "Check data.path."))
    _check_text(path, number, first)
    if b"\t" in first:
        return _Spelling("tsv", b"\t", 0)
    _check_header(path, number, first.rstrip(b"\r\n").split(b","))
    if not second:
        raise InputError(expected(str(path), "data rows", "only a header", "Check data.path."))
    return _Spelling("csv", b",", number)


def _first_line(file: BinaryIO) -> tuple[int, bytes]:
    """The next line with a character in it, how many lines on it is, or nothing at the end."""
    number, line = 1, file.readline(_LONGEST_LINE)
    while line and not line.rstrip(b"\r\n"):
        number, line = number + 1, file.readline(_LONGEST_LINE)
    return number, line


def _check_text(path: Path, number: int, first: bytes) -> None:
    found = ""
    if b"\0" in first or first.startswith(b"\x1f\x8b"):  # the latter opens a gzip file
        found = "a binary file"
    elif len(first) >= _LONGEST_LINE:
        found = f"a line of {_LONGEST_LINE} bytes or more"
    elif not first.isascii():
        found = f"{_shown(first)}, which is not plain text"
    elif b"\t" not in first and b"," not in first:
        found = _shown(first.strip())
    if found:
        remedy = "Uncompress it, or check data.path."
        raise InputError(expected(f"{path}:{number}", _FORMS, found, remedy))


def _check_header(path: Path, number: int, names: list[bytes]) -> None:
    wanted = (*map(repr, FIELD_NAMES), "no such column")
    found = (*map(_shown, names[: _FIELDS + 1]), *["no such column"] * (_FIELDS + 1 - len(names)))
    for column, (name, other) in enumerate(zip(wanted, found, strict=True), 1):
        if name != other:
            remedy = "Name the columns label,I1..I13,C1..C26, or use tabs and no header."
            where = f"{path}:{number}, column {column} of the header"
            raise InputError(expected(where, name, other, remedy))


def _rows(path: Path, spelling: _Spelling) -> Iterator[_Row]:
    """Data rows of one pass with their line numbers, ends of line removed."""
    with _opened(path) as file:
        for number, raw in enumerate(iter(partial(file.readline, _LONGEST_LINE), b""), 1):
            if len(raw) == _LONGEST_LINE:
                found = f"{_LONGEST_LINE} bytes without an end of line"
                raise InputError(expected(f"{path}:{number}", "a row of a click log", found))
            line = raw.rstrip(b"\r\n")
            if line and number != spelling.header_line:
                yield number, line


def _opened(path: Path) -> BinaryIO:
    """InputError where the file is there no more."""
    try:
        return path.open("rb", buffering=1 << 18)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(expected(str(path), "a readable file", reason, "Restore it.")) from error


def _endless(path: Path, spelling: _Spelling, passes: _Passes, start: int) -> Iterator[_Row]:
    """From row ``start`` of the endless file on."""
    while True:
        rows = 0
        for rows, row in enumerate(_rows(path, spelling), 1):
            if rows > start:
                yield row
        if not rows:
            raise InputError(expected(str(path), "data rows", "no longer any", "Restore the file."))
        whole = max(start // rows, 1)  # whole passes before the start are not read again
        passes.done += whole
        passes.rows = rows
        start = max(start - whole * rows, 0)


def _parse(lines: list[bytes], spelling: _Spelling, tables: NDArray[np.int64]) -> ClickBatch | None:
    """All the rows at once, or None if ``_fault`` would find one in any of them."""
    rows, separator = len(lines), spelling.separator
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
    ids = np.ascontiguousarray(hashes.reshape(len(CATEGORY_NAMES), rows).T) % tables
    return ClickBatch(dense, ids, np.array([label == b"1" for label in labels], dtype=np.float32))


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


def _fault(line: bytes, spelling: _Spelling) -> _Fault | None:
    """What is wrong with a row, or None: the slow twin of ``_parse`` that can name the field."""
    fields = line.split(spelling.separator)
    if len(fields) != _FIELDS:
        hint = " (the unlabelled test split has 39)" if len(fields) == _FIELDS - 1 else ""
        return _Fault("row", f"{_FIELDS} fields", f"{len(fields)}{hint}")
    if fields[0] not in (b"0", b"1"):
        return _Fault("field label", "0 or 1", _shown(fields[0]))
    for name, field in zip(FIELD_NAMES[1:], fields[1:], strict=True):
        if name in INTEGER_NAMES:
            good = _NUMBER.fullmatch(field) and float(field).is_integer()
            wanted = "a finite whole number or nothing"
        else:
            good, wanted = _HEX.fullmatch(field), "1 to 8 hexadecimal digits or nothing"
        if field and not good:
            return _Fault(f"field {name}", wanted, _shown(field))
    return None


def _shown(text: bytes) -> str:
    """One quoted line of printable ASCII, shortened."""
    more = f" (and {len(text) - _SHOWN} bytes more)" if len(text) > _SHOWN else ""
    return repr(text[:_SHOWN])[1:] + more


def _checked_tables(table_rows: Sequence[int]) -> NDArray[np.int64]:
    if len(table_rows) != len(CATEGORY_NAMES):
        raise InputError(expected("table_rows", "26 table sizes", f"{len(table_rows)} of them"))
    for name, rows in zip(CATEGORY_NAMES, table_rows, strict=True):
        if rows < 1:
            raise InputError(expected(f"table_rows, {name}", "a positive size", f"{rows}"))
    return np.array(table_rows, dtype=np.int64)


def _check_share(batch_size: int, rank: int, world_size: int) -> None:
    if batch_size < 1:
        raise InputError(expected("batch_size", "a positive number of rows", f"{batch_size}"))
    if world_size < 1 or not 0 <= rank < world_size:
        raise InputError(expected("rank", "0 <= rank < world_size", f"{rank} of {world_size}"))
