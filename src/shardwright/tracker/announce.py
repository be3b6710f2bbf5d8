"""What a runtime says its memory is for, heard by the tracker that is at work; a thread's rank.

One process may have several ranks, a thread each. Whatever listens to a process, or replaces one
of its functions, has to keep them apart by ``thread_rank``: otherwise rank 0's tracker would count
what rank 1 allocates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardwright.core.timeline import Kind

Listener = Callable[[torch.Tensor, Kind], None]

_listeners: dict[int | None, Listener] = {}  # one to a rank: trackers do not nest


def announce(tensor: torch.Tensor, kind: Kind) -> None:
    """The storage of ``tensor`` is of ``kind`` from now on; nothing where no tracker listens."""
    if _listeners and (listener := _listeners.get(thread_rank())) is not None:
        listener(tensor, kind)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hear what this rank announces inside."""
    rank = thread_rank()
    _listeners[rank] = listener
    try:
        yield
    finally:
        del _listeners[rank]


def is_listening() -> bool:
    """Whether a tracker of this rank is at work."""
    return thread_rank() in _listeners


_threads = threading.local()


def thread_rank() -> int | None:
    """The rank of this thread; None where a process has one rank, whatever its threads do."""
    return getattr(_threads, "rank", None)


@contextmanager
def thread_of(rank: int) -> Iterator[None]:
    """This thread is ``rank`` inside."""
    before, _threads.rank = thread_rank(), rank
    try:
        yield
    finally:
        _threads.rank = before
