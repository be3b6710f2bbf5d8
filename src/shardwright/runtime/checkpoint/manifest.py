"""What is written beside the tensors: a list for each rank, and the manifest that commits them.

No document names a file: names follow from the rank, so no path in one can lead anywhere. A rank's
list carries the digest of its tensor file, the manifest those of the lists, and its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from shardwright.core.document import decode_json, encode_document, read_bytes
from shardwright.core.errors import InputError, MismatchError, expected
from shardwright.runtime.checkpoint.region import MAX_DIMS, MAX_ELEMENTS, Box

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


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    pieces: tuple[Piece, ...]
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
    zeroed = raw.replace(manifest.sha256.encode(), _NO_DIGEST.encode(), 1)
    check_digest(path, manifest.sha256, hashlib.sha256(zeroed).hexdigest())
    if manifest.step != step:
        raise MismatchError(expected(f"{path}: step", f"{step}", f"{manifest.step}"))
    if len(manifest.lists) != manifest.world_size:
        wanted = f"{manifest.world_size}, one per rank"
        raise InputError(expected(f"{path}: lists", wanted, f"{len(manifest.lists)}"))
    return manifest


def read_list(path: Path, digest: FileDigest, manifest: Manifest, rank: int) -> RankList:
    """A rank's list, checked against the manifest before it is decoded."""
    raw = read_bytes(path, "rank's list")
    check_size(path, digest.nbytes, len(raw))
    check_digest(path, digest.sha256, hashlib.sha256(raw).hexdigest())
    found = _decode(raw, path, RankList, RANK_SCHEMA)
    for what in ("step", "world_size"):
        if getattr(found, what) != getattr(manifest, what):
            wanted = f"{getattr(manifest, what)} as in {MANIFEST}"
            raise MismatchError(expected(f"{path}: {what}", wanted, f"{getattr(found, what)}"))
    if found.rank != rank:
        raise MismatchError(expected(f"{path}: rank", f"{rank}", f"{found.rank}"))
    return found


def check_size(path: Path, nbytes: int, found: int) -> None:
    """Raise MismatchError unless a file is as long as was written down."""
    if found != nbytes:
        raise MismatchError(
            expected(
                str(path),
                f"{nbytes} bytes",
                f"{found}",
                f"The file is not what was saved: {AWAY}",
            )
        )


def check_digest(path: Path, sha256: str, found: str) -> None:
    """Raise MismatchError unless a file's sha256 is what was written down."""
    if found != sha256:
        raise MismatchError(
            expected(
                str(path),
                f"sha256 {sha256[:12]}...",
                f"{found[:12]}...",
                f"The file was changed after it was saved: {AWAY}",
            )
        )


def _decode(raw: bytes, path: Path, kind: type[T], schema: str) -> T:
    try:
        found = decode_json(raw, _Tag).schema
        if found != schema:
            raise InputError(expected(f"{path}: schema", f"'{schema}'", f"'{found}'"))
        return decode_json(raw, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a valid {schema.partition('/')[0]}: {error}.") from None
