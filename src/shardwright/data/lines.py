"""Rows of a file as lines of text, packed or not, and what all files of rows have in common.

Tabs, commas, semicolons or bars separate the fields of a line; a field may stand in quotes.
"""

# Every file ends in rows of fields as text has them, so that what a field means, and what is said
# of a bad one, stands once, in the log that reads it. Nothing is held whole: text comes line by
# line, and a line has a bound.

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from shardwright.core.errors import InputError, UnsupportedError, expected

Line = bytes | Sequence[bytes]  # a row as text has it, or its fields
Row = tuple[Path, int, Line]  # file, number of the line or the row from 1, what it has
SEPARATORS = "\t,;|"  # of fields, and which is taken where a header has several
CHECK = "Check data.path."

_BUFFER = 1 << 18  # bytes
_QUOTE = ord('"')  # a number is looked for in bytes many times as fast as bytes are
_SHOWN = 40  # characters of a bad field that a message repeats
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\f\r"))  # that no text has
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Packing:
    """How text is packed: its name, the first bytes, and what unpacks a file."""

    name: str
    magic: bytes
    unpacked: Callable[[Path], Any]


def arrow_of(path: Path | str, what: str) -> Any:
    """pyarrow, which reads ``what``; one line where it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        wanted = f"pyarrow installed, for this is {what}"
        raise UnsupportedError(
            expected(str(path), wanted, "none", "Install shardwright[data].")
        ) from None
    return pyarrow


def _by_arrow(codec: str, what: str, path: Path) -> Any:
    return arrow_of(path, what).input_stream(str(path), compression=codec)


PACKINGS = (
    Packing("gzip", b"\x1f\x8b", gzip.open),
    Packing("bzip2", b"BZh", bz2.open),
    Packing("xz", b"\xfd7zXZ\x00", lzma.open),
    Packing("zstd", b"\x28\xb5\x2f\xfd", partial(_by_arrow, "zstd", "packed with zstd")),
    Packing("lz4", b"\x04\x22\x4d\x18", partial(_by_arrow, "lz4", "packed with lz4")),
)


class RowFile(ABC):
    """Rows of fields. ``names`` are the columns', empty where the file does not say them."""

    names: tuple[str, ...] = ()
    logarithms = False  # whether dense features are logarithms already

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def rows(self, names: Sequence[str], hexadecimal: Sequence[str] = ()) -> Iterator[Row]:
        """All rows: lines, whatever ``names``; or the fields of these columns, whole numbers of
        ``hexadecimal`` ones in that form."""

    def unreadable(self) -> dict[str, str]:
        """Columns of types that no text is made of, by their names."""
        return {}

    @abstractmethod
    def count(self) -> int | None:
        """How many rows there are; None where it takes reading them."""


def shown(text: bytes) -> str:
    """One quoted line of printable ASCII, shortened."""
    more = f" (and {len(text) - _SHOWN} bytes more)" if len(text) > _SHOWN else ""
    return repr(text[:_SHOWN])[1:] + more


def fields_of(line: Line, separator: bytes) -> Sequence[bytes]:
    """The fields of a row."""
    return line.split(separator) if isinstance(line, bytes) else line


def as_lines(lines: Sequence[Line], separator: bytes) -> list[bytes]:
    """Rows as text without quotes."""
    return [line if isinstance(line, bytes) else separator.join(line) for line in lines]


class TextRows(RowFile):
    """Lines of text. ``first`` is the first with a character in it, ``first_number`` its own,
    ``second`` the next one, ``separator`` that of fields in the first."""

    def __init__(self, path: Path, packing: Packing | None, forms: str, longest: int) -> None:
        super().__init__(path)
        self._packing, self._longest = packing, longest
        self.header_line = 0  # is no row
        with _opened(path, packing) as file:
            lines = reading(path, lambda: list(_first_two(file, longest)))
        if not lines:
            blank = path.stat().st_size > len(_BOM)
            found = "nothing but empty lines" if blank else "an empty file"
            found = f"nothing, packed with {packing.name}" if packing else found
            raise InputError(expected(str(path), "data rows", found, CHECK))
        self.first_number, first = lines[0]
        _check_text(path, self.first_number, first, forms, longest)
        text = first.decode("utf-8", "backslashreplace")
        self.separator = next(s for s in SEPARATORS if s in text).encode()
        self.first = first.rstrip(b"\r\n")
        self.second = lines[1][1] if lines[1:] else b""

    def read_header(self, names: Sequence[str] = ()) -> str:
        """Take the first line as names of columns, or ``names`` where it is a row; the place of
        the names."""
        if names:
            self.names = tuple(names)
            return "data.header"
        self.header_line = self.first_number
        fields = self._whole(self.first, iter(()), self.first_number)
        # Names that nobody uses may be in any encoding.
        self.names = tuple(name.decode("utf-8", "backslashreplace").strip() for name in fields)
        return f"{self.path}:{self.first_number}, the header"

    def check_rows(self) -> None:
        """InputError where nothing is behind the header."""
        if self.header_line and not self.second:
            raise InputError(expected(str(self.path), "data rows", "only a header", CHECK))

    def count(self) -> int | None:
        """Not known without reading."""
        return None

    def rows(self, names: Sequence[str] = (), hexadecimal: Sequence[str] = ()) -> Iterator[Row]:
        """Lines with a character in them, ends of line removed; fields where some have quotes."""
        path, longest = self.path, self._longest
        with _opened(path, self._packing) as file:
            lines = enumerate(iter(partial(file.readline, longest), b""), 1)
            try:
                for _ in islice(lines, self.header_line):
                    pass
                for number, raw in lines:
                    # A bound on a line: a file without newlines would be read into memory whole.
                    if len(raw) == longest:
                        found = f"{longest} bytes without an end of line"
                        spot = f"{path}:{number}"
                        raise InputError(expected(spot, "a row of a click log", found))
                    line = raw.rstrip(b"\r\n")
                    if _QUOTE in line:
                        yield path, number, self._whole(line, lines, number)
                    elif line:
                        yield path, number, line
            except BROKEN as error:
                raise broken(path, error) from error

    def _whole(self, line: bytes, lines: Iterator[tuple[int, bytes]], number: int) -> list[bytes]:
        """The fields of a line with quotes, and of those of ``lines`` that they span."""
        fields = self._unquoted(line)
        while fields is None and len(line) < self._longest:
            if (following := next(lines, None)) is None:
                break
            line += b"\n" + following[1].rstrip(b"\r\n")
            fields = self._unquoted(line)
        if fields is None:
            wanted, found = "a quote that ends", f"none in {len(line):,} bytes"
            remedy = 'Close it, or write "" for one that is meant.'
            raise InputError(expected(f"{self.path}:{number}", wanted, found, remedy))
        return fields

    def _unquoted(self, line: bytes) -> list[bytes] | None:
        """The fields of a line, or None where a quote does not end in it."""
        # Latin-1 maps bytes to characters and back one by one, whatever they mean.
        text = line.decode("latin-1")
        reader = csv.reader([text], delimiter=self.separator.decode(), strict=True)
        try:
            fields = next(reader)
        except csv.Error as error:
            if "unexpected end" in str(error):
                return None
            return line.split(self.separator)  # a quote that is none, as in: "5"" screen
        return [field.encode("latin-1") for field in fields]


# What a file that ends early, or was changed, makes of what unpacks it.
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


def broken(path: Path, error: Exception) -> InputError:
    """The refusal of a file that cannot be read to its end."""
    reason = getattr(error, "strerror", None)
    found = reason or " ".join(str(error).split()).rstrip(".") or "an early end"
    if isinstance(error, EOFError):
        found = "an early end"
    return InputError(expected(str(path), "a readable file", found, "Restore it."))


def reading(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except BROKEN as error:
        raise broken(path, error) from error


def _opened(path: Path, packing: Packing | None) -> BinaryIO:
    """The bytes of text behind its mark of UTF-8; InputError where the file is there no more."""
    try:
        if packing is None:
            file: Any = path.open("rb", buffering=_BUFFER)
        else:
            file = io.BufferedReader(packing.unpacked(path), _BUFFER)
        if file.peek(len(_BOM)).startswith(_BOM):
            file.read(len(_BOM))
    except BROKEN as error:
        raise broken(path, error) from error
    found: BinaryIO = file
    return found


def _first_two(file: BinaryIO, longest: int) -> Iterator[tuple[int, bytes]]:
    """Two lines with a character in them, with their numbers, or those that there are."""
    found = 0
    for number, line in enumerate(iter(partial(file.readline, longest), b""), 1):
        if line.rstrip(b"\r\n"):
            yield number, line
            found += 1
        if found == 2:
            return


def _check_text(path: Path, number: int, first: bytes, forms: str, longest: int) -> None:
    found, remedy = "", CHECK
    if len(first.translate(None, _CONTROLS)) < len(first):
        found = "a binary file"
    elif b"\r" in first.rstrip(b"\r\n"):
        found = "lines that end in a carriage return alone"
        remedy = "End them with a newline: tr '\\r' '\\n'."
    elif len(first) >= longest:
        found = f"a line of {longest} bytes or more"
    elif not any(separator.encode() in first for separator in SEPARATORS):
        found = shown(first.strip()) if first.strip() else "a line of blanks"
    if found:
        raise InputError(expected(f"{path}:{number}", forms, found, remedy))
