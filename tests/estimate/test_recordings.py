"""Recordings are made once and kept; what a cache cannot give is made anew."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.recording import Recording
from shardwright.estimate.recordings import described, plan, recorded
from shardwright.job.job import Job, parse_job


def job_of(**sections: Any) -> Job:
    model = {"kind": "transformer", "layers": 1, "dim": 4, "heads": 1, "vocab": 5}
    return parse_job({"model": model, "batch": {"size": 2, "sequence": 3}} | sections)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    return tmp_path / "recordings"


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def mark(path: Path) -> None:
    """Make a kept recording one that nobody could have made, but for its digest."""
    _, _, content = path.read_bytes().partition(b"\n")
    content = content.replace(b'"inputs":', b'"inputs":1')
    path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def test_a_recording_is_made_once(folder: Path) -> None:
    first = recorded(job_of())
    (path,) = files(folder)
    assert recorded(job_of()) == first
    mark(path)
    assert recorded(job_of()) != first


def test_a_number_that_was_changed_in_a_file_is_believed_by_nobody(folder: Path) -> None:
    first = recorded(job_of())
    (path,) = files(folder)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"inputs":', b'"inputs":1'))
    assert recorded(job_of()) == first
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"pieces": 3}', b"[1, 2"])
def test_a_broken_file_is_made_anew(folder: Path, content: bytes) -> None:
    first = recorded(job_of())
    (path,) = files(folder)
    whole = path.read_bytes()
    path.write_bytes(content)
    assert recorded(job_of()) == first
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "file"))
    assert isinstance(recorded(job_of()), Recording)


def test_a_file_that_cannot_be_written_is_no_error(folder: Path) -> None:
    first = recorded(job_of())
    (path,) = files(folder)
    path.unlink()
    path.mkdir()
    assert recorded(job_of()) == first


def test_an_empty_name_switches_the_cache_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    recorded(job_of())
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_the_cache_is_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SHARDWRIGHT_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    recorded(job_of())
    assert len(files(tmp_path / ".cache" / "shardwright" / "recordings")) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": {"size": 3, "sequence": 3}},
        {"batch": {"size": 2, "sequence": 4}},
        {"model": {"kind": "transformer", "layers": 2, "dim": 4, "heads": 1, "vocab": 5}},
        {"cluster": {"preset": "h100-8", "world_size": 2}},
    ],
    ids=["batch", "sequence", "model", "device"],
)
def test_another_step_is_another_recording(folder: Path, changes: dict[str, Any]) -> None:
    first, other = recorded(job_of()), recorded(job_of(**changes))
    assert first != other
    assert len(files(folder)) == 2
    assert [recorded(job_of()), recorded(job_of(**changes))] == [first, other]


def test_another_lowering_is_another_recording(folder: Path) -> None:
    shape = {"dim": 8, "layers": 1, "heads": 1, "ffn_dim": 8, "vocab": 5}
    jobs = [
        job_of(model={"kind": "llama"} | shape, memory={"lowering": device})
        for device in ("cpu", "cuda")
    ]
    on_cpu, on_gpu = map(recorded, jobs)
    assert on_cpu.operators != on_gpu.operators
    assert len(files(folder)) == 2


def test_other_microbatches_are_another_recording(folder: Path) -> None:
    shape = {"dim": 8, "layers": 1, "heads": 1, "ffn_dim": 8, "vocab": 5}
    jobs = [
        job_of(model={"kind": "llama"} | shape, parallel={"microbatches": number})
        for number in (1, 2)
    ]
    whole, halves = map(recorded, jobs)
    assert whole != halves
    assert len(files(folder)) == 2


@pytest.mark.parametrize(
    "changes",
    [{"train": {"optimizer": "adam", "seed": 3}}, {"cluster": {"world_size": 4}}],
    ids=["train", "ranks"],
)
def test_what_a_step_does_not_depend_on_is_no_other_recording(
    folder: Path, changes: dict[str, Any]
) -> None:
    assert recorded(job_of()) == recorded(job_of(**changes))
    assert len(files(folder)) == 1


def test_rows_of_tables_are_no_part_of_a_recording(folder: Path) -> None:
    model = {"bottom": [4, 8], "top": [2, 1]}
    jobs = [
        parse_job({"model": model, "tables": [{"name": "t", "rows": rows, "dim": 8}]})
        for rows in (3, 5)
    ]
    first, second = (described(job) for job in jobs)
    assert first.recording == second.recording
    assert first.tables != second.tables
    assert len(files(folder)) == 1


def test_tables_alone_have_no_recording(folder: Path) -> None:
    made = plan(parse_job({"tables": [{"name": "t", "rows": 3, "dim": 8}]}))
    assert made.recording is None
    assert files(folder) == []
