"""The workers of a DataLoader, in a rank that is to save before it ends.

What ends a rank ends its workers, too: torchrun and schedulers signal all of its processes, and a
worker that is killed makes torch raise in the middle of whatever the rank computes. Half a step is
nothing that can be saved, so until the step is over workers go on and torch keeps quiet. It offers
nothing for that; its private interfaces are changed here, for as long as a run lasts.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.utils.data._utils import signal_handling as data_signals
from torch.utils.data._utils import worker as data_worker


@contextmanager
def outliving_signals() -> Iterator[None]:
    """Workers that a DataLoader starts inside do not hear SIGTERM and SIGINT, which schedulers,
    torchrun and terminals send to all processes of a rank: a rank that is to save first needs
    batches until its step is over. They end when their rank ends them or is gone. Nothing changes
    off the main thread, which alone hears signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = data_worker._worker_loop
    data_worker._worker_loop = _deaf_worker
    try:
        yield
    finally:
        data_worker._worker_loop = before


def _deaf_worker(*arguments: Any, **keywords: Any) -> None:
    """A worker's life, in a process of its own. torch has a handler of its own for SIGTERM there,
    which ends it: so the signal is blocked, and a thread takes it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _WORKER_LOOP(*arguments, **keywords)


def _end_with_parent() -> None:
    while True:
        heard = signal.sigwaitinfo({signal.SIGTERM})
        if heard.si_pid == os.getppid():
            os._exit(0)


_WORKER_LOOP = data_worker._worker_loop


@contextmanager
def reported(report: Callable[[], None]) -> Iterator[None]:
    """``report`` that a DataLoader's worker was killed, where torch would raise in the middle of
    whatever runs (main thread only). Half a step cannot be saved, so torch's own handler must not
    be called: it is replaced where it is there, and torch is told that it is where it is not."""

    def look(number: int, frame: FrameType | None) -> None:
        try:
            data_signals._error_if_any_worker_fails()
        except RuntimeError:
            report()
        if callable(before) and not was_set:
            before(number, frame)

    was_set, data_signals._SIGCHLD_handler_set = data_signals._SIGCHLD_handler_set, True
    before = signal.signal(signal.SIGCHLD, look)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
        data_signals._SIGCHLD_handler_set = was_set


def says_lost(error: BaseException | None) -> bool:
    """Whether it comes of a DataLoader that found a worker gone, for which torch has no type."""
    while error is not None:
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
            return True
        error = error.__cause__
    return False
