"""Which files a command may write over: those of its own kind, and none that it reads; folders that
are missing are made, and the line that says what was written says so."""

# A mistyped -o would take a user's file with it. It is asked before minutes of work, not after.

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardwright.core.errors import InputError

_HEAD = 4096  # bytes in which a file says what it is


class FileKind(NamedTuple):
    """What a command writes, how the beginning of such a file looks, and which endings a new one's
    name may have, besides none; empty for any."""

    name: str
    beginning: re.Pattern[bytes]
    endings: tuple[str, ...] = ()


PLAN = FileKind("plan", re.compile(rb'\{\s*"schema":\s*"shardwright\.plan/'))
CLUSTER = FileKind("cluster file", re.compile(rb'(#[^\n]*\n|\s)*schema = "shardwright\.cluster/'))
REPORT = FileKind(
    "report",
    re.compile(rb"\s*<!DOCTYPE html>.*Shardwright report</title>", re.DOTALL),
    (".html", ".htm"),
)
PICTURE = FileKind(
    "picture", re.compile(rb'<svg [^>]*aria-label="(Live memory of a step: |Layouts\. )')
)
TRACE = FileKind("timeline", re.compile(rb'\{"traceEvents":'))


def check_output(
    path: Path, kind: FileKind, inputs: Iterable[Path] = (), option: str = "-o"
) -> None:
    """Raise InputError unless ``path`` may be written.

    It may if nothing is there, or an empty file, or a file of the same ``kind``, and it is not one
    of ``inputs``, by whatever name or link.
    """
    remedy = f"Choose another {option}."
    for read in inputs:
        if same_file(path, read):
            found = "one of them" if str(path) == str(read) else f"the same as {read}"
            wanted = "another file than those that are read"
            raise InputError(str(path), wanted, found, remedy)
    if path.is_dir():
        raise InputError(str(path), "a file that can be written", "a directory")
    if not path.exists():
        if kind.endings and path.suffix and path.suffix.lower() not in kind.endings:
            wanted = f"a name that ends in {' or '.join(kind.endings)}"
            raise InputError(f"{option} of a {kind.name}", wanted, f"'{path.name}'")
        _check_folder(path)
        return
    if not path.is_file():
        raise InputError(str(path), "a file that can be written", "no regular file")
    if not is_of(path, kind):
        wanted = f"a new file or an earlier {kind.name}"
        raise InputError(str(path), wanted, "a file of another kind", remedy)


def beside(path: Path) -> str:
    """What writing ``path`` changes beside it, for the line that says that it was written."""
    if not path.parent.exists():
        return f" in a new folder, {path.parent}"
    return ", replacing the earlier one" if path.exists() and path.stat().st_size else ""


def _check_folder(path: Path) -> None:
    """Before minutes of work: the nearest folder above ``path`` that there is can be written to."""
    # The nearest one that there is, since those below are made with the file.
    above = next(parent for parent in path.absolute().parents if parent.exists())
    wanted = "a file that can be written"
    if not above.is_dir():
        raise InputError(str(path), wanted, f"'{above.name}', which is no folder, in it")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(str(path), wanted, f"{above}, which may not be written to")


def is_of(path: Path, kind: FileKind) -> bool:
    """Whether a file begins as one of ``kind`` does, or is empty; InputError: it cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise InputError(str(path), "a readable file", f"'{error.strerror}'") from None
    # An empty file counts: it holds nothing that could be lost.
    return not head or kind.beginning.match(head) is not None


def same_file(first: Path, second: Path) -> bool:
    """Whether two paths lead to one file, also where there is none yet."""
    try:
        return os.path.samefile(first, second)
    except OSError:
        # One of the two does not exist yet, and may still be reached under two names, through a
        # link to its folder.
        return os.path.realpath(first) == os.path.realpath(second)
    except ValueError:  # no path at all
        return False
