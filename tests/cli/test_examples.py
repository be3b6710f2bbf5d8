"""The jobs of ``examples/`` do what their plans say, and say it on one screen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOBS = sorted(path.stem for path in (ROOT / "examples").glob("*.toml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "peak"),
    [
        *((name, "equal") for name in ("own_model", "vision", "llama_tiny", "llama_experts")),
        ("recommender", "within 0."),  # of one percent: a plan's ids spread evenly
        ("bags", "within 0."),
    ],
)
def test_an_example_is_trained_with_the_memory_of_its_plan(
    name: str, peak: str, tmp_path: Path
) -> None:
    job, changes = f"examples/{name}.toml", ("train.steps=6", f"train.out={tmp_path / 'run'}")
    line = [sys.executable, "-m", "shardwright", "train", job]
    line += [word for change in changes for word in ("--set", change)]
    said = " ".join(_one_screen(line).split())
    assert "exact bytes equal on 2 of 2 ranks, peak " + peak in said


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("command", ["plan", "memory"])
def test_a_first_screen_has_forty_lines_of_eighty_columns(command: str, job: str) -> None:
    if command == "plan" and job in ("llama8b", "llama405b"):
        pytest.skip("no plan follows its runtime")
    _one_screen([sys.executable, "-m", "shardwright", command, f"examples/{job}.toml"])


def _one_screen(line: list[str]) -> str:
    """What a command prints where it ends well."""
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env=os.environ | {"COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)
    return done.stdout
