"""Where a command may write: never over what it reads, and over nothing but its own kind."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardwright.core.errors import InputError, expected

_HEAD = 4096  # bytes in which a file says what it is


class Kind(NamedTuple):
    """What a command writes, how the beginning of such a file looks, and which endings a new one's
    name may have, besides none; empty for any."""

    name: str
    beginning: re.Pattern[bytes]
    endings: tuple[str, ...] = ()


PLAN = Kind("plan", re.compile(rb'\{\s*"schema":\s*"shardwright\.plan/'))
STUDY = Kind("study", re.compile(rb'\{\s*"schema":\s*"shardwright\.study/'))
CLUSTER = Kind("cluster file", re.compile(rb'(#[^\n]*\n|\s)*schema = "shardwright\.cluster/'))
REPORT = Kind(
    "report",
    re.compile(rb"\s*<!DOCTYPE html>.*Shardwright report</title>", re.DOTALL),
    (".html", ".htm"),
)
PICTURE = Kind("timeline", re.compile(rb'<svg [^>]*aria-label="Live memory of a step: '))
TABLES = Kind(
    "file of tables", re.compile(rb'.{8}\{"__metadata__":\{"shardwright\.tables/', re.DOTALL)
)
TRACE = Kind("timeline", re.compile(rb'\{"traceEvents":'))


def check_output(path: Path, kind: Kind, inputs: Iterable[Path] = (), option: str = "-o") -> None:
    """Raise InputError unless ``path`` may be written.

    It may if nothing is there, or an empty file, or a file of the same ``kind``, and it is not one
    of ``inputs``, by whatever name or link.
    """
    remedy = f"Choose another {option}."
    for read in inputs:
        if same_file(path, read):
            found = "one of them" if str(path) == str(read) else f"the same as {read}"
            wanted = "another file than those that are read"
            raise InputError(expected(str(path), wanted, found, remedy))
    if path.is_dir():
        raise InputError(expected(str(path), "a file that can be written", "a directory"))
    if not path.exists():
        if kind.endings and path.suffix and path.suffix.lower() not in kind.endings:
            wanted = f"a name that ends in {' or '.join(kind.endings)}"
            raise InputError(expected(f"{option} of a {kind.name}", wanted, f"'{path.name}'"))
        _check_folder(path)
        return
    if not path.is_file():
        raise InputError(expected(str(path), "a file that can be written", "no regular file"))
    if not is_of(path, kind):
        wanted = f"a new file or an earlier {kind.name}"
        raise InputError(expected(str(path), wanted, "a file of another kind", remedy))


def _check_folder(path: Path) -> None:
    """Before minutes of work: the nearest folder above ``path`` that there is can be written to."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    wanted = "a file that can be written"
    if not above.is_dir():
        raise InputError(expected(str(path), wanted, f"'{above.name}', which is no folder, in it"))
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(expected(str(path), wanted, f"{above}, which may not be written to"))


def is_of(path: Path, kind: Kind) -> bool:
    """Whether a file begins as one of ``kind`` does, or is empty; InputError: it cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise InputError(expected(str(path), "a readable file", f"'{error.strerror}'")) from None
    return not head or kind.beginning.match(head) is not None


def same_file(first: Path, second: Path) -> bool:
    """Whether two paths lead to one file, also where there is none yet."""
    try:
        return os.path.samefile(first, second)
    except OSError:
        return os.path.realpath(first) == os.path.realpath(second)
    except ValueError:  # no path at all
        return False
