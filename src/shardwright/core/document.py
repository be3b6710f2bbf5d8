"""JSON documents with a schema tag: read with one-line errors, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shardwright.core.errors import InputError, expected

MAX_DOCUMENT_BYTES = 256 * 2**20

T = TypeVar("T", bound=msgspec.Struct)


def read_bytes(path: Path | str, what: str, remedy: str = "") -> bytes:
    """A file's bytes, or one line that says why not."""
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError(expected(str(path), f"a {what} file", "a directory", remedy))
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise InputError(expected(str(path), f"a {what} below 256 MiB", "a larger file"))
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(expected(str(path), f"a {what} file", "no such file", remedy)) from None
    except OSError as error:
        raise InputError(
            expected(str(path), f"a readable {what} file", f"'{error.strerror}'", remedy)
        ) from None


def read_document(path: Path | str, kind: type[T], schema: str, made_by: str) -> T:
    """Decode ``path`` as ``kind``; another schema, an unknown field, bad JSON: InputError."""
    name = schema.split("/")[0].split(".")[-1]
    raw = read_bytes(path, name, f"Make one with `{made_by}`.")
    found = _schema_of(raw, path, name)
    if found != schema:
        raise InputError(
            expected(
                f"{path}: schema",
                f"'{schema}'",
                f"'{found}'" if found else "none",
                f"Make it again with `{made_by}`.",
            )
        )
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InputError(f"{path}: not a valid {name}: {error}.") from None


def _schema_of(raw: bytes, path: Path | str, name: str) -> str:
    try:
        document: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(expected(str(path), f"{name} JSON", f"'{error}'")) from None
    if not isinstance(document, dict):
        raise InputError(expected(str(path), f"a {name} object", type(document).__name__))
    schema = document.get("schema", "")
    return schema if isinstance(schema, str) else ""


def encode_document(document: msgspec.Struct) -> bytes:
    """Deterministic JSON, indented for people, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(document, order="deterministic")) + b"\n"


def write_document(document: msgspec.Struct, path: Path | str) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    write_atomically(path, encode_document(document))


def write_atomically(path: Path | str, data: bytes) -> None:
    """Write to a temporary name beside ``path`` and rename."""
    path = Path(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        if path.is_dir():
            raise InputError(expected(str(path), "a file that can be written", "a directory"))
        if path.exists() and not path.is_file():  # a device would become a file
            raise InputError(expected(str(path), "a file that can be written", "no regular file"))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise InputError(
            expected(str(path), "a file that can be written", f"'{error.strerror}'")
        ) from None


def to_json(value: Any) -> str:
    """A value as indented JSON text for ``--json`` output."""
    return json.dumps(msgspec.to_builtins(value), indent=2)
