"""JSON documents with a schema tag: read with one-line errors, written whole or not at all; values
of a document, where an error names the key."""

# Whatever a file holds, reading it ends in a value or in one line that names the key: users edit
# jobs by hand, and a run that was killed leaves anything behind. Limits come before parsers,
# because parsers cost: TOML's takes seconds for a MiB and grows with the square of a key's depth.
# Writers rename: a reader, or a machine that loses power, never finds half of a document.

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import stat
import threading
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

import shardwright
from shardwright.core.errors import (
    InputError,
    did_you_mean,
    expected,
    likeliest,
    listed,
    not_one_of,
)

MAX_DOCUMENT_BYTES = 256 * 2**20
MAX_TOML_BYTES = 16 * 2**20
MAX_DEPTH = 100
MOST_UNKNOWN = 10  # unknown keys that a message names
# Possessive quantifiers (Python 3.11): with plain ones a long line that is almost such a key would
# be split in very many ways, and the check would cost more than the parser that it guards.
_STEP = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_DEEP_KEY = re.compile(rf"(?m)(?:^|[\[{{,])[ \t]*+{_STEP}(?:\.[ \t]*+{_STEP}){{{MAX_DEPTH}}}")

T = TypeVar("T", bound=msgspec.Struct)
S = TypeVar("S")


class Shown:
    """A document that is printed, and shown in a notebook, as its command prints it."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(shardwright.first_screen(self))

    def _repr_html_(self) -> str:
        return str(shardwright.first_screen_as_html(self))


def read_bytes(path: Path | str, what: str, remedy: str = "") -> bytes:
    """A file's bytes, or one line that says why not."""
    if not isinstance(path, str | os.PathLike):
        raise InputError("path", f"that of a {what} file", type(path).__name__, remedy)
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError(str(path), f"a {what} file", "a directory", remedy)
        found = path.stat()
        # Asked before it is opened: opening a named pipe waits until somebody writes, which may be
        # never.
        if not stat.S_ISREG(found.st_mode):  # a pipe nobody writes into, a device without end
            raise InputError(str(path), f"a {what} file", "no regular file", remedy)
        if found.st_size > MAX_DOCUMENT_BYTES:
            raise InputError(str(path), f"a {what} below 256 MiB", "a larger file")
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(str(path), f"a {what} file", "no such file", remedy) from None
    except OSError as error:
        raise InputError(
            str(path), f"a readable {what} file", f"'{error.strerror}'", remedy
        ) from None


def parse_toml(raw: bytes | str, where: str, what: str) -> dict[str, Any]:
    """A document that a person wrote; InputError names ``where`` and says what was to be read.

    The parser's time grows with the square of a key's depth, and with the length by a second a MiB,
    so both have limits.
    """
    if len(raw) > MAX_TOML_BYTES:
        most = f"at most {MAX_TOML_BYTES >> 20} MiB of TOML"
        raise InputError(where, most, f"{len(raw):,} bytes", "Many tables go into JSON.")
    try:
        text = raw if isinstance(raw, str) else raw.decode()
        # By a pattern, for the parser is what has to be kept from it: tomllib's time grows with the
        # square of a key's steps, and it offers no limit.
        if _DEEP_KEY.search(text):
            raise InputError(where, f"keys of at most {MAX_DEPTH} steps", "a deeper one")
        return tomllib.loads(text)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        json = raw.lstrip()[:1] in (b"{", "{")
        remedy = "A plan or a measurement is read by explain, train, compare and report."
        found = ("JSON", remedy) if json else (f"'{error}'",)
        raise InputError(where, f"{what} in TOML", *found) from None


def parse_json(raw: bytes | str, where: str, what: str) -> Any:
    """Plain JSON that a person or another program wrote; InputError names ``where`` and says what
    was to be read."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(where, what, f"'{error}'") from None


def read_document(path: Path | str, kind: type[T], schema: str, made_by: str) -> T:
    """Decode ``path`` as ``kind``; another schema, an unknown field, bad JSON: InputError."""
    name = schema.split("/")[0].split(".")[-1]
    remedy = f"Make one with `{made_by}`."
    raw = read_bytes(path, name, remedy)
    document: Any = None
    wrong = ""
    try:
        document = decode_json(raw, kind)
        found = document.schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # A document of another schema has other fields, and msgspec may name one of those instead
        # of the schema, which is what is wrong.
        found, wrong = _schema_of(raw, path, name, remedy), str(error)
    if found != schema:
        got, again = f"'{found}'" if found else "none", f"Make it again with `{made_by}`."
        raise InputError(f"{path}: schema", f"'{schema}'", got, again)
    if wrong:
        raise InputError(f"{path}: not a valid {name}: {wrong}.")
    valid: T = document
    return valid


def _schema_of(raw: bytes, path: Path | str, name: str, remedy: str) -> str:
    try:
        document: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(path), f"{name} JSON", f"'{error}'", remedy) from None
    if not isinstance(document, dict):
        raise InputError(str(path), f"a {name} object", type(document).__name__, remedy)
    schema = document.get("schema", "")
    return schema if isinstance(schema, str) else ""


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """What decodes a ``kind``, built by one thread at a time, and before anything else is done with
    the kind: msgspec fills in what it knows of a struct while other threads run, and one that takes
    it half filled ends the process."""
    with _BUILDING:
        return msgspec.json.Decoder(kind)


_BUILDING = threading.Lock()


def decode_json(raw: bytes | str, kind: type[S]) -> S:
    """JSON as a ``kind``, in any thread; msgspec's own errors."""
    of: Any = kind
    found: S = _decoder(of).decode(raw)
    return found


def to_kind(value: Any, kind: type[S]) -> S:
    """Plain values as a ``kind``, in any thread; msgspec's own errors."""
    of: Any = kind
    # Only for its side: msgspec has then built what it knows of the kind under the lock, and
    # convert uses that.
    _decoder(of)
    return msgspec.convert(value, kind)


def encode_document(document: msgspec.Struct) -> bytes:
    """Deterministic JSON, indented for people, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(document, order="deterministic")) + b"\n"


def write_document(document: msgspec.Struct, path: Path | str) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    write_atomically(path, encode_document(document))


def write_atomically(path: Path | str, data: bytes) -> None:
    """Write to a temporary name beside ``path`` and rename."""
    path = Path(path)
    # In the same folder, for a rename works within a file system only; with the process's number,
    # for ranks may write at the same time.
    # Hidden, so that neither a glob for results nor a look at the folder takes it for one.
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        if path.is_dir():
            raise InputError(str(path), "a file that can be written", "a directory")
        if path.exists() and not path.is_file():  # a device would become a file
            raise InputError(str(path), "a file that can be written", "no regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise InputError(str(path), "a file that can be written", f"'{error.strerror}'") from None


def encode_toml(document: Mapping[str, Any], inside: str = "") -> str:
    """Plain values as TOML for people, which reads back as equal: plain keys first, then a section
    for each mapping and an entry for each of a list of mappings, by names that begin with
    ``inside``. A None is not written: TOML has no word for what is left out."""
    sections, plain = [], []
    for key, value in document.items():
        name = f"{inside}{_toml_key(key)}"
        if isinstance(value, Mapping):
            header = f"[{name}]\n" if not value or not all(map(_is_inner, value.values())) else ""
            sections.append(header + encode_toml(value, f"{name}."))
        elif _is_inner(value):
            sections += [f"[[{name}]]\n" + encode_toml(each, f"{name}.") for each in value]
        elif value is not None:
            plain.append(f"{_toml_key(key)} = {_toml(value)}\n")
    return "\n".join(["".join(plain), *sections] if plain else sections)


def _is_inner(value: Any) -> bool:
    """Whether a value is written below the plain keys that stand beside it."""
    several = isinstance(value, list | tuple) and bool(value)
    return isinstance(value, Mapping) or (several and all(isinstance(v, Mapping) for v in value))


def _toml_key(name: str) -> str:
    """A key as it is, or quoted where TOML asks for it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    # Before numbers, which a bool is one of: TOML writes it in small letters.
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items() if v is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)  # of numbers, infinite ones too, TOML's form is Python's


def to_json(value: Any) -> str:
    """A value as indented JSON text for ``--json`` output."""
    return json.dumps(msgspec.to_builtins(value), indent=2)


def convert(
    document: Any, kind: type[S], where: str, at: str = "", hidden: Collection[str] = ()
) -> S:
    """``document`` as a ``kind``; InputError names ``where`` and the key, ``at`` being its own.

    ``hidden`` are keys, as Struct.field, that no document may have.
    """
    # Before msgspec: it would name the first wrong value, while a misspelt key is the likelier
    # mistake and often the cause (the right key is then missing).
    if unknown := tuple(_unknown_keys(document, kind, at, frozenset(hidden))):
        raise _unknown(where, unknown)
    try:
        return to_kind(document, kind)
    except msgspec.ValidationError as error:
        raise InputError(_explain(str(error), document, kind, where, at)) from None


def unknown_key(where: str, spot: str, key: str, known: Collection[str]) -> InputError:
    """An error that names the nearest known key, if one is near."""
    return _unknown(where, ((spot, key, known),))


def _unknown(where: str, keys: tuple[tuple[str, str, Collection[str]], ...]) -> InputError:
    """An error that names all unknown keys, each with the nearest known one, if one is near; what
    is known beside the only one."""
    if len(keys) == 1:
        ((spot, key, known),) = keys
        listing = f"Known here: {', '.join(sorted(known))}."
        parts = (f"{where}: unknown key '{spot}'.", did_you_mean(key, sorted(known)), listing)
        return InputError(" ".join(filter(None, parts)))
    shown = [
        f"'{spot}' (did you mean '{near}'?)" if near else f"'{spot}'"
        for spot, key, known in keys
        for near in (likeliest(key, sorted(known)),)
    ]
    return InputError(f"{where}: unknown keys {listed(shown, MOST_UNKNOWN)}.")


def _unknown_keys(
    value: Any, kind: Any, path: str, hidden: frozenset[str]
) -> Iterator[tuple[str, str, Collection[str]]]:
    """Walk the document beside its type to the keys that do not exist: their place, name and which
    there are."""
    # A value of another type is msgspec's to refuse: here are names alone.
    if not isinstance(value, dict | list):
        return
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if not isinstance(value, dict):
            return
        fields = _fields(kind)
        known = {name for name in fields if f"{kind.__name__}.{name}" not in hidden}
        for key, inner in value.items():
            spot = f"{path}.{key}" if path else key
            if key in known:
                yield from _unknown_keys(inner, fields[key], spot, hidden)
            else:
                yield spot, key, known
    # Types that are no struct are passed over, so a literal or UNSET beside a section does no harm.
    elif typing.get_origin(kind) is types.UnionType:  # a section that may be left out
        for inner in typing.get_args(kind):
            yield from _unknown_keys(value, inner, path, hidden)
    elif typing.get_origin(kind) is tuple and isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unknown_keys(inner, typing.get_args(kind)[0], f"{path}[{index}]", hidden)


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """The fields of a struct by name, with their types."""
    return typing.get_type_hints(kind)


def _explain(message: str, document: Any, kind: Any, where: str, at: str) -> str:
    """Turn ``Expected `int` >= 1 - at `$.tables[0].rows``` into our form, with what was found."""
    # msgspec says what is wrong in text alone. Where a later version words it otherwise nothing
    # fails: its own text is shown with the key, just less like our other messages.
    text, _, place = message.partition(" - at `$")
    keys, told = re.findall(r"(?<=\[)\.\.\.|[^.\[\]`]+", place), []
    spot = (at + place.rstrip("`.")).lstrip(".") or "job"
    found: Any = document
    for key in keys:
        # Of mappings msgspec says that some value is wrong and not whose: each is tried by itself.
        if key == "...":  # msgspec does not say which
            wrong = _wrong(found, _inner(kind, key)) if isinstance(found, dict) else None
            if wrong is None:
                continue
            key, spot = wrong, spot.replace("[...]", f".{wrong}", 1)
        told, kind = _told(kind, key), _inner(kind, key)
        if isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return f"{where}: {spot}: {text.replace('`', '')}."
    shown = repr(found) if len(repr(found)) < 60 else type(found).__name__
    if text.startswith("Object missing required field"):
        inside = f"{spot}." if keys or at else ""
        return expected(f"{where}: {inside}{text.split('`')[1]}", "a value", "none")
    wanted = text.replace("`", "").removeprefix("Expected ")
    # msgspec repeats the wrong value and not those that are allowed, which is what a reader wants
    # to know; they are read off the type.
    allowed = told or list(dict.fromkeys(_choices(kind)))
    if text.startswith("Invalid enum value") and isinstance(found, str):
        return not_one_of(f"{where}: {spot}", found, allowed)
    if text.startswith(("Invalid enum value", "Expected `str`")) and allowed:
        wanted = f"one of {', '.join(allowed)}"
    if ", got" in wanted:
        wanted = wanted.partition(", got")[0]
    remedy = ""
    if isinstance(found, dict) and text.startswith("Expected `str`") and found:
        inside, _, last = spot.rpartition(".")
        remedy = f"""Quote a name with dots: {inside}."{last}.{next(iter(found))}"."""
    if wanted == "object":
        wanted = "a section, { KEY = VALUE }"
        remedy = f"Known here: {', '.join(sorted(known))}." if (known := _known(kind)) else ""
    if text.startswith("Expected `int`") and (meant := _whole(found)):
        remedy = f"Did you mean {meant}?"
    return expected(f"{where}: {spot}", wanted, shown, remedy)


def _whole(found: Any) -> int:
    """The whole number that 1e3 or '8k' may mean; 0 where it is another value."""
    if isinstance(found, str) and re.fullmatch(r"\d{1,9}[kK]", found):
        return 1024 * int(found[:-1])
    return int(found) if isinstance(found, float) and found.is_integer() else 0


def _known(kind: Any) -> Collection[str]:
    """The keys of a section, which may be one that is left out; none where any is one."""
    section = _section(kind)
    return _fields(section) if _is_section(section) else ()


def _section(kind: Any) -> Any:
    """The type of a section that may be left out; any other as it is."""
    if typing.get_origin(kind) is types.UnionType:
        return next((inner for inner in typing.get_args(kind) if _is_section(inner)), kind)
    return kind


def _told(kind: Any, key: str) -> list[str]:
    """What a section says that a key may be, beside what its type allows: its examples."""
    section = _section(kind)
    if not _is_section(section):
        return []
    hint = typing.get_type_hints(section, include_extras=True).get(key)
    parts = (hint, *typing.get_args(hint))
    notes = (note for part in parts for note in getattr(part, "__metadata__", ()))
    return [each for note in notes for each in note.examples or ()]


def _inner(kind: Any, key: str) -> Any:
    """The type of a field of a struct, or of the elements of a tuple; of a section that may be
    left out too."""
    kind = _section(kind)
    if _is_section(kind):
        return _fields(kind).get(key)
    arguments = typing.get_args(kind)
    if isinstance(typing.get_origin(kind), type) and issubclass(typing.get_origin(kind), Mapping):
        return arguments[1]
    return arguments[0] if arguments else None


def _wrong(found: dict[str, Any], kind: Any) -> str | None:
    """The first key whose value is not of a kind; None where a key itself is at fault."""
    for key, value in found.items():
        try:
            to_kind(value, kind)
        except msgspec.ValidationError:
            return key
    return None


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _choices(kind: Any) -> list[str]:
    """The texts that a type allows, wherever they stand in it."""
    if typing.get_origin(kind) is Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    return [choice for inner in typing.get_args(kind) for choice in _choices(inner)]
