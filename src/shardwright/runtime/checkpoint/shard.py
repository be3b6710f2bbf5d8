"""The tensor file of one rank: written in one pass with its digest, read as a memory map.

safetensors' own writer wants every tensor in host memory at once and a second pass for the
digest, so its format (a length, a JSON header, the bytes) is written here and read by safetensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from shardwright.core.errors import InputError, MismatchError, expected
from shardwright.runtime.checkpoint.held import CODES, DTYPES, Held, dtype_name, dtype_of
from shardwright.runtime.checkpoint.manifest import FileDigest, Piece, check_digest, check_size

CHUNK_BYTES = 32 * 2**20  # copied to the host and hashed at a time


def piece_of(held: Held) -> Piece:
    """How a part is listed."""
    name = dtype_name(held.tensor.dtype, held.name)
    return Piece(held.name, name, held.shape, held.offsets, held.sizes)


def write_shard(path: Path, held: Sequence[Held]) -> FileDigest:
    """Write the parts to a new file, wait until the disk has it, and return its digest."""
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


def _chunks(ordered: Sequence[Held]) -> Iterator[bytes | memoryview]:
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for part in ordered:
        piece, start = piece_of(part), end
        end += part.tensor.numel() * part.tensor.element_size()
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


def check_shard(path: Path, file: FileDigest, pieces: Sequence[Piece]) -> None:
    """Raise unless the file is the one that was written and holds exactly ``pieces``."""
    declared = sum(math.prod(p.sizes) * dtype_of(p.dtype, p.tensor).itemsize for p in pieces)
    if declared >= file.nbytes:
        wanted = f"more than the {declared} bytes of its tensors"
        raise MismatchError(expected(str(path), wanted, f"{file.nbytes}"))
    try:
        check_size(path, file.nbytes, path.stat().st_size)
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise InputError(expected(str(path), "a readable file", f"'{error.strerror}'")) from None
    check_digest(path, file.sha256, found)
    with open_shard(path) as shard:
        _check_header(path, shard, pieces)


def _check_header(path: Path, shard: Any, pieces: Sequence[Piece]) -> None:
    keys = {piece.key for piece in pieces}
    if len(keys) != len(pieces):
        raise InputError(expected(str(path), "each part once in the rank's list", "one twice"))
    if differing := keys.symmetric_difference(shard.keys()):
        key = min(differing)
        found = "only in the list" if key in keys else "only in the file"
        raise MismatchError(expected(f"{path}: {key}", "the tensors of the rank's list", found))
    for piece in pieces:
        stored = shard.get_slice(piece.key)
        wanted = (CODES[piece.dtype], tuple(piece.sizes))
        found_look = (stored.get_dtype(), tuple(stored.get_shape()))
        if found_look != wanted:
            raise MismatchError(expected(f"{path}: {piece.key}", f"{wanted}", f"{found_look}"))


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
            raise InputError(expected(f"tensor '{name}'", f"one of {known}", entry["dtype"]))
        if start == end:
            return torch.empty(entry["shape"], dtype=dtype)
        address = np.frombuffer(self._memory, np.uint8).ctypes.data + self._start + start
        data = (ctypes.c_char * (end - start)).from_address(address)
        data.mapping = self._memory  # type: ignore[attr-defined]  # which ends with the tensor
        return torch.frombuffer(data, dtype=dtype).view(entry["shape"])


_BY_CODE = {code: DTYPES[name] for name, code in CODES.items()}


@contextlib.contextmanager
def open_shard(path: Path) -> Iterator[MappedShard]:
    """A safetensors file; ``get_tensor`` maps it and reads what is touched."""
    try:
        with safe_open(path, framework="np") as opened:
            yield MappedShard(path, opened)
    except SafetensorError as error:
        raise InputError(expected(str(path), "a safetensors file", f"'{error}'")) from None
    except OSError as error:
        raise InputError(expected(str(path), "a readable file", f"'{error}'")) from None
