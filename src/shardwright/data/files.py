"""Which file has which rows: told by its first bytes, and named by them where it has none."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.core.errors import InputError, expected
from shardwright.data.blocks import ARRAYS, Arrays, Parquet
from shardwright.data.lines import CHECK, PACKINGS, Packing, RowFile, TextRows, reading

_HEAD = 512  # bytes of a file that it is told by
# What else a file may turn out to be, and what makes rows of it that are read.
_PARQUET = "Write it as Parquet or CSV."
_UNPACK = "Unpack it."
OTHERS = (
    (b"PK\x03\x04", "a ZIP archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"Rar!", "a RAR archive", _UNPACK),
    (b"ARROW1", "an Arrow file (Feather)", _PARQUET),
    (b"FEA1", "a Feather file", _PARQUET),
    (b"ORC", "an ORC file", _PARQUET),
    (b"Obj\x01", "an Avro file", _PARQUET),
    (b"SEQ", "a Hadoop sequence file", _PARQUET),
    (b"SQLite format 3", "a SQLite database", _PARQUET),
    (b"\x89HDF", "an HDF5 file", _PARQUET),
    (b"\xd0\xcf\x11\xe0", "an Excel file", _PARQUET),
    *((bytes((128, version)), "a Python pickle", _PARQUET) for version in range(2, 6)),
    (b"\xff\xfe", "text in UTF-16", "Write it in UTF-8: iconv -f UTF-16 -t UTF-8."),
    (b"\xfe\xff", "text in UTF-16", "Write it in UTF-8: iconv -f UTF-16 -t UTF-8."),
    (b"version https://git-lfs", "a pointer of Git LFS", "Fetch the file itself: git lfs pull."),
    (b"<!DOCTYPE", "a page of HTML", CHECK),
    (b"<!doctype", "a page of HTML", CHECK),
    (b"<html", "a page of HTML", CHECK),
    (b"<?xml", "XML", _PARQUET),
    (b"{", "JSON", _PARQUET),
    (b"[{", "JSON", _PARQUET),
    (b"[\n", "JSON", _PARQUET),
    (b"%PDF", "a PDF", CHECK),
    (b"\x89PNG", "a picture", CHECK),
    (b"\xff\xd8\xff", "a picture", CHECK),
    (b"\x7fELF", "a program", CHECK),
    (b"\x93NUMPY", "one array of NumPy", "Name the folder with it and its dense and labels."),
)
_TAR = slice(257, 262)
_DENSE, _PARTS = "dense.npy", ("labels.npy", "dense.npy", "sparse.npy")  # of TorchRec, as ARRAYS


def open_rows(path: Path | str, forms: str, longest: int) -> RowFile:
    """A file by what it is. InputError, naming the ``forms`` that it can have, for what has no
    rows; and for a line of ``longest`` bytes."""
    path = rows_file(Path(path))
    if parts := _parquet_parts(path):
        return Parquet(path, parts)
    if not path.is_file():
        found = "a directory" if path.is_dir() else "something else" if path.exists() else "nothing"
        raise InputError(expected(str(path), "a file", found, CHECK))
    if path.name.endswith(_DENSE):
        return Arrays(path, dict(zip(ARRAYS, parts_of(path), strict=True)))
    head = reading(path, lambda: _head(path.open("rb")))
    if head.startswith(b"PAR1"):
        return Parquet(path, (path,))
    if head.startswith(b"PK\x03\x04") and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if {f"{name}.npy" for name in ARRAYS} <= set(archive.namelist()):
                return Arrays(path, dict.fromkeys(ARRAYS, path))
            if any(name.endswith(".npy") for name in archive.namelist()):
                found = ", ".join(sorted(archive.namelist())[:3])
                raise InputError(expected(str(path), f"arrays {', '.join(ARRAYS)}", found))
    packing = next((p for p in PACKINGS if head.startswith(p.magic)), None)
    if packing is not None:
        head = reading(path, lambda: _head(packing.unpacked(path)))
    _refuse_others(path, head, packing, forms)
    return TextRows(path, packing, forms, longest)


def is_one_log(path: Path) -> bool:
    """Whether a path is no folder of days: a file, or a folder whose files are one log."""
    path = rows_file(path)
    return not path.is_dir() or bool(_parquet_parts(path))


def _parquet_parts(path: Path) -> list[Path]:
    """The files of a folder that a job of Spark's has written, say, in folders called ``day=1``
    perhaps; none where they are days."""
    found = list(_parquet_below(path)) if path.is_dir() else []
    return found if not any(each.name.startswith("day_") for each in found) else []


def _parquet_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir(), key=_by_number):
        if path.name.startswith((".", "_")):  # of what is being written, or said of it
            continue
        if path.is_dir() and "=" in path.name:
            yield from _parquet_below(path)
        elif path.name.endswith(".parquet"):
            yield path


def _by_number(path: Path) -> list[str | int]:
    """Its name, so that ``day=10`` comes after ``day=9``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", path.name)]


def rows_file(path: Path) -> Path:
    """The file of a folder with one set of TorchRec's arrays; else ``path`` itself."""
    found = [*path.glob(f"*{_DENSE}")] if path.is_dir() else []
    return found[0] if len(found) == 1 else path


def parts_of(path: Path) -> tuple[Path, ...]:
    """All files that are read where ``path`` is: those of a folder, the arrays beside one of
    TorchRec's."""
    path = rows_file(path)
    if parts := _parquet_parts(path):
        return tuple(parts)
    if not path.name.endswith(_DENSE):
        return (path,)
    return tuple(path.with_name(path.name.removesuffix(_DENSE) + part) for part in _PARTS)


def _head(file: Any) -> bytes:
    with file:
        return bytes(file.read(_HEAD))


def _refuse_others(path: Path, head: bytes, packing: Packing | None, forms: str) -> None:
    """InputError for bytes of something else than rows, which says what they are."""
    known = [(b"PAR1", "Parquet", "Unpack it."), *OTHERS]
    known += [(p.magic, f"packed with {p.name}", "Unpack it once.") for p in PACKINGS]
    known += [(b"", "a tar archive", "Unpack it: tar xf.")] if head[_TAR] == b"ustar" else []
    for magic, found, remedy in known:
        if head.startswith(magic):
            inside = f", packed with {packing.name}" if packing else ""
            raise InputError(expected(str(path), forms, found + inside, remedy))
