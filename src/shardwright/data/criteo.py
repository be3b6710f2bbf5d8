"""Criteo click logs: 40 fields a row.

A row is a label (0 or 1), 13 counts I1..I13 and 26 hashed categories C1..C26 (at most 32 bits,
hexadecimal); any field but the label may be empty. Two spellings are read: the headerless
tab-separated original, and comma-separated text under the header ``label,I1..I13,C1..C26``.
The value rules are those of the original DLRM pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import InputError, expected
from shardwright.data.reading import ClickBatch, ClickLog, Fault, first_lines, shown

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
