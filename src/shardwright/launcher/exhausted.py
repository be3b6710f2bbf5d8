"""Memory that a process could not have: how errors and logs say so, and what limits it.

A limit of address space (``ulimit -v``) hits wherever it happens to: a thread does not start, a
library is not mapped, an extension fails without a word. The first word of it in a log is the
cause; the last may be of what cleans up after it. Libraries of torch end the process, so that room
for them is looked after before torch is imported.
"""

from __future__ import annotations

import errno
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.core.errors import InputError
from shardwright.core.quantities import format_bytes

# Bytes of address space that torch and one trace of a small model take on one thread: torch 2.13,
# CPU build, measured 2026-11-27; torch alone takes 583 MiB, and with CUDA it is more.
LEAST_OF_TORCH = 750 * 2**20
REMEDY = "Free memory, or raise the limit."

_WORDS = re.compile(
    r"can(?:'|no)t allocate memory|out of memory|can't start new thread|bad_alloc|MemoryError"
    r"|failed to map segment",
    re.IGNORECASE,
)


def words_of_memory(text: str) -> str:
    """The first line of ``text`` that says that memory could not be had; empty where none does."""
    return next((line.strip() for line in text.splitlines() if _WORDS.search(line)), "")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it follows from, is of memory: Python's, the system's, the CPU
    allocator's and the device allocators' way of saying it."""
    return any(_is_of_memory(each) for each in _chain(error))


def how_exhausted(error: BaseException) -> str:
    """What an error of memory says, and the limit that this process has."""
    first = next(filter(_is_of_memory, reversed([*_chain(error)])))
    return f"{words_of_memory(str(first)) or type(first).__name__!r}{address_space()}"


def address_space() -> str:
    """The limit of this process and those it starts, to be put behind a fact; empty without one."""
    limit = _limit()
    return f" in an address space of {format_bytes(limit)} (ulimit -v)" if limit else ""


@contextmanager
def room_for_torch() -> Iterator[None]:
    """Inside, InputError where torch is imported into less than it takes."""
    sys.meta_path.insert(0, _BeforeTorch)
    try:
        yield
    finally:
        sys.meta_path.remove(_BeforeTorch)


class _BeforeTorch:
    """Is asked for every module before anybody is, and finds none."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        limit = _limit()
        if name == "torch" and limit and limit < LEAST_OF_TORCH:
            wanted = f"{format_bytes(LEAST_OF_TORCH)} of address space or more for torch"
            found = f"a limit of {format_bytes(limit)} (ulimit -v)"
            raise InputError("memory", wanted, found, REMEDY)


def _limit() -> int:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return 0 if limit == resource.RLIM_INFINITY else limit


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, SystemError) and address_space():  # of extensions that do not say why
        return "without exception set" in str(error) or "without setting" in str(error)
    return bool(_WORDS.search(str(error)))
