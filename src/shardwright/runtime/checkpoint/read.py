"""Read a checkpoint into any world size and any cut, after every byte of it was checked."""

# Documents come first: they have to agree with each other and with the files that are there before
# a tensor is looked at. Then every rank verifies its share of the files, and only when all have
# found theirs whole does the first tensor change: a model that is half of one step and half of
# another would train on without a word.

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardwright.core.errors import InputError, MismatchError, RunError, ShardwrightError
from shardwright.runtime.checkpoint import files
from shardwright.runtime.checkpoint.agreement import (
    global_rank,
    rank_and_size,
    reason,
    together,
    total,
)
from shardwright.runtime.checkpoint.folders import newest_step, step_folder
from shardwright.runtime.checkpoint.region import (
    Shared,
    TensorPart,
    check_readable,
    check_region,
    checked,
    dtype_of,
    shared,
    tiles,
    whole,
    window,
)

if TYPE_CHECKING:
    from shardwright.runtime.comm import Comm


@dataclass(slots=True)
class StoredTensor:
    """A tensor and the parts that make it up, each with the rank that wrote it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[int, files.StoredPart]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stored:
    """The manifest, every rank's list, and the tensors by name."""

    folder: Path
    manifest: files.Manifest
    lists: tuple[files.RankList, ...]
    tensors: dict[str, StoredTensor]

    def shard(self, rank: int) -> Path:
        """A rank's tensor file."""
        return self.folder / files.shard_name(rank)

    def check_shards(self, ranks: Iterable[int]) -> None:
        """Raise unless the tensor files of ``ranks`` are what was saved, byte by byte."""
        for rank in ranks:
            files.check_shard(self.shard(rank), self.lists[rank].file, self.lists[rank].pieces)


def open_stored(folder: Path, step: int) -> Stored:
    """Read the documents of ``step`` in ``folder`` and check them against each other.

    Raises InputError or MismatchError, naming the file or tensor, unless there are exactly the
    files that belong there, each of its size, and the parts hold every element exactly once.
    """
    sizes = dict(_files(folder))
    if files.MANIFEST not in sizes:
        raise InputError(str(folder), f"a {files.MANIFEST}", "none", "It is not complete.")
    manifest = files.read_manifest(folder / files.MANIFEST, step)
    ranks = range(manifest.world_size)
    wanted = {files.MANIFEST, *map(files.list_name, ranks), *map(files.shard_name, ranks)}
    if missing := wanted - sizes.keys():
        raise MismatchError(str(folder), f"the file {min(missing)}", "none")
    if extra := sizes.keys() - wanted:
        raise MismatchError(
            str(folder), f"the files of {len(ranks)} ranks", f"{min(extra)!r} as well"
        )
    lists = tuple(
        files.read_list(folder / files.list_name(rank), manifest.lists[rank], manifest, rank)
        for rank in ranks
    )
    # Sizes cost nothing, digests minutes: a file that was cut short is refused before any is
    # hashed.
    for rank, found in enumerate(lists):
        files.check_size(
            folder / files.shard_name(rank), found.file.nbytes, sizes[files.shard_name(rank)]
        )
    return Stored(folder, manifest, lists, _tensors(folder, lists))


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes; a link or a folder is refused."""
    # A link can lead out of the folder, and be another one when it is read again.
    if folder.is_symlink():
        raise InputError(str(folder), "a folder", "a symbolic link")
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    found = "a symbolic link" if entry.is_symlink() else "something else"
                    raise InputError(entry.path, "a plain file", found)
                yield entry.name, entry.stat(follow_symlinks=False).st_size
    except OSError as error:
        raise InputError(str(folder), "a readable folder", f"'{error.strerror}'") from None


def _tensors(folder: Path, lists: Iterable[files.RankList]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for found in lists:
        for piece in found.pieces:
            where = f"{folder / files.list_name(found.rank)}: {piece.tensor}"
            dtype_of(piece.dtype, where)
            check_region(where, piece.shape, piece.offsets, piece.sizes)
            tensor = tensors.setdefault(piece.tensor, StoredTensor(piece.dtype, piece.shape))
            if (tensor.dtype, tensor.shape) != (piece.dtype, piece.shape):
                wanted = f"{tensor.dtype} {tensor.shape} as on other ranks"
                raise MismatchError(where, wanted, f"{piece.dtype} {piece.shape}")
            tensor.pieces.append((found.rank, piece))
    for name, tensor in tensors.items():
        _check_cover(f"{folder}: {name}", tensor)
    return tensors


def _check_cover(where: str, tensor: StoredTensor) -> None:
    regions = [piece.region for _, piece in tensor.pieces]
    elements = math.prod(tensor.shape)
    if not elements:
        if len(regions) != 1:
            raise InputError(where, "a tensor without elements once", f"{len(regions)}")
        return
    covered = sum(math.prod(region.sizes) for region in regions)
    # Counting corners takes every part to hold something.
    if any(0 in region.sizes for region in regions):
        raise InputError(where, "parts that have elements", "one without")
    if covered != elements or not tiles(tensor.shape, regions):
        wanted = f"every one of {elements} elements exactly once"
        found = f"parts of {covered} elements in all" if covered != elements else "an overlap"
        raise MismatchError(where, wanted, found, "All ranks have to list what they hold.")


FEW = 3  # names that a message lists


Wanted = Sequence[TensorPart] | Callable[[Stored], Sequence[TensorPart]]


class Copy(NamedTuple):
    """A rectangle that is read from a stored part into a part that is held."""

    piece: files.StoredPart
    held: TensorPart
    area: Shared


def read_checkpoint(
    folder: Path | str,
    wanted: Wanted,
    comm: Comm | None,
    *,
    step: int | None = None,
    allow_smaller_dtype: bool = False,
    skip: tuple[str, ...] = (),
) -> Stored:
    """Fill ``wanted`` in place from ``step``, by default the newest, and return what the checkpoint
    says besides. Called by all ranks.

    The world size and the cut may be any. Together the ranks want every tensor of the checkpoint
    but those whose names start with one of ``skip``. A wider dtype than the stored one is exact; a
    smaller one rounds and needs ``allow_smaller_dtype``. Without ``comm`` this process is alone.
    Where what is wanted depends on what was saved, ``wanted`` says so once that is verified.

    Every byte is verified before the first tensor changes. InputError or MismatchError on every
    rank, naming the file or tensor: then all tensors are as they were.
    """
    rank, size = rank_and_size(comm)
    folder = Path(folder)

    def failure(error: Exception) -> ShardwrightError:
        where = f"{folder} on rank {global_rank(comm, rank)}"
        return InputError(where, "a readable checkpoint", f"'{reason(error)}'")

    # Ranks that ask for different steps would each fill theirs, and nobody would notice.
    if comm is not None:
        said = {"step": str(step), "skip": repr(skip), "dtypes": str(allow_smaller_dtype)}
        comm.agree(f"checkpoint in {folder}", said)
    chosen = together(comm, "step", lambda: _chosen(folder, step, rank), failure)
    if comm is not None:
        # What rank 0 found counts: while another run saves, ranks that look for themselves may find
        # different ones.
        chosen = int(total(comm, "step of rank 0", {0: chosen} if rank == 0 else {}, 1)[0])

    def verify() -> tuple[Stored, set[str], list[TensorPart]]:
        stored = open_stored(step_folder(folder, chosen), chosen)
        # Every rank hashes its share of the files; that together they are whole is known once all
        # agree.
        stored.check_shards(range(rank, stored.manifest.world_size, size))
        # After the check: what is wanted may follow from what was saved, and that must be whole.
        parts = wanted(stored) if callable(wanted) else wanted
        return stored, {part.name for part in parts}, checked(parts)

    stored, names, parts = together(comm, "verify", verify, failure)
    if comm is not None:
        # One disk for all ranks is an assumption: with a copy of the folder on each host, they may
        # be of different runs.
        comm.agree(f"{stored.folder}", {"manifest": stored.manifest.sha256})
    unread = _unread(stored, names, comm, skip)

    def plan() -> dict[int, list[Copy]]:
        _check_names(stored, names, unread)
        return copies_of(stored, parts, allow_smaller_dtype)

    copies = together(comm, "plan", plan, failure)
    together(comm, "read", lambda: _fill_all(stored, copies, global_rank(comm, rank)), failure)
    return stored


def read_full(
    folder: Path | str, step: int | None = None, skip: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole and on the host, but those that start with ``skip``."""
    stored = _verified(folder, step)
    tensors = {
        name: torch.empty(found.shape, dtype=dtype_of(found.dtype, name))
        for name, found in stored.tensors.items()
        if not name.startswith(skip)
    }
    fill(stored, copies_of(stored, checked([whole(n, t) for n, t in tensors.items()]), False))
    return tensors


def read_parts(folder: Path | str, parts: Sequence[TensorPart], step: int | None = None) -> None:
    """Fill ``parts`` of tensors of a checkpoint, whatever else it has, in one process.

    Every byte is verified first; MismatchError for what the checkpoint lacks.
    """
    stored = _verified(folder, step)
    _check_names(stored, [part.name for part in parts], ())
    fill(stored, copies_of(stored, checked(parts), False))


def _verified(folder: Path | str, step: int | None) -> Stored:
    folder = Path(folder)
    step = _chosen(folder, step, 0)
    stored = open_stored(step_folder(folder, step), step)
    stored.check_shards(range(stored.manifest.world_size))
    return stored


def _chosen(folder: Path, step: int | None, rank: int) -> int:
    """The step to read; only rank 0 looks for the newest."""
    if step is None:
        return newest_step(folder) if rank == 0 else 0
    if type(step) is not int or not 0 <= step <= files.MAX_STEP:
        raise InputError("step", f"an integer from 0 to {files.MAX_STEP}", f"{step!r}")
    return step


def _unread(
    stored: Stored, names: Collection[str], comm: Comm | None, skip: tuple[str, ...]
) -> list[str]:
    """Tensors of the checkpoint that no rank wants."""
    known = list(stored.tensors)
    if comm is None:
        taken = [name in names for name in known]
    else:
        # A tensor that this rank has nothing of may be wanted by another.
        own = {i: 1 for i, name in enumerate(known) if name in names}
        taken = total(comm, "wanted", own, len(known)).bool().tolist()
    pairs = zip(known, taken, strict=True)
    return [name for name, is_taken in pairs if not is_taken and not name.startswith(skip)]


def _check_names(stored: Stored, names: Iterable[str], unread: Sequence[str]) -> None:
    absent = sorted(set(names) - stored.tensors.keys())
    if absent or unread:
        found = [
            f"{len(some)} that {where} lacks ({_few(some)})"
            for where, some in (("the checkpoint", absent), ("the model", unread))
            if some
        ]
        raise MismatchError(str(stored.folder), "the tensors of the model", " and ".join(found))


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more


def copies_of(
    stored: Stored, parts: Iterable[TensorPart], allow_smaller: bool
) -> dict[int, list[Copy]]:
    """What is read from each rank's file; refuses shapes and dtypes that do not fit."""
    copies: dict[int, list[Copy]] = defaultdict(list)
    for part in parts:
        found = stored.tensors[part.name]
        where = f"{stored.folder}: {part.name}"
        if found.shape != tuple(part.shape):
            wanted = f"shape {tuple(part.shape)} as in the model"
            raise MismatchError(where, wanted, f"{found.shape}")
        saved = dtype_of(found.dtype, where)
        check_readable(where, saved, part.tensor.dtype, allow_smaller)
        # By file and not by tensor: each file is opened once, and mapped as far as it is copied.
        for rank, piece in found.pieces:
            areas = shared(found.shape, piece.region, part.region)
            copies[rank].extend(Copy(piece, part, area) for area in areas)
    return copies


def _fill_all(stored: Stored, copies: dict[int, list[Copy]], rank: int) -> None:
    try:
        fill(stored, copies)
    except Exception as error:  # of any kind: verified files do not fail but for the machine
        found = f"'{reason(error)}' on rank {rank}"
        remedy = "Tensors are filled in part; read the checkpoint again."
        raise RunError(str(stored.folder), "to read what was verified", found, remedy) from error


@torch.no_grad()
def fill(stored: Stored, copies: dict[int, list[Copy]]) -> None:
    """Copy from verified files, touching of them what is copied alone."""
    for rank in sorted(copies):
        with files.open_shard(stored.shard(rank)) as shard:
            for piece, held, (box, source, target) in copies[rank]:
                saved = window(shard.get_tensor(piece.key), source, box)
                window(held.tensor, target, box).copy_(saved)
