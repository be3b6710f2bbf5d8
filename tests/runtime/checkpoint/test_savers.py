"""Several saves in one folder: each is there in full, or says that it failed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import pytest
import torch

from shardwright.core.errors import InputError, RunError
from shardwright.runtime.checkpoint import folders, read_full, run_through, save_in_parts
from shardwright.runtime.checkpoint.folders import (
    complete_steps,
    give_name,
    new_number,
    room,
    temporary_folder,
    unfinished,
)


def write(folder: Path, step: int, **options: Any) -> Path:
    held = cases.all_of({"weight": torch.full((3,), float(step))})
    return run_through(save_in_parts(folder, step, held, None, facts={}, scalars={}, **options))


def weight(folder: Path, step: int) -> list[float]:
    found: list[float] = read_full(folder, step)["weight"].tolist()
    return found


def test_a_save_under_way_is_no_left_over(tmp_path: Path) -> None:
    left_over = tmp_path / "step-1.tmp"
    number = new_number()
    left_over.mkdir()
    with room(tmp_path, 5, number):
        assert not left_over.exists()
        left_over.mkdir()
        write(tmp_path, 6)
        assert sorted(unfinished(tmp_path)) == [left_over, temporary_folder(tmp_path, 5, number)]
    assert unfinished(tmp_path) == [left_over]
    write(tmp_path, 7)
    assert unfinished(tmp_path) == []
    assert weight(tmp_path, 6) == [6.0] * 3


def test_of_two_saves_of_one_step_the_first_is_whole_and_the_second_says_so(
    tmp_path: Path,
) -> None:
    number = new_number()
    with room(tmp_path, 2, number):
        write(tmp_path, 2)
        text = r"step-2: expected a step that is not saved yet, got one\."
        with pytest.raises(InputError, match=text):
            give_name(temporary_folder(tmp_path, 2, number), tmp_path / "step-2")
    assert weight(tmp_path, 2) == [2.0] * 3


@pytest.mark.parametrize("there", ["a folder with a file", "a file", "a dangling link"])
def test_a_name_that_is_taken_in_the_last_moment_is_not_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """The system itself refuses: what is there appears after we have looked."""
    final, looked = tmp_path / "step-2", os.path.lexists

    def looks_then_appears(path: Any) -> bool:
        found = looked(path)
        if not found and Path(path) == final and len(unfinished(tmp_path)) == 1:
            appear(final, there)
        return found

    monkeypatch.setattr(os.path, "lexists", looks_then_appears)
    with pytest.raises(InputError, match="expected a step that is not saved yet"):
        write(tmp_path, 2)
    assert final.is_symlink() or (final / "mine" if final.is_dir() else final).read_text() == "mine"
    assert unfinished(tmp_path) == []


def appear(final: Path, what: str) -> None:
    if what == "a file":
        final.write_text("mine")
    elif what == "a dangling link":
        final.symlink_to("nowhere")
    else:
        final.mkdir()
        (final / "mine").write_text("mine")


@pytest.mark.parametrize("point", range(4))
@pytest.mark.parametrize("how", ["renamed", "removed"])
def test_a_save_whose_folder_somebody_takes_away_says_that_nothing_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int, how: str
) -> None:
    """At each of the four times that the disk is waited for before the folder gets its name."""
    fsync, passed = os.fsync, []

    def take_away(descriptor: int) -> None:
        fsync(descriptor)
        if len(passed) == point:
            (temporary,) = unfinished(tmp_path)
            away = temporary_folder(tmp_path, 2, new_number())
            temporary.rename(away)
            if how == "removed":
                shutil.rmtree(away)
        passed.append(descriptor)

    write(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", take_away)
    with pytest.raises((RunError, InputError)) as caught:
        write(tmp_path, 2)
    assert "step-2" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert complete_steps(tmp_path) == [1]
    monkeypatch.undo()
    write(tmp_path, 3)
    assert weight(tmp_path, 1) == [1.0] * 3
    assert weight(tmp_path, 3) == [3.0] * 3
    assert unfinished(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EBADF, errno.EOPNOTSUPP])
def test_without_locks_saves_go_on_and_left_overs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_locks(_descriptor: int, _how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "step-1.tmp").mkdir()
    for step in (2, 3, 4):
        write(tmp_path, step, keep=2, newest=folders.Newest())
    assert complete_steps(tmp_path) == [3, 4]
    assert unfinished(tmp_path) == [tmp_path / "step-1.tmp"]


def test_a_lock_that_is_never_given_back_holds_no_save_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    monkeypatch.setattr(folders, "PATIENCE", 0.05)
    descriptor = os.open(tmp_path / folders.LOCK_FILE, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with caplog.at_level(logging.WARNING):
            write(tmp_path, 2)
    finally:
        os.close(descriptor)
    assert weight(tmp_path, 2) == [2.0] * 3
    assert "saving without it" in caplog.text


def test_a_left_over_that_cannot_be_removed_holds_no_save_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left_over, rename = tmp_path / "step-1.tmp", Path.rename

    def refuse(path: Path, target: Any) -> Any:
        if path == left_over:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return rename(path, target)

    left_over.mkdir()
    monkeypatch.setattr(Path, "rename", refuse)
    with caplog.at_level(logging.WARNING):
        write(tmp_path, 2)
    assert weight(tmp_path, 2) == [2.0] * 3
    assert f"{left_over}: not removed: Operation not permitted" in caplog.text


def test_keep_spares_the_newest_checkpoint_of_every_other_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = folders.Newest(), folders.Newest()
    write(tmp_path, 1, newest=other)
    write(tmp_path, 2, newest=other)
    with caplog.at_level(logging.WARNING):
        for step in (5, 6):
            write(tmp_path, step, keep=1, newest=own)
    assert complete_steps(tmp_path) == [2, 6]
    assert f"{tmp_path / 'step-2'}: the newest checkpoint of another run; kept" in caplog.text
    write(tmp_path, 3, keep=1, newest=other)
    assert complete_steps(tmp_path) == [3, 6]
    del other
    write(tmp_path, 7, keep=1, newest=own)
    assert complete_steps(tmp_path) == [7]


def test_a_save_that_fails_lets_go_of_nothing(tmp_path: Path) -> None:
    own, other = folders.Newest(), folders.Newest()
    write(tmp_path, 1, newest=other)
    with pytest.raises(InputError):
        write(tmp_path, 1, newest=other)
    write(tmp_path, 2, keep=1, newest=own)
    assert complete_steps(tmp_path) == [1, 2]
