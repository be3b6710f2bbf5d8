"""A checkpoint is there in full or not at all, and what was there before stays whole."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import math
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import pytest
import torch

from shardwright.core.errors import InputError, MismatchError, RunError
from shardwright.runtime.checkpoint import (
    TensorPart,
    read_checkpoint,
    read_full,
    run_through,
    save_in_parts,
)
from shardwright.runtime.checkpoint.folders import LOCK_FILE, temporary_folder
from shardwright.runtime.checkpoint.write import Claim, write_rank, writers


def weights(value: float, count: int = 3) -> list[TensorPart]:
    return cases.all_of({"weight": torch.full((count,), value)})


def write(folder: Path, step: int, held: list[TensorPart] | None = None, **options: Any) -> Path:
    options = {"facts": {}, "scalars": {}, **options}
    parts = weights(float(step)) if held is None else held
    return run_through(save_in_parts(folder, step, parts, None, **options))


def names(folder: Path) -> list[str]:
    """What lies there, but for the file that savers lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK_FILE)


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Writing more fails with OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_one_process_saves_and_restores_with_facts_and_scalars(tmp_path: Path) -> None:
    made = cases.tensors()
    scalars = {
        "step": 7,
        "lr": 0.1 + 0.2,
        "random": list(range(2**32 - 3, 2**32)),
        "nested": {"on": True, "none": None, "pair": (1, "é")},
    }
    facts = {"plan": "ab" * 32, "zeros": "0" * 64}
    final = write(tmp_path, 7, cases.all_of(made), facts=facts, scalars=scalars)
    assert final == tmp_path / "step-7"
    assert names(final) == ["manifest.json", "rank-0.json", "rank-0.safetensors"]
    wanted = cases.blank(cases.all_of(made))
    restored = read_checkpoint(tmp_path, wanted, None)
    assert cases.equal(wanted, cases.all_of(made))
    assert restored.manifest.facts == facts
    scalars["nested"] = {"on": True, "none": None, "pair": [1, "é"]}
    assert restored.lists[0].scalars == scalars


def test_an_existing_step_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(InputError, match=r"step-1: expected a step that is not saved yet, got one"):
        write(tmp_path, 1, weights(5.0))
    assert read_full(tmp_path)["weight"].tolist() == [1.0] * 3
    assert names(tmp_path) == ["step-1"]


def test_what_an_unfinished_save_has_left_is_removed_at_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for left in (tmp_path / "step-2.tmp", temporary_folder(tmp_path, 3, 77)):
        left.mkdir()
        write_rank(left, 2, 0, 1, weights(9.0), {})
    (tmp_path / "notes.tmp").mkdir()
    (tmp_path / "step-4.tmp-notes").mkdir()
    with caplog.at_level(logging.WARNING):
        write(tmp_path, 2)
    assert names(tmp_path) == ["notes.tmp", "step-2", "step-4.tmp-notes"]
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["removed"] * 2
    assert read_full(tmp_path)["weight"].tolist() == [2.0] * 3


def test_a_full_disk_leaves_the_previous_checkpoint_and_no_rest(tmp_path: Path) -> None:
    write(tmp_path, 1)
    held = weights(2.0, 100_000)
    text = r"step-2: expected every rank to save its part, got 'File too large' on rank 0\. Nothing"
    with files_of_at_most(65_536), pytest.raises(RunError, match=text) as caught:
        write(tmp_path, 2, held)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert names(tmp_path) == ["step-1"]
    assert read_full(tmp_path)["weight"].tolist() == [1.0] * 3
    assert held[0].tensor.tolist() == [2.0] * 100_000
    write(tmp_path, 2, held)
    assert read_full(tmp_path)["weight"].tolist() == [2.0] * 100_000


MOMENTS = 50
CALLS = ((io, "open"), *((os, n) for n in ("open", "mkdir", "fsync", "rename", "unlink", "rmdir")))
FULL, READ_ONLY = errno.ENOSPC, errno.EROFS


def changes(words: tuple[Any, ...]) -> bool:
    """Whether an ``open`` with these arguments writes; every other call does."""
    how = words[0] if words else ""
    if isinstance(how, str):
        return not set(how).isdisjoint("wxa+")
    return bool(how & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


class Disk:
    """Counts what changes the file system; from the call ``fails_at`` on, for so many calls, it
    answers with an error."""

    def __init__(self, fails_at: int, calls: int, error: int) -> None:
        self.count, self.failed = 0, 0
        self.span, self.error = range(fails_at, fails_at + calls), error

    @contextlib.contextmanager
    def mounted(self, folder: Path) -> Iterator[Disk]:
        with pytest.MonkeyPatch.context() as patch:
            for module, name in CALLS:
                patch.setattr(module, name, self._around(getattr(module, name), str(folder)))
            yield self

    def _around(self, call: Callable[..., Any], folder: str) -> Callable[..., Any]:
        def asked(path: Any, *words: Any, **options: Any) -> Any:
            ours = isinstance(path, int) or str(path).startswith(folder)
            if ours and (call.__name__ != "open" or changes(words)):
                self.count += 1
                if self.count in self.span:
                    self.failed += 1
                    raise OSError(self.error, os.strerror(self.error), str(path))
            return call(path, *words, **options)

        return asked


@pytest.mark.parametrize("error", [FULL, READ_ONLY], ids=["full", "read-only"])
def test_a_disk_that_is_full_or_read_only_at_any_moment_loses_no_checkpoint(
    tmp_path: Path, error: int
) -> None:
    made = {name: t for name, t in cases.tensors().items() if name in ("cube", "bool", "scalar")}
    with Disk(0, 0, error).mounted(tmp_path) as disk:
        write(tmp_path / "sound", 1, cases.all_of(made))
    calls, outcomes = disk.count, set()
    assert calls > 10
    for moment in range(MOMENTS // 2):
        folder, chance = tmp_path / str(moment), random.Random(moment)
        write(folder, 1, cases.all_of(made))
        newer = {name: ~t if t.dtype == torch.bool else t + 1 for name, t in made.items()}
        at, lasts = 1 + moment * calls // (MOMENTS // 2), chance.choice((1, 3, 10**6))
        with Disk(at, lasts, error).mounted(folder) as disk, contextlib.suppress(RunError):
            write(folder, 2, cases.all_of(newer))
        assert disk.failed
        complete = (folder / "step-2").exists()
        outcomes.add(complete)
        assert cases.same(read_full(folder), newer if complete else made)
        assert cases.same(read_full(folder, 1), made)
        write(folder, 3, cases.all_of(newer))  # there is room again
        assert cases.same(read_full(folder), newer)
    assert False in outcomes


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="'Not a directory' on rank 0"):
        write(tmp_path / "file" / "checkpoints", 1)


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (
            [TensorPart("w", (4,), (2,), (3,), torch.zeros(3))],
            "w: expected a part of a tensor of shape",
        ),
        ([TensorPart("w", (4,), (0,), (4,), torch.zeros(3))], "w: expected a tensor of 4 elements"),
        (
            [TensorPart("w", (2,), (0,), (2,), torch.zeros(2, dtype=torch.complex64))],
            "got complex64",
        ),
        ([TensorPart("w", (2,), (0,), (2,), torch.zeros(2, device="meta"))], "tensor with data"),
        ([TensorPart("w\n", (2,), (0,), (2,), torch.zeros(2))], "a name of printable characters"),
        ([TensorPart("w", (4,), (0,), (4,), torch.zeros(2, 4)[:, ::2])], "a contiguous tensor"),
        (
            [TensorPart("w", (2,), (0,), (2,), torch.zeros(2))] * 2,
            "w: expected each part once per rank",
        ),
        (
            [
                TensorPart("w", (2,), (0,), (1,), torch.zeros(1)),
                TensorPart("w", (2,), (1,), (1,), torch.zeros(1, dtype=torch.int64)),
            ],
            "w: expected one shape and dtype",
        ),
    ],
)
def test_parts_that_cannot_be_stored_are_refused_by_name(
    tmp_path: Path, held: list[TensorPart], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        write(tmp_path, 1, held)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("sizes", "text"),
    [((1,), "got parts of 1 elements in all"), ((3,), "got parts of 5 elements in all")],
)
def test_parts_that_do_not_make_up_their_tensor_are_not_committed(
    tmp_path: Path, sizes: tuple[int], text: str
) -> None:
    held = [TensorPart("w", (3,), (0,), sizes, torch.zeros(sizes))]
    if sizes == (3,):
        held.append(TensorPart("w", (3,), (1,), (2,), torch.zeros(2)))
    with pytest.raises(MismatchError, match=rf"w: expected every one of 3 elements.*{text}"):
        write(tmp_path, 1, held)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 2**64, b"bytes", {1: 2}, {1, 2}, torch.zeros(1), "\ud800"]
)
def test_scalars_that_json_does_not_give_back_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(InputError, match=r"scalars\.state(\[0\])?: expected"):
        write(tmp_path, 1, scalars={"state": [value]})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("step", "options", "text"),
    [
        (-1, {}, "step: expected an integer from 0"),
        (True, {}, "step: expected an integer from 0"),
        (1, {"keep": 0}, "keep: expected at least 1 checkpoint, got 0"),
        (1, {"facts": {"plan": 3}}, r"facts\.plan: expected text, got 3"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(
    tmp_path: Path, step: int, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        write(tmp_path, step, **options)
    assert names(tmp_path) == []


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 9, 10, 11):
        write(tmp_path, step)
    (tmp_path / "step-3").mkdir()  # no manifest: no checkpoint, and not ours to remove
    write(tmp_path, 12, keep=3)
    assert names(tmp_path) == ["step-10", "step-11", "step-12", "step-3"]
    write(tmp_path, 13, keep=1)
    assert names(tmp_path) == ["step-13", "step-3"]


def test_the_checkpoint_just_saved_is_kept_among_higher_numbers(tmp_path: Path) -> None:
    for step in (20, 30):
        write(tmp_path, step)
    (tmp_path / "step-30" / "manifest.json").write_bytes(b"")
    write(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-30", "step-5"]
    assert read_full(tmp_path, 5)["weight"].tolist() == [5.0] * 3


def test_a_save_that_fails_removes_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with files_of_at_most(65_536), pytest.raises(RunError):
        write(tmp_path, 2, weights(2.0, 100_000), keep=1)
    assert names(tmp_path) == ["step-1"]


KILLED_AT_EACH_POINT = """
import os, signal, sys
from pathlib import Path
import torch
from shardwright.runtime.checkpoint import TensorPart, run_through, save_in_parts

folder, points, fsync = Path(sys.argv[1]), int(sys.argv[2]), os.fsync

def write(step, value):
    held = [TensorPart("weight", (3,), (0,), (3,), torch.full((3,), value))]
    run_through(save_in_parts(folder, step, held, None, facts={}, scalars={}))

write(1, 1.0)
for point in range(points):
    child = os.fork()
    if child == 0:
        passed = []
        def killing(descriptor):
            if len(passed) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            passed.append(fsync(descriptor))
        os.fsync = killing
        write(2, 2.0)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    left = sorted(path.name[:10] for path in folder.glob("step-*"))
    print(os.WIFSIGNALED(status), *left)
"""


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_a_checkpoint_whole(tmp_path: Path) -> None:
    """The five times the disk is waited for: tensors, list, manifest, folder, the new name."""
    command = [sys.executable, "-c", KILLED_AT_EACH_POINT, str(tmp_path), "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before = "True step-1 step-2.tmp"
    assert done.stdout.splitlines() == [before] * 4 + ["True step-1 step-2"]
    assert read_full(tmp_path, 1)["weight"].tolist() == [1.0] * 3
    assert read_full(tmp_path, 2)["weight"].tolist() == [2.0] * 3


def test_every_part_has_one_writer_and_copies_are_spread_by_bytes() -> None:
    copies = [Claim(number, 10 * number) for number in range(1, 9)]
    claims = [[*copies, Claim(100, 400)], copies, copies[:4], []]
    chosen = writers(claims)
    assert sorted(part for rank in chosen for part in rank) == [*range(1, 9), 100]
    assert all(chosen[rank] <= {claim.part for claim in parts} for rank, parts in enumerate(claims))
    assert chosen[0] == {100}
    load = [sum(c.nbytes for c in copies if c.part in chosen[rank]) for rank in (1, 2)]
    assert load == [260, 100]


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for step in range(3):
        write(tmp_path, step)
        read_full(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
