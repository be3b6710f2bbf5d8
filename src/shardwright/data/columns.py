"""Click logs of one's own: named columns, with ids in bags of any length.

A header line names the columns, separated by tabs, else by commas. The label is 0 or 1, a dense
field a number or nothing (0), and the field of a feature has the ids of its bag, separated by
spaces: none, one or many. An id may be weighted, ``17:0.5``. Other columns are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import InputError, expected, nearest
from shardwright.data.reading import Bags, ClickBatch, ClickLog, Fault, first_lines, shown

_FORMS = "a header line that names columns, separated by tabs or commas"
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_LARGEST = float(np.finfo(np.float32).max)
_ID = re.compile(rb"[0-9]{1,18}")
_NAMES = "Name columns in data.label, data.dense and the tables' features."
_CLICKED = {b"0": False, b"1": True}


@dataclass(frozen=True, slots=True)
class Feature:
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
        features: Sequence[Feature],
        *,
        bags: bool = True,
    ) -> None:
        self.path, self._in_bags = Path(path), bags
        self._label, self._dense_names, self._features = label, tuple(dense), tuple(features)
        self.header_line, first, second = first_lines(self.path, _FORMS, self.longest_line)
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
                found = "several" if name in names else nearest(name, names)
                spot = f"{path}:{self.header_line}, the header"
                raise InputError(expected(spot, f"one column '{name}'", found, _NAMES))
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


def _bags(feature: Feature, fields: Sequence[bytes]) -> Bags:
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


def _wrong(feature: Feature, word: bytes) -> str | None:
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
