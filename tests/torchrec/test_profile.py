"""The door to TorchRec's world is opened where a job asks for it, and leads to nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.planner import profiles

LOADED = """
import sys
from pathlib import Path
from shardwright.core.job import read_job
from shardwright.core.model_of_job import model_of
from shardwright.planner.planner import plan
plan(read_job(Path(sys.argv[1])), model_of)
print(*sys.modules)
"""
TABLES = """
[[tables]]
name = "a"
rows = 1000
dim = 64

[[tables]]
name = "b"
rows = 2000
dim = 128
"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "asked",
    ['constants = "torchrec-1.9"', 'options = "torchrec"', 'search = "proposers"'],
)
def test_a_plan_by_torchrecs_rules_needs_neither_torchrec_nor_torch(
    tmp_path: Path, asked: str
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f"[cluster]\nworld_size = 4\n\n[planner]\n{asked}\n{TABLES}")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(job)], capture_output=True, text=True, check=True
    )
    loaded = {name for name in done.stdout.split() if "torch" in name}
    assert "shardwright.torchrec.profile" in loaded
    assert {name.split(".")[0] for name in loaded} == {"shardwright"}
    assert not any(name.startswith("shardwright.torchrec.adapter") for name in loaded)


def test_the_planner_knows_of_no_other_profile() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = profiles.nonsense
