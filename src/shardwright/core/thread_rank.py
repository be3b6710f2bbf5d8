"""Which rank a thread is, where one process has several of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_threads = threading.local()


def thread_rank() -> int | None:
    """The rank of this thread; None where a process has one rank, whatever its threads do."""
    found: int | None = getattr(_threads, "rank", None)
    return found


@contextmanager
def thread_of(rank: int) -> Iterator[None]:
    """This thread is ``rank`` inside."""
    before, _threads.rank = thread_rank(), rank
    try:
        yield
    finally:
        _threads.rank = before
