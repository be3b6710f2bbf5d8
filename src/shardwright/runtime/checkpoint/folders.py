"""The folders of a run's checkpoints: which are complete, which are left over, which may go."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from shardwright.core.errors import InputError, expected
from shardwright.runtime.checkpoint.manifest import MANIFEST

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")
_LEFT_OVER = re.compile(_STEP.pattern + r"\.tmp")

log = logging.getLogger(__name__)


def step_folder(folder: Path, step: int) -> Path:
    """Where a committed checkpoint lies."""
    return folder / f"step-{step}"


def temporary_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint is written until every rank has succeeded."""
    return folder / f"step-{step}.tmp"


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
    for path in left_over(folder):
        log.warning("%s: a save that did not finish; ignored", path)
    if not steps:
        wanted = f"a folder step-N with a {MANIFEST}"
        raise InputError(expected(str(folder), wanted, "none", "Save a checkpoint there first."))
    return steps[-1]


def left_over(folder: Path) -> list[Path]:
    """Folders of saves that did not finish."""
    return [path for path in _folders(folder) if _LEFT_OVER.fullmatch(path.name)]


def remove_left_over(folder: Path) -> None:
    """Remove what saves that did not finish have left; OSError if it cannot be."""
    for path in left_over(folder):
        log.warning("%s: a save that did not finish; removed", path)
        shutil.rmtree(path)


def retain(folder: Path, keep: int, saved: int) -> None:
    """Remove committed steps but the newest ``keep`` and the one that was just ``saved``.

    A folder loses its name first, so that one removed in part is no checkpoint. A failure is
    logged: the new checkpoint stands.
    """
    for step in complete_steps(folder)[:-keep]:
        if step == saved:
            continue
        doomed = temporary_folder(folder, step)
        try:
            step_folder(folder, step).rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("%s: not removed: %s", doomed, error.strerror)


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
