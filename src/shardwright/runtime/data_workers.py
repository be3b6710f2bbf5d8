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
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.utils.data._utils import signal_handling as data_signals
from torch.utils.data._utils import worker as data_worker

from shardwright.core.errors import RunError, expected


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


@contextmanager
def naming_lost() -> Iterator[None]:
    """RunError in place of whatever a worker that was killed raises inside; torch raises in the
    middle of a step, as if that had an error of its own."""
    try:
        yield
    except Exception as error:
        if not says_lost(error):
            raise
        found = "the end of one, which was killed, perhaps for memory"
        text = expected("data", "workers of a DataLoader", found, "Start the run again.")
        raise RunError(text) from error


def says_lost(error: BaseException | None) -> bool:
    """Whether it comes of a DataLoader that found a worker gone, for which torch has no type."""
    while error is not None:
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
            return True
        if isinstance(error, OSError | EOFError) and _of_connection(error):
            return True
        error = error.__cause__
    return False


def _of_connection(error: BaseException) -> bool:
    """Whether a DataLoader's own connection to a worker broke, by which a tensor was to travel. A
    process closes its connections before it counts as ended, so torch does not ask about it yet."""
    modules = [f.f_globals.get("__name__", "") for f, _ in traceback.walk_tb(error.__traceback__)]
    # What a worker raises is raised again by torch itself.
    return "torch.utils.data.dataloader" in modules and modules[-1].startswith("multiprocessing.")
