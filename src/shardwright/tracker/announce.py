"""What a runtime says its memory is for, heard by the tracker that is at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardwright.core.timeline import Kind

Listener = Callable[[torch.Tensor, Kind], None]

_listeners: list[Listener] = []  # one at most: trackers do not nest


def announce(tensor: torch.Tensor, kind: Kind) -> None:
    """The storage of ``tensor`` is of ``kind`` from now on; nothing where no tracker listens."""
    for listener in _listeners:
        listener(tensor, kind)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hear what is announced inside."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def is_listening() -> bool:
    """Whether a tracker is at work in this process."""
    return bool(_listeners)
