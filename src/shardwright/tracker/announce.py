"""What a runtime says its memory is for, heard by the tracker that is at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardwright.core.thread_rank import thread_rank
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
