"""Who is at work in a folder of checkpoints: locks that end with the process that holds them.

Nothing is lost without them: a save has a folder of its own, and one rename decides whether it was
removed or committed. Locks keep a save that is under way from being taken for a left-over, and a
run's newest checkpoint from the ``keep`` of another run. Where the file system has none, left-overs
stay and ``keep`` counts all checkpoints alike.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LOCK_FILE = ".saving.lock"
PATIENCE = 10.0  # seconds for another process to give left-overs other names

log = logging.getLogger(__name__)


@contextlib.contextmanager
def saving(folder: Path, tidy: Callable[[], list[Path]]) -> Iterator[list[Path]]:
    """Say that a save is under way in ``folder``; several may be, in several processes.

    ``tidy`` is called first if none is, and nobody begins one meanwhile; its result, or else
    nothing, is what the block gets. Waits ``PATIENCE`` seconds at most.
    """
    descriptor = _open(folder / LOCK_FILE, os.O_CREAT)
    if descriptor is None:
        yield []
        return
    try:
        tidied = tidy() if _locked(descriptor, fcntl.LOCK_EX) else []
        deadline = time.monotonic() + PATIENCE
        while _locked(descriptor, fcntl.LOCK_SH) is False:
            if time.monotonic() > deadline:
                log.warning("%s: locked for %.0f s; saving without it", folder, PATIENCE)
                break
            time.sleep(0.01)
        yield tidied
    finally:
        _release(descriptor)


class Newest:
    """A run's hold on its newest checkpoint: a shared lock on one of its files.

    It ends with this object, and with the process.
    """

    def __init__(self) -> None:
        self._held: int | None = None

    @contextlib.contextmanager
    def becomes(self, file: Path) -> Iterator[None]:
        """Hold ``file``, whatever it is renamed to, instead of the last one if the block succeeds.

        OSError: it cannot be opened.
        """
        descriptor = os.open(file, os.O_RDONLY)
        try:
            _locked(descriptor, fcntl.LOCK_SH)
            yield
        except BaseException:
            _release(descriptor)
            raise
        if self._held is not None:
            _release(self._held)
        self._held = descriptor

    def __del__(self) -> None:
        if self._held is not None:
            os.close(self._held)  # unlocks, unless a forked process has it too


def is_held(file: Path) -> bool:
    """Whether ``file`` is of some run's newest checkpoint."""
    descriptor = _open(file)
    if descriptor is None:
        return False
    try:
        return _locked(descriptor, fcntl.LOCK_EX) is False
    finally:
        _release(descriptor)


def _open(path: Path, flags: int = 0) -> int | None:
    """A descriptor, to write where that may be: NFS wants it for an exclusive lock."""
    for how in (os.O_RDWR | flags, os.O_RDONLY):
        with contextlib.suppress(OSError):
            return os.open(path, how, 0o666)
    return None


def _locked(descriptor: int, how: int) -> bool | None:
    """Without waiting: True; False if another process is in the way; None if there are no locks."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _release(descriptor: int) -> None:
    """Unlock, also for forked processes that share the descriptor, and close."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
