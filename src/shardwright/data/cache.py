"""Rows of a click log in binary, written once and mapped into memory by every rank.

A cache is a folder with an array for each column as its tables are given it, and a list of them.
Nothing is read but the rows of a batch, and what was read is let go of again, so that a rank's
memory does not grow with the log.
"""

# Parsing text is what limits a CPU that trains a small DLRM, so rows are parsed once. A cache is
# renamed into place whole: two runs may write it at the same time, and whoever is second throws
# its own away. Pages of a map that were touched stay resident until they are given back; without
# `_let_go` a rank would grow to the size of the log, and so would every other rank.

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright.core.document import read_document, write_document
from shardwright.core.errors import InputError, expected
from shardwright.data.reading import Bags, ClickBatch, ClickLog, check_share

SCHEMA = "shardwright.rows/1"
LIST = "rows.json"
_CHUNK = 16384  # rows that are parsed together
_LET_GO = 64 << 20  # bytes that are read between two times that mapped pages are let go of
_REMEDY = "Remove the folder: it is written again."
_SAID = 5_000_000  # rows between two words about progress


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of ``shape`` numbers, the first dimension rows, or a number for each id of bags."""

    dtype: Literal["<f4", "<i4", "<i8", "|u1"]
    shape: tuple[int, ...]


class CachedList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a cache: its rows, those that were bad and left out, and its files. ``bags`` are
    features with files ``ids-K``, ``offsets-K`` and perhaps ``weights-K``."""

    schema: Literal["shardwright.rows/1"]
    rows: int
    bad_rows: int
    bags: tuple[str, ...]
    arrays: dict[str, Array]


class _Writer:
    """Appends batches to the files of a folder."""

    def __init__(self, folder: Path, narrow: bool, stack: ExitStack) -> None:
        self._folder, self._ids = folder, np.dtype("<i4" if narrow else "<i8")
        self._files: dict[str, BinaryIO] = {}
        self._stack = stack  # closes them
        self.arrays: dict[str, Array] = {}
        self.bags: tuple[str, ...] = ()
        self.rows = 0

    def add(self, batch: ClickBatch) -> None:
        """One batch more."""
        if isinstance(batch.ids, dict):
            self.bags = tuple(batch.ids)
            for place, bag in enumerate(batch.ids.values()):
                self._add_bags(place, bag)
        else:
            self._append("ids", batch.ids.astype(self._ids))
        self._append("labels", batch.labels.astype(np.uint8))
        self._append("dense", batch.dense.astype("<f4"))
        self.rows += len(batch.labels)

    def _add_bags(self, place: int, bag: Bags) -> None:
        ids, offsets, *weights = bag
        name = f"offsets-{place}"
        if name not in self.arrays:
            self._append(name, np.zeros(1, np.dtype("<i8")))
        before = self.arrays[f"ids-{place}"].shape[0] if f"ids-{place}" in self.arrays else 0
        self._append(f"ids-{place}", ids.astype(self._ids))
        self._append(name, offsets[1:].astype("<i8") + before)
        if weights:
            self._append(f"weights-{place}", weights[0].astype("<f4"))

    def _append(self, name: str, values: NDArray[Any]) -> None:
        if name not in self._files:
            self._files[name] = self._stack.enter_context((self._folder / name).open("wb"))
            self.arrays[name] = Array(values.dtype.str, (0, *values.shape[1:]))  # type: ignore[arg-type]
        values.tofile(self._files[name])
        known = self.arrays[name]
        shape = (known.shape[0] + len(values), *known.shape[1:])
        self.arrays[name] = Array(known.dtype, shape)


def write_cache(
    log: ClickLog,
    folder: Path,
    *,
    narrow: bool,
    skip_bad_rows: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> CachedList:
    """Parse all rows of ``log`` once and write them into ``folder``, whole or not at all; ids in
    four bytes where all are ``narrow``. A bad row raises InputError unless it is to be skipped."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        with ExitStack() as stack:
            writer = _Writer(part, narrow, stack)
            bad, rows, shown = 0, log.rows(), _SAID
            while lines := list(islice(rows, _CHUNK)):
                batch, left_out = log.parsed(lines, skip_bad_rows)
                bad += left_out
                writer.add(batch)
                if writer.rows >= shown:
                    shown += _SAID
                    say(f"{writer.rows:,} rows so far")
        found = CachedList(SCHEMA, writer.rows, bad, writer.bags, writer.arrays)
        if not found.rows:
            raise InputError(expected(str(log.path), "rows to keep", "none"))
        write_document(found, part / LIST)  # last: whoever finds it finds the arrays whole
        if not folder.exists():  # somebody else may have been faster
            part.rename(folder)
        return found
    except OSError as error:
        reason = error.strerror or type(error).__name__
        remedy = "Choose another data.cache."
        wanted = "a folder that can be written"
        raise InputError(expected(str(folder), wanted, f"'{reason}'", remedy)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


class CachedRows:
    """The rows of a cache; InputError for a folder that is none, or has not all of its bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.list = read_document(folder / LIST, CachedList, SCHEMA, "data.cache")
        self._pages: list[mmap.mmap] = []
        self._values = {name: self._map(name, of) for name, of in self.list.arrays.items()}
        self._read = 0

    def __len__(self) -> int:
        return self.list.rows

    def batch(self, start: int, stop: int) -> ClickBatch:
        """Rows [start, stop)."""
        found = ClickBatch(
            np.array(self._values["dense"][start:stop], dtype=np.float32),
            self._ids(start, stop),
            self._values["labels"][start:stop].astype(np.float32),
        )
        self._read += sum(values.nbytes for values in _arrays_of(found))
        if self._read > _LET_GO:
            self._read = 0
            self._let_go()
        return found

    def at(self, numbers: NDArray[np.int64]) -> ClickBatch:
        """Rows by their numbers, which count on from pass to pass; neighbours are read together."""
        # A pass follows the last one without a seam, so a batch may end in the next pass.
        places = numbers % len(self)
        ends = np.flatnonzero(np.diff(places) != 1) + 1
        parts = [self.batch(int(own[0]), int(own[-1]) + 1) for own in np.split(places, ends)]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _let_go(self) -> None:
        """Give back the memory of what was read; it is in the files."""
        # Pages of a read-only map are clean: dropping them loses nothing, the next access reads
        # again.
        if hasattr(mmap, "MADV_DONTNEED"):
            for pages in self._pages:
                pages.madvise(mmap.MADV_DONTNEED)

    def _ids(self, start: int, stop: int) -> NDArray[np.int64] | dict[str, Bags]:
        if not self.list.bags:
            return self._values["ids"][start:stop].astype(np.int64)
        return {name: self._bags(place, start, stop) for place, name in enumerate(self.list.bags)}

    def _bags(self, place: int, start: int, stop: int) -> Bags:
        # Offsets of the file count from its beginning, those of a batch from its first id.
        offsets = self._values[f"offsets-{place}"][start : stop + 1].astype(np.int64)
        own = slice(int(offsets[0]), int(offsets[-1]))
        ids = self._values[f"ids-{place}"][own].astype(np.int64)
        weights = self._values.get(f"weights-{place}")
        found = (ids, offsets - offsets[0])
        return found if weights is None else (*found, np.array(weights[own], np.float32))

    def _map(self, name: str, of: Array) -> NDArray[Any]:
        path, size = self.folder / name, np.dtype(of.dtype).itemsize * int(np.prod(of.shape))
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found == size:
                    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
        except OSError as error:
            reason = f"'{error.strerror or type(error).__name__}'"
            raise InputError(expected(str(path), "a file of the cache", reason, _REMEDY)) from error
        if found != size:
            raise InputError(expected(str(path), f"{size} bytes", str(found), _REMEDY))
        if pages is not None:
            self._pages.append(pages)
        return np.frombuffer(pages or b"", dtype=of.dtype).reshape(of.shape)


def cached_evaluation(
    rows: CachedRows, batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[ClickBatch, NDArray[np.int64]]]:
    """One rank's batches of a single pass, each with its rows' numbers, as
    ``reading.evaluation_batches`` has them."""
    check_share(batch_size, rank, world_size)
    for first in range(0, len(rows), batch_size * world_size):
        start = min(first + rank * batch_size, len(rows))
        stop = min(start + batch_size, len(rows))
        yield rows.batch(start, stop), np.arange(start, stop)


def _arrays_of(batch: ClickBatch) -> Iterator[NDArray[Any]]:
    yield from (batch.dense, batch.labels)
    if isinstance(batch.ids, dict):
        for bag in batch.ids.values():
            yield from bag
    else:
        yield batch.ids


def _joined(parts: Sequence[ClickBatch]) -> ClickBatch:
    """Batches one after another."""
    ids: NDArray[np.int64] | dict[str, Bags]
    if isinstance(parts[0].ids, dict):
        ids = {name: _joined_bags([part.ids[name] for part in parts]) for name in parts[0].ids}  # type: ignore[index]
    else:
        ids = np.concatenate([part.ids for part in parts])  # type: ignore[misc]
    dense = np.concatenate([part.dense for part in parts])
    return ClickBatch(dense, ids, np.concatenate([part.labels for part in parts]))


def _joined_bags(parts: Sequence[Bags]) -> Bags:
    ends, before = [np.zeros(1, np.int64)], 0
    for _, offsets, *_ in parts:
        ends.append(offsets[1:] + before)
        before += int(offsets[-1])
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return (columns[0], np.concatenate(ends), *columns[2:])
