"""The folders of a run's checkpoints: which are complete, which are left over, which may go."""

# Several processes may save into one folder at once and any may die at any moment. Nothing is lost
# for it, because a save has a folder of its own and one rename decides whether it was removed or
# committed. Locks only keep a save that is under way from being taken for a left-over, and a run's
# newest checkpoint from the `keep` of another run; where the file system has none, left-overs stay
# and `keep` counts all checkpoints alike.

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwright.core.errors import InputError
from shardwright.runtime.checkpoint.files import MANIFEST, list_name

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
        # Exclusive only for the moment of tidying: whoever gets it knows that no save is under way,
        # since every save holds it shared. flock then turns the lock into a shared one.
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
            # The lock is on the open file and not on its name, so it stays through the rename.
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


_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")
_TEMPORARY = re.compile(_STEP.pattern + r"\.tmp(-[0-9a-f]{16})?")


def step_folder(folder: Path, step: int) -> Path:
    """Where a committed checkpoint lies."""
    return folder / f"step-{step}"


def new_number() -> int:
    """Of one save: no other has it."""
    return secrets.randbits(62)


def temporary_folder(folder: Path, step: int, number: int) -> Path:
    """Where the save with this ``number`` is written until every rank has succeeded."""
    return folder / f"step-{step}.tmp-{number:016x}"


def complete_steps(folder: Path) -> list[int]:
    """The steps that were committed, ascending; a folder without a manifest is none."""
    found = []
    for path in _folders(folder):
        match = _STEP.fullmatch(path.name)
        if match and os.path.lexists(path / MANIFEST):
            found.append(int(match[1]))
    return sorted(found)


def newest_step(folder: Path) -> int:
    """The newest committed step; InputError if there is none."""
    steps = complete_steps(folder)
    for path in unfinished(folder):
        log.warning("%s: a save that is not finished; ignored", path)
    if not steps:
        wanted = f"a folder step-N with a {MANIFEST}"
        raise InputError(str(folder), wanted, "none", "Save a checkpoint there first.")
    return steps[-1]


def unfinished(folder: Path) -> list[Path]:
    """Folders of saves that did not finish, or not yet."""
    return [path for path in _folders(folder) if _TEMPORARY.fullmatch(path.name)]


@contextlib.contextmanager
def room(folder: Path, step: int, number: int) -> Iterator[None]:
    """Make the temporary folder of a save; it is gone afterwards, renamed or removed.

    As long as the block runs, other processes do not take it for a left-over. What saves that did
    not finish have left is removed first, unless another save is under way. OSError: the folder
    cannot be made; InputError: the step exists.
    """
    refuse_existing(step_folder(folder, step))
    folder.mkdir(parents=True, exist_ok=True)
    temporary = temporary_folder(folder, step, number)
    # Left-overs get other names while the lock is exclusive and are removed once it is shared: that
    # may take minutes, and other saves need not wait for it.
    with saving(folder, lambda: _taken_away(folder)) as left_over:
        for path in left_over:
            _remove(path)
        temporary.mkdir()
        try:
            yield
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(final: Path) -> None:
    """Raise InputError if there is anything of this name."""
    if os.path.lexists(final):
        remedy = "A checkpoint is never overwritten; save another step or elsewhere."
        raise InputError(str(final), "a step that is not saved yet", "one", remedy)


def give_name(temporary: Path, final: Path) -> None:
    """Rename, unless there is something already: InputError.

    The system refuses to rename a folder over a file, and over a folder with anything in it.
    """
    # That refusal makes this safe against a save of the same step that was a moment earlier; the
    # look before gives the better words.
    refuse_existing(final)
    try:
        temporary.rename(final)
    except OSError:
        if temporary.exists():
            refuse_existing(final)  # another save was a moment earlier
        raise


def retain(folder: Path, keep: int, saved: int) -> None:
    """Remove committed steps but the newest ``keep``, the one that was just ``saved``, and those
    that are the newest of other runs.

    A folder loses its name first, so that one removed in part is no checkpoint. A failure is
    logged: the new checkpoint stands.
    """
    # Never the one just saved: with steps of another run in the folder it need not be the newest.
    for step in complete_steps(folder)[:-keep]:
        path = step_folder(folder, step)
        if step == saved:
            continue
        if is_held(path / list_name(0)):
            log.warning("%s: the newest checkpoint of another run; kept", path)
            continue
        for doomed in _without_name(path):
            _remove(doomed)


def _taken_away(folder: Path) -> list[Path]:
    """Left-overs under new names: whoever still writes into one cannot commit it any more."""
    found = []
    for path in unfinished(folder):
        for renamed in _without_name(path):
            log.warning("%s: a save that did not finish; removed", path)
            found.append(renamed)
    return found


def _without_name(path: Path) -> list[Path]:
    """The folder under a new temporary name; none, which is logged, if it cannot be renamed."""
    step = int(path.name.partition(".")[0].removeprefix("step-"))
    renamed = temporary_folder(path.parent, step, new_number())
    try:
        path.rename(renamed)
    except FileNotFoundError:  # somebody else took it
        return []
    except OSError as error:
        log.warning("%s: not removed: %s", path, error.strerror)
        return []
    return [renamed]


def _remove(path: Path) -> None:
    """What cannot be removed is left to a later save."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("%s: not removed: %s", path, error.strerror)


def sync(folder: Path) -> None:
    """Wait until the disk has the folder's names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
