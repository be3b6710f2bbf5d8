"""A job small enough to plan in a blink, and its plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
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
