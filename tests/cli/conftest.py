"""The command line called in this process, and a job small enough to plan in a blink."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main

JOB = """
[model]
bottom = [32, 16]
top = [32, 1]

[cluster]
world_size = 2
ddr_cap = "5 MiB"

[batch]
size = 64

[train]
optimizer = "adagrad"

[[tables]]
name = "big"
rows = 100_000
dim = 16

[[tables]]
name = "middle"
rows = 5_000
dim = 16

[[tables]]
name = "small"
rows = 20
dim = 16
"""


@dataclass(frozen=True)
class Answer:
    """What a command left: its exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refuses(self, code: int, *words: str) -> None:
        """One line on stderr that says all of ``words``; nothing on stdout."""
        assert self.code == code, self
        assert self.err.startswith("shardwright"), self
        assert self.err.count("\n") == 1, self
        assert self.err.endswith("\n"), self
        assert "Traceback" not in self.err
        assert "\x1b" not in self.err
        assert self.out == ""
        for word in words:
            assert word in self.err


Call = Callable[..., Answer]


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Call:
    """``call("plan", path)`` as typed in an empty folder, away from a terminal."""
    for name in ("FORCE_COLOR", "NO_COLOR", "SHARDWRIGHT_LOG", "RANK", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> Answer:
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        streams = capsys.readouterr()
        return Answer(code, streams.out, streams.err)

    return command


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The plan of the job, which is the same whoever makes it and where."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "job.toml").write_text(JOB)
    words = [
        "plan",
        folder / "job.toml",
        "--set",
        "planner.dedup=false",
        "-o",
        folder / "plan.json",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwright.cli.planning.FIRST", math.inf)
        assert main([str(word) for word in words]) == 0
    return (folder / "plan.json").read_bytes()


@pytest.fixture
def plan(made: bytes, job: Path, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_bytes(made)
    return path


@pytest.fixture
def edit(plan: Path) -> Callable[..., Path]:
    """Change the plan's JSON by hand and leave its fingerprint."""

    def edited(**changes: Any) -> Path:
        document = json.loads(plan.read_text()) | changes
        plan.write_text(json.dumps(document))
        return plan

    return edited
