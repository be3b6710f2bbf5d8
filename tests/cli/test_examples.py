"""The jobs of ``examples/`` do what their plans say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "exact bytes equal on 2 of 2 ranks, peak " + peak in done.stdout
