"""The folders of a run's checkpoints: which are complete, which are left over, which may go."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardwright.core.errors import InputError, expected
from shardwright.runtime.checkpoint.locks import is_held, saving
from shardwright.runtime.checkpoint.manifest import MANIFEST, list_name

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")
_TEMPORARY = re.compile(_STEP.pattern + r"\.tmp(-[0-9a-f]{16})?")

log = logging.getLogger(__name__)


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
        raise InputError(expected(str(folder), wanted, "none", "Save a checkpoint there first."))
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
        raise InputError(expected(str(final), "a step that is not saved yet", "one", remedy))


def give_name(temporary: Path, final: Path) -> None:
    """Rename, unless there is something already: InputError.

    The system refuses to rename a folder over a file, and over a folder with anything in it.
    """
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
