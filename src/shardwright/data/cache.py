"""Rows of a click log in binary, written once and mapped into memory by every rank.

A cache is a folder with an array for each column as its tables are given it, and a list of them.
Nothing is read but the rows of a batch, and what was read is let go of again, so that a rank's
memory does not grow with the log.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright.core.document import read_document, write_document
from shardwright.core.errors import InputError, expected
from shardwright.data.dealing import Dealt, deal
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


class Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a cache: its rows, those that were bad and left out, and its files. ``bags`` are
    features with files ``ids-K``, ``offsets-K`` and perhaps ``weights-K``."""

    schema: Literal["shardwright.rows/1"]
    rows: int
    bad_rows: int
    bags: tuple[str, ...]
    arrays: dict[str, Array]


class _Writer:
    """Appends batches to the files of a folder."""

    def __init__(self, folder: Path, narrow: bool) -> None:
        self._folder, self._ids = folder, np.dtype("<i4" if narrow else "<i8")
        self._files: dict[str, BinaryIO] = {}
        self._arrays: dict[str, Array] = {}
        self._stack = ExitStack()
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
        if name not in self._arrays:
            self._append(name, np.zeros(1, np.dtype("<i8")))
        before = self._arrays[f"ids-{place}"].shape[0] if f"ids-{place}" in self._arrays else 0
        self._append(f"ids-{place}", ids.astype(self._ids))
        self._append(name, offsets[1:].astype("<i8") + before)
        if weights:
            self._append(f"weights-{place}", weights[0].astype("<f4"))

    def _append(self, name: str, values: NDArray[Any]) -> None:
        if name not in self._files:
            self._files[name] = self._stack.enter_context((self._folder / name).open("wb"))
            self._arrays[name] = Array(values.dtype.str, (0, *values.shape[1:]))  # type: ignore[arg-type]
        values.tofile(self._files[name])
        known = self._arrays[name]
        shape = (known.shape[0] + len(values), *known.shape[1:])
        self._arrays[name] = Array(known.dtype, shape)

    def close(self, bad_rows: int) -> Rows:
        """Write the list of what is there."""
        self._stack.close()
        found = Rows(SCHEMA, self.rows, bad_rows, self.bags, self._arrays)
        write_document(found, self._folder / LIST)
        return found

    def drop(self) -> None:
        """Leave the files as they are."""
        self._stack.close()


def write_cache(
    log: ClickLog,
    folder: Path,
    *,
    narrow: bool,
    skip_bad_rows: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Rows:
    """Parse all rows of ``log`` once and write them into ``folder``, whole or not at all; ids in
    four bytes where all are ``narrow``. A bad row raises InputError unless it is to be skipped."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        writer = _Writer(part, narrow)
        try:
            bad, rows, shown = 0, log.rows(), _SAID
            while lines := list(islice(rows, _CHUNK)):
                batch, left_out = log.parsed(lines, skip_bad_rows)
                bad += left_out
                writer.add(batch)
                if writer.rows >= shown:
                    shown += _SAID
                    say(f"{writer.rows:,} rows so far")
            found = writer.close(bad)
        finally:
            writer.drop()
        if not found.rows:
            raise InputError(expected(str(log.path), "rows to keep", "none"))
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


@dataclass(slots=True)
class _Mapped:
    values: NDArray[Any]
    pages: mmap.mmap | None

    def let_go(self) -> None:
        """Give back the memory of what was read; it is in the file."""
        if self.pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED)


class CachedRows:
    """The rows of a cache; InputError for a folder that is none, or has not all of its bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.list = read_document(folder / LIST, Rows, SCHEMA, "data.cache")
        self._mapped = {name: self._map(name, of) for name, of in self.list.arrays.items()}
        self._read = 0

    def __len__(self) -> int:
        return self.list.rows

    def batch(self, start: int, stop: int) -> ClickBatch:
        """Rows [start, stop)."""
        found = ClickBatch(
            np.array(self._mapped["dense"].values[start:stop], dtype=np.float32),
            self._ids(start, stop),
            self._mapped["labels"].values[start:stop].astype(np.float32),
        )
        self._read += sum(values.nbytes for values in _arrays_of(found))
        if self._read > _LET_GO:
            self._read = 0
            for mapped in self._mapped.values():
                mapped.let_go()
        return found

    def _ids(self, start: int, stop: int) -> NDArray[np.int64] | dict[str, Bags]:
        if not self.list.bags:
            return self._mapped["ids"].values[start:stop].astype(np.int64)
        return {name: self._bags(place, start, stop) for place, name in enumerate(self.list.bags)}

    def _bags(self, place: int, start: int, stop: int) -> Bags:
        offsets = self._mapped[f"offsets-{place}"].values[start : stop + 1].astype(np.int64)
        own = slice(int(offsets[0]), int(offsets[-1]))
        ids = self._mapped[f"ids-{place}"].values[own].astype(np.int64)
        weights = self._mapped.get(f"weights-{place}")
        found = (ids, offsets - offsets[0])
        return found if weights is None else (*found, np.array(weights.values[own], np.float32))

    def _map(self, name: str, of: Array) -> _Mapped:
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
        values = np.frombuffer(pages or b"", dtype=of.dtype).reshape(of.shape)
        return _Mapped(values, pages)


class CachedReader:
    """What a ClickReader gives, from a cache: an endless iterator of one rank's batches, dealt in
    the same way. A rank touches its own rows alone."""

    bad_rows = 0  # they were left out when the cache was written

    def __init__(
        self,
        rows: CachedRows,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        dealt: Sequence[Dealt] = (),
    ) -> None:
        check_share(batch_size, rank, world_size)
        self._rows, self._batch_size = rows, batch_size
        self._places = deal(_Places, dealt, batch_size, rank, world_size)

    def __iter__(self) -> CachedReader:
        return self

    def __next__(self) -> ClickBatch:
        places = np.fromiter(islice(self._places, self._batch_size), np.int64) % len(self._rows)
        ends = np.flatnonzero(np.diff(places) != 1) + 1
        parts = [self._rows.batch(int(own[0]), int(own[-1]) + 1) for own in np.split(places, ends)]
        return parts[0] if len(parts) == 1 else _joined(parts)


class _Places:
    """The numbers from ``start`` on, of which many can be stepped over at once."""

    def __init__(self, start: int) -> None:
        self._next = start

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self._next += 1
        return self._next - 1

    def step_over(self, count: int) -> int:
        """Leave out ``count`` of them."""
        self._next += count
        return count


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
