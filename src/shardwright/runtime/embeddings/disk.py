"""Rows that lie on disk, as many of them in memory as the plan has room for.

Weights and optimizer states are in a file without a name, which ends with the process. Rows of a
step are looked for in memory first; those from the file take the slots of rows that were not used
for long, which are written back. What finds no slot goes from the file and to it.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from shardwright.core.errors import RunError
from shardwright.core.model import INDEX_BYTES_PER_ROW, ON_DISK, STATE_BYTES_PER_SLOT
from shardwright.core.quantities import format_bytes
from shardwright.core.timeline import Kind
from shardwright.job.job import table_folder
from shardwright.job.plan import Plan
from shardwright.runtime.checkpoint.agreement import together
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.initial import InitialBlock
from shardwright.runtime.embeddings.route import HeldBlock, TableGroup
from shardwright.runtime.embeddings.store import Store
from shardwright.runtime.embeddings.update import Distinct, Looked, Touched
from shardwright.runtime.probe import Probe
from shardwright.tracker.private import without_dispatch_modes

PIECE_BYTES = 2**18  # copied at a time between memory and file
_ELSEWHERE = "Name another folder: train.table_folder."
WINDOW = 4  # slots that are looked at for each that is needed


class _Piece(NamedTuple):
    """Some rows of a step: their range there, which are in memory and in which slots, and which are
    not, with their numbers."""

    at: slice
    hits: torch.Tensor
    slots: torch.Tensor
    misses: torch.Tensor
    rows: torch.Tensor


class DiskRows:
    """Arrays [R, ...] of one row for each number, in a file in ``folder``, and ``slots`` rows of
    each in memory. ``on_disk`` is what the file has; only after ``settle`` is that everything."""

    def __init__(
        self, folder: Path, like: Mapping[str, tuple[tuple[int, ...], torch.dtype]], slots: int
    ) -> None:
        self.on_disk = mapped(folder, like)
        self.memory = {
            name: torch.empty((slots, *shape[1:]), dtype=dtype)
            for name, (shape, dtype) in like.items()
        }
        rows = next(iter(like.values()))[0][0]
        # A number for every row, in memory though rows are not: it is what finds a row in one look.
        self.slot_of = torch.full((rows,), -1, dtype=torch.int32)
        self.row_of = torch.full((slots,), -1)
        self.used = torch.zeros(slots, dtype=torch.int64)  # when each was used last
        self._now = self._hand = 0
        row = sum(t.element_size() * t[:1].numel() for t in self.on_disk.values())
        self._piece = max(PIECE_BYTES // max(row, 1), 1)

    def lasting(self) -> Iterator[torch.Tensor]:
        """What is in memory."""
        yield from self.memory.values()
        yield from (self.slot_of, self.row_of, self.used)

    def read(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """A copy of distinct ``rows`` [M] of an array."""
        disk = self.on_disk[name]
        found = torch.empty(len(rows), *disk.shape[1:], dtype=disk.dtype)
        # Piece by piece: what is copied between file and memory is never more than a piece.
        for piece in self._pieces(rows):
            part = found[piece.at]
            part.index_copy_(0, piece.hits, self.memory[name].index_select(0, piece.slots))
            part.index_copy_(0, piece.misses, _from_disk(disk, piece.rows))
        return found

    def write(self, name: str, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Put ``values`` [M, ...] in place of distinct ``rows`` [M]."""
        for piece in self._pieces(rows):
            part = values[piece.at]
            self.memory[name].index_copy_(0, piece.slots, part.index_select(0, piece.hits))
            _to_disk(self.on_disk[name], piece.rows, part.index_select(0, piece.misses))

    def keep(self, rows: torch.Tensor) -> None:
        """Distinct ``rows`` [M] are in use: bring as many into memory as slots are free for."""
        self._now += 1
        slots = self.slot_of.index_select(0, rows)
        # First, so that no row of this step loses its slot to another row of it.
        self.used.index_fill_(0, slots[slots >= 0].long(), self._now)
        for piece in self._pieces(rows):
            free = self._freed(len(piece.rows))
            coming = piece.rows[: len(free)]
            for name, memory in self.memory.items():
                memory.index_copy_(0, free, _from_disk(self.on_disk[name], coming))
            self.slot_of.index_copy_(0, coming, free.int())
            self.row_of.index_copy_(0, free, coming)
            self.used.index_fill_(0, free, self._now)

    def settle(self) -> None:
        """Write everything to the file; nothing is in memory afterwards."""
        for slots in self.row_of.ge(0).nonzero().squeeze(1).split(self._piece):
            self._write_back(slots)
        self.slot_of.fill_(-1)
        self.row_of.fill_(-1)
        self.used.zero_()

    def _pieces(self, rows: torch.Tensor) -> Iterator[_Piece]:
        for start in range(0, len(rows), self._piece):
            own = rows[start : start + self._piece]
            slots = self.slot_of.index_select(0, own)
            hits, misses = (which.nonzero().squeeze(1) for which in (slots >= 0, slots < 0))
            at = slice(start, start + len(own))
            yield _Piece(at, hits, slots[hits].long(), misses, own[misses])

    def _freed(self, count: int) -> torch.Tensor:
        """At most ``count`` slots whose rows are not in use, of the next ones those that were used
        least lately."""
        slots = len(self.row_of)
        # Not the oldest of all slots, which would need a look at every one: the oldest of some that
        # come next in turn.
        window = min(WINDOW * count, slots)
        if not window:
            return self.row_of[:0]
        near = torch.arange(self._hand, self._hand + window).remainder_(slots)
        self._hand = (self._hand + window) % slots
        used = self.used.index_select(0, near)
        oldest = used.topk(min(count, window), largest=False).indices
        # Those of this step stay. Rows that find no slot for this reason are read from the file.
        found = near[oldest[used[oldest] < self._now]]
        self._write_back(found[self.row_of[found] >= 0])
        return found

    def _write_back(self, slots: torch.Tensor) -> None:
        rows = self.row_of.index_select(0, slots)
        for name, memory in self.memory.items():
            _to_disk(self.on_disk[name], rows, memory.index_select(0, slots))
        self.slot_of.index_fill_(0, rows, -1)


class DiskStore(Store):
    """A store whose rows are ``DiskRows``: ``weight`` and ``states`` are those on disk, complete
    when a block was asked for. They lie in ``folder``."""

    def __init__(
        self,
        group: TableGroup,
        rank: int,
        initial: InitialBlock,
        probe: Probe,
        device: torch.device,
        folder: Path,
    ) -> None:
        # Before the rest, which allocates.
        self.folder = folder
        super().__init__(group, rank, initial, probe, device)

    def _allocate(
        self, like: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        row = sum(_bytes(shape[1:], dtype) for shape, dtype in like.values())
        self.slots = [_slots(item, row) for item in self.held]
        self.slot_bytes = row + STATE_BYTES_PER_SLOT
        self.rows = DiskRows(self.folder, like, sum(self.slots))
        return self.rows.on_disk

    def lasting(self) -> Iterator[tuple[torch.Tensor, Kind]]:
        for tensor in self.rows.lasting():
            yield tensor, "cache"

    def kept(self, item: HeldBlock) -> dict[Kind, int]:
        slots = self.slots[self.held.index(item)]
        return {"cache": slots * self.slot_bytes + item.rows * INDEX_BYTES_PER_ROW}

    def settle(self) -> None:
        self.rows.settle()

    def look_up(self, looked: Looked) -> torch.Tensor:
        if not len(looked.rows):
            return super().look_up(looked)
        distinct, places = Distinct.of(looked.rows, len(self.weight))[:2]
        self.rows.keep(distinct)
        return self._summed(self.rows.read("weight", distinct), looked._replace(rows=places))

    def update(self, looked: Looked, gradient: torch.Tensor, rate: float, number: int) -> None:
        # All rows at once: they are read in the order of the file, once each.
        touched = looked.summed(gradient, len(self.weight))
        self.step(touched, self.squares(touched) if self.dim else None, rate, number)

    def step(
        self, touched: Touched, squares: torch.Tensor | None, rate: float, number: int
    ) -> None:
        (rows, gradient), squares = self.moved(touched, squares)
        if not len(rows):
            return
        states = [self.rows.read(name, rows) for name in self.states]
        change = self.rule.step(states, gradient, squares, rate, number)
        for name, state in zip(self.states, states, strict=True):
            self.rows.write(name, rows, state)
        # Before the weights are read, so that both are not in memory together.
        del states
        weight = self.rows.read("weight", rows)
        self.rows.write("weight", rows, weight.copy_(weight.float().add_(change)))


def disk_for_tables(plan: Plan, comm: Comm, folder: Path | None = None) -> Path:
    """The folder for the tables that ``plan`` has on disk (collective); RunError on every rank
    where it has no room for those of this host."""
    folder = folder or table_folder(plan.job, Path(plan.job.train.out))
    if all(table.compute_kernel != ON_DISK for table in plan.tables):
        return folder
    first = comm.rank - comm.rank % plan.cluster.local_world_size
    beside = plan.ranks[first : first + plan.cluster.local_world_size]
    needed = sum(totals.ssd_bytes for totals in beside)

    def check() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            wanted = f"{format_bytes(needed)} free for tables, as planned"
            raise RunError(str(folder), wanted, format_bytes(free), _ELSEWHERE)

    def failure(error: Exception) -> RunError:
        return RunError(str(folder), "a folder for tables", f"'{error}'", _ELSEWHERE)

    together(comm, "tables on disk", check, failure)
    return folder


def make_store(group: TableGroup, comm: Comm, initial: InitialBlock, folder: Path) -> Store:
    """The rows of a group on this rank; those on disk lie in ``folder``."""
    given = (group, comm.rank, initial, comm.probe, torch.device(comm.mesh.device_type))
    return DiskStore(*given, folder) if group.key.on_disk else Store(*given)


def mapped(
    folder: Path, like: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, torch.Tensor]:
    """Zeros in a new file; RunError where there is no room for it."""
    sizes = {name: _bytes(shape, dtype) for name, (shape, dtype) in like.items()}
    found, nbytes = {}, sum(sizes.values())
    # mmap refuses a file of no bytes.
    if not nbytes:
        return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in like.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserved now. In a sparse file a write that finds the disk full ends the process by
            # SIGBUS, where no error can be raised.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        wanted = f"room for {nbytes:,} bytes of tables"
        raise RunError(str(folder), wanted, f"'{error}'", _ELSEWHERE) from None
    # Rows are read at random: what the system reads ahead would only push out others.
    memory.madvise(mmap.MADV_RANDOM)
    start = 0
    # The widest first, so that each array begins at a multiple of its element.
    for name, (shape, dtype) in sorted(like.items(), key=lambda item: -item[1][1].itemsize):
        count = sizes[name] // dtype.itemsize
        found[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
        start += sizes[name]
    return {name: found[name] for name in like}


def _from_disk(disk: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    found = torch.empty(len(rows), *disk.shape[1:], dtype=disk.dtype)
    with without_dispatch_modes():  # which would take the file for memory
        return torch.index_select(disk, 0, rows, out=found)


def _to_disk(disk: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    with without_dispatch_modes():
        disk.index_copy_(0, rows, values)


def _slots(item: HeldBlock, row: int) -> int:
    """Rows that fit in what a block has of memory, beside the slot of every row."""
    free = item.cache - item.rows * INDEX_BYTES_PER_ROW
    return min(max(free // (row + STATE_BYTES_PER_SLOT), 0), item.rows)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return dtype.itemsize * math.prod(shape)
