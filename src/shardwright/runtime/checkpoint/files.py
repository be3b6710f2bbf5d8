"""The files of a checkpoint: each rank's tensors and its list, and the manifest that commits them.

No document names a file: names follow from the rank, so no path in one can lead anywhere. A rank's
list carries the digest of its tensor file, the manifest those of the lists, and its own.

A tensor file is safetensors' format (a length, a JSON header, the bytes), written in one pass with
its digest and read as a memory map.
"""

# So one changed byte is found before anything is filled. safetensors' own writer wants every tensor
# in host memory at once and a second pass for the digest; its format is simple and written here in
# chunks. Its own reader maps privately, which a limit on a process's data counts as a copy.

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from shardwright.core.document import decode_json, encode_document, read_bytes
from shardwright.core.errors import InputError, MismatchError
from shardwright.runtime.checkpoint.region import (
    CODES,
    DTYPES,
    MAX_DIMS,
    MAX_ELEMENTS,
    Box,
    TensorPart,
    dtype_name,
    dtype_of,
)

SCHEMA: Literal["shardwright.checkpoint/1"] = "shardwright.checkpoint/1"
RANK_SCHEMA: Literal["shardwright.checkpoint_rank/1"] = "shardwright.checkpoint_rank/1"
MANIFEST = "manifest.json"
MAX_STEP = 2**53
MAX_RANKS = 2**20
_NO_DIGEST = "0" * 64

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]
Counts = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMS)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class FileDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and sha256 of a file."""

    nbytes: Count
    sha256: Digest


class StoredPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a tensor as stored; ``shape`` is the whole tensor's, dtypes are torch's names."""

    tensor: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    dtype: str
    shape: Counts
    offsets: Counts
    sizes: Counts

    @property
    def region(self) -> Box:
        """Where the part lies."""
        return Box(self.offsets, self.sizes)

    @property
    def key(self) -> str:
        """Its name in the rank's tensor file; no two parts of a rank share one."""
        return f"{self.tensor}@{','.join(map(str, self.offsets))}"


class RankList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank wrote: ``file`` is its tensor file, ``scalars`` its own plain values."""

    schema: Literal["shardwright.checkpoint_rank/1"]
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    file: FileDigest
    pieces: tuple[StoredPart, ...]
    scalars: dict[str, Any]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint: ``lists`` are the digests of every rank's list, in rank order.

    ``sha256`` is the document's own, taken with zeros in its place.
    """

    schema: Literal["shardwright.checkpoint/1"]
    sha256: Digest
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    facts: dict[str, str]
    lists: tuple[FileDigest, ...]


T = TypeVar("T", bound=msgspec.Struct)


class _Tag(msgspec.Struct):
    schema: str = ""


def list_name(rank: int) -> str:
    """A rank's list."""
    return f"rank-{rank}.json"


def shard_name(rank: int) -> str:
    """A rank's tensors."""
    return f"rank-{rank}.safetensors"


AWAY = "move its folder away, and the step before it is the newest."


def digest_of(raw: bytes) -> FileDigest:
    """Size and sha256 of bytes."""
    return FileDigest(len(raw), hashlib.sha256(raw).hexdigest())


def sealed(step: int, facts: Mapping[str, str], lists: tuple[FileDigest, ...]) -> bytes:
    """The manifest as it is written, with its own digest."""
    manifest = Manifest(SCHEMA, _NO_DIGEST, step, len(lists), dict(facts), lists)
    digest = hashlib.sha256(encode_document(manifest)).hexdigest()
    return encode_document(msgspec.structs.replace(manifest, sha256=digest))


def read_manifest(path: Path, step: int) -> Manifest:
    """The manifest of ``step``; InputError for another schema or type, MismatchError if changed."""
    raw = read_bytes(path, "manifest")
    manifest = _decode(raw, path, Manifest, SCHEMA)
    # The digest of a document that has its own digest in it: taken with zeros there. The first
    # place that reads like it is the field's, which comes right behind the schema.
    zeroed = raw.replace(manifest.sha256.encode(), _NO_DIGEST.encode(), 1)
    check_digest(path, manifest.sha256, hashlib.sha256(zeroed).hexdigest())
    if manifest.step != step:
        raise MismatchError(f"{path}: step", f"{step}", f"{manifest.step}")
    if len(manifest.lists) != manifest.world_size:
        wanted = f"{manifest.world_size}, one per rank"
        raise InputError(f"{path}: lists", wanted, f"{len(manifest.lists)}")
    return manifest


def read_list(path: Path, digest: FileDigest, manifest: Manifest, rank: int) -> RankList:
    """A rank's list, checked against the manifest before it is decoded."""
    raw = read_bytes(path, "rank's list")
    # Before it is decoded: a changed document is refused for that and not for what it happens to
    # say.
    check_size(path, digest.nbytes, len(raw))
    check_digest(path, digest.sha256, hashlib.sha256(raw).hexdigest())
    found = _decode(raw, path, RankList, RANK_SCHEMA)
    for what in ("step", "world_size"):
        if getattr(found, what) != getattr(manifest, what):
            wanted = f"{getattr(manifest, what)} as in {MANIFEST}"
            raise MismatchError(f"{path}: {what}", wanted, f"{getattr(found, what)}")
    if found.rank != rank:
        raise MismatchError(f"{path}: rank", f"{rank}", f"{found.rank}")
    return found


def check_size(path: Path, nbytes: int, found: int) -> None:
    """Raise MismatchError unless a file is as long as was written down."""
    if found != nbytes:
        raise MismatchError(
            str(path), f"{nbytes} bytes", f"{found}", f"The file is not what was saved: {AWAY}"
        )


def check_digest(path: Path, sha256: str, found: str) -> None:
    """Raise MismatchError unless a file's sha256 is what was written down."""
    if found != sha256:
        remedy = f"The file was changed after it was saved: {AWAY}"
        raise MismatchError(str(path), f"sha256 {sha256[:12]}...", f"{found[:12]}...", remedy)


def _decode(raw: bytes, path: Path, kind: type[T], schema: str) -> T:
    try:
        found = decode_json(raw, _Tag).schema
        if found != schema:
            raise InputError(f"{path}: schema", f"'{schema}'", f"'{found}'")
        return decode_json(raw, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a valid {schema.partition('/')[0]}: {error}.") from None


CHUNK_BYTES = 32 * 2**20  # copied to the host and hashed at a time


def piece_of(held: TensorPart) -> StoredPart:
    """How a part is listed."""
    name = dtype_name(held.tensor.dtype, held.name)
    return StoredPart(held.name, name, held.shape, held.offsets, held.sizes)


def write_shard(path: Path, held: Sequence[TensorPart]) -> FileDigest:
    """Write the parts to a new file, wait until the disk has it, and return its digest."""
    # Widest elements first, so that all are aligned in the file without padding between them.
    ordered = sorted(held, key=lambda h: (-h.tensor.element_size(), piece_of(h).key))
    digest, nbytes = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in _chunks(ordered):
            file.write(chunk)
            digest.update(chunk)
            nbytes += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(nbytes, digest.hexdigest())


def _chunks(ordered: Sequence[TensorPart]) -> Iterator[bytes | memoryview]:
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for part in ordered:
        piece, start = piece_of(part), end
        end += part.tensor.nbytes
        header[piece.key] = {
            "dtype": CODES[piece.dtype],
            "shape": list(piece.sizes),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # widest dtypes come first, so all are aligned
    yield len(text).to_bytes(8, "little") + text
    for part in ordered:
        flat = part.tensor.detach().reshape(-1)
        step = CHUNK_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            host = flat[start : start + step].contiguous().cpu()  # a column is strided
            yield host.view(torch.uint8).numpy().data


def check_shard(path: Path, file: FileDigest, pieces: Sequence[StoredPart]) -> None:
    """Raise unless the file is the one that was written and holds exactly ``pieces``."""
    # Before the file is hashed: a list that was made up may declare any size.
    declared = sum(math.prod(p.sizes) * dtype_of(p.dtype, p.tensor).itemsize for p in pieces)
    if declared >= file.nbytes:
        wanted = f"more than the {declared} bytes of its tensors"
        raise MismatchError(str(path), wanted, f"{file.nbytes}")
    try:
        check_size(path, file.nbytes, path.stat().st_size)
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise InputError(str(path), "a readable file", f"'{error.strerror}'") from None
    check_digest(path, file.sha256, found)
    with open_shard(path) as shard:
        _check_header(path, shard, pieces)


def _check_header(path: Path, shard: Any, pieces: Sequence[StoredPart]) -> None:
    keys = {piece.key for piece in pieces}
    if len(keys) != len(pieces):
        raise InputError(str(path), "each part once in the rank's list", "one twice")
    if differing := keys.symmetric_difference(shard.keys()):
        key = min(differing)
        found = "only in the list" if key in keys else "only in the file"
        raise MismatchError(f"{path}: {key}", "the tensors of the rank's list", found)
    for piece in pieces:
        stored = shard.get_slice(piece.key)
        wanted = (CODES[piece.dtype], tuple(piece.sizes))
        found_look = (stored.get_dtype(), tuple(stored.get_shape()))
        if found_look != wanted:
            raise MismatchError(f"{path}: {piece.key}", f"{wanted}", f"{found_look}")


class MappedShard:
    """A safetensors file, mapped to be read: tensors lie in it, and nothing may write to them.

    safetensors' own tensors lie in a private mapping that can be written to, which a limit on a
    process's data, or a host that promises no memory twice, counts as if it were copied.
    """

    def __init__(self, path: Path, opened: Any) -> None:
        self._opened = opened  # by safetensors, which has checked the header
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._metadata = header.pop("__metadata__", None)
        self._header, self._start = header, 8 + size

    def keys(self) -> list[str]:
        """Names of its tensors."""
        return list(self._header)

    def metadata(self) -> dict[str, str] | None:
        """What the file says besides."""
        return self._metadata  # type: ignore[no-any-return]

    def get_slice(self, name: str) -> Any:
        """safetensors' view of a tensor, for its dtype and shape."""
        return self._opened.get_slice(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """The tensor, of which what is touched is read."""
        entry = self._header[name]
        start, end = entry["data_offsets"]
        dtype = _BY_CODE.get(entry["dtype"])
        if dtype is None:
            known = ", ".join(_BY_CODE)
            raise InputError(f"tensor '{name}'", f"one of {known}", entry["dtype"])
        # A map has no address for nothing.
        if start == end:
            return torch.empty(entry["shape"], dtype=dtype)
        # torch warns of memory that cannot be written to, and a read-only map is the point; so it
        # is given an address, and the object that keeps it alive.
        address = np.frombuffer(self._memory, np.uint8).ctypes.data + self._start + start
        data = (ctypes.c_char * (end - start)).from_address(address)
        data.mapping = self._memory  # type: ignore[attr-defined]  # which ends with the tensor
        return torch.frombuffer(data, dtype=dtype).view(entry["shape"])


_BY_CODE = {code: DTYPES[name] for name, code in CODES.items()}


@contextlib.contextmanager
def open_shard(path: Path) -> Iterator[MappedShard]:
    """A safetensors file; ``get_tensor`` maps it and reads what is touched."""
    try:
        # By safetensors, which checks the header: offsets that lead out of the file, or into each
        # other, are refused there.
        with safe_open(path, framework="np") as opened:
            yield MappedShard(path, opened)
    except SafetensorError as error:
        raise InputError(str(path), "a safetensors file", f"'{error}'") from None
    except OSError as error:
        raise InputError(str(path), "a readable file", f"'{error}'") from None
