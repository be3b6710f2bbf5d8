"""A checkpoint on disk whose documents are read and agree; of its tensors nothing is read yet."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.core.errors import InputError, MismatchError, expected
from shardwright.runtime.checkpoint.held import dtype_of
from shardwright.runtime.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Piece,
    RankList,
    check_size,
    list_name,
    read_list,
    read_manifest,
    shard_name,
)
from shardwright.runtime.checkpoint.region import check_region, tiles
from shardwright.runtime.checkpoint.shard import check_shard


@dataclass(slots=True)
class StoredTensor:
    """A tensor and the parts that make it up, each with the rank that wrote it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[int, Piece]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stored:
    """The manifest, every rank's list, and the tensors by name."""

    folder: Path
    manifest: Manifest
    lists: tuple[RankList, ...]
    tensors: dict[str, StoredTensor]

    def shard(self, rank: int) -> Path:
        """A rank's tensor file."""
        return self.folder / shard_name(rank)

    def check_shards(self, ranks: Iterable[int]) -> None:
        """Raise unless the tensor files of ``ranks`` are what was saved, byte by byte."""
        for rank in ranks:
            check_shard(self.shard(rank), self.lists[rank].file, self.lists[rank].pieces)


def open_stored(folder: Path, step: int) -> Stored:
    """Read the documents of ``step`` in ``folder`` and check them against each other.

    Raises InputError or MismatchError, naming the file or tensor, unless there are exactly the
    files that belong there, each of its size, and the parts hold every element exactly once.
    """
    sizes = dict(_files(folder))
    if MANIFEST not in sizes:
        raise InputError(expected(str(folder), f"a {MANIFEST}", "none", "It is not complete."))
    manifest = read_manifest(folder / MANIFEST, step)
    ranks = range(manifest.world_size)
    wanted = {MANIFEST, *map(list_name, ranks), *map(shard_name, ranks)}
    if missing := wanted - sizes.keys():
        raise MismatchError(expected(str(folder), f"the file {min(missing)}", "none"))
    if extra := sizes.keys() - wanted:
        raise MismatchError(
            expected(str(folder), f"the files of {len(ranks)} ranks", f"{min(extra)!r} as well")
        )
    lists = tuple(
        read_list(folder / list_name(rank), manifest.lists[rank], manifest, rank) for rank in ranks
    )
    for rank, found in enumerate(lists):
        check_size(folder / shard_name(rank), found.file.nbytes, sizes[shard_name(rank)])
    return Stored(folder, manifest, lists, _tensors(folder, lists))


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes; a link or a folder is refused."""
    if folder.is_symlink():
        raise InputError(expected(str(folder), "a folder", "a symbolic link"))
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    found = "a symbolic link" if entry.is_symlink() else "something else"
                    raise InputError(expected(entry.path, "a plain file", found))
                yield entry.name, entry.stat(follow_symlinks=False).st_size
    except OSError as error:
        raise InputError(
            expected(str(folder), "a readable folder", f"'{error.strerror}'")
        ) from None


def _tensors(folder: Path, lists: Iterable[RankList]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for found in lists:
        for piece in found.pieces:
            where = f"{folder / list_name(found.rank)}: {piece.tensor}"
            dtype_of(piece.dtype, where)
            check_region(where, piece.shape, piece.offsets, piece.sizes)
            tensor = tensors.setdefault(piece.tensor, StoredTensor(piece.dtype, piece.shape))
            if (tensor.dtype, tensor.shape) != (piece.dtype, piece.shape):
                wanted = f"{tensor.dtype} {tensor.shape} as on other ranks"
                raise MismatchError(expected(where, wanted, f"{piece.dtype} {piece.shape}"))
            tensor.pieces.append((found.rank, piece))
    for name, tensor in tensors.items():
        _check_cover(f"{folder}: {name}", tensor)
    return tensors


def _check_cover(where: str, tensor: StoredTensor) -> None:
    regions = [piece.region for _, piece in tensor.pieces]
    elements = math.prod(tensor.shape)
    if not elements:
        if len(regions) != 1:
            raise InputError(expected(where, "a tensor without elements once", f"{len(regions)}"))
        return
    covered = sum(math.prod(region.sizes) for region in regions)
    if any(0 in region.sizes for region in regions):
        raise InputError(expected(where, "parts that have elements", "one without"))
    if covered != elements or not tiles(tensor.shape, regions):
        raise MismatchError(
            expected(
                where,
                f"every one of {elements} elements exactly once",
                f"parts of {covered} elements in all" if covered != elements else "an overlap",
                "All ranks have to list what they hold.",
            )
        )
