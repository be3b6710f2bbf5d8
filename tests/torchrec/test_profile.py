"""The door to TorchRec's world is opened where a job asks for it, and leads to nothing heavy."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardwright.job.job import parse_job
from shardwright.job.model_of_job import model_of
from shardwright.planner import profiles
from shardwright.planner.planner import plan

# Each job in a process of its own, which has loaded what planning takes and no profile.
LOADED = """
import os
import sys
from pathlib import Path
from shardwright.job.job import read_job
from shardwright.job.model_of_job import model_of
from shardwright.planner.planner import plan
for path in sys.argv[1:]:
    if not os.fork():
        plan(read_job(Path(path)), model_of)
        print(*sys.modules, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
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


def test_a_plan_by_torchrecs_rules_needs_neither_torchrec_nor_torch(tmp_path: Path) -> None:
    asked = ('constants = "torchrec-1.9"', 'options = "torchrec"', 'search = "proposers"')
    jobs = [tmp_path / f"{number}.toml" for number in range(len(asked))]
    for job, line in zip(jobs, asked, strict=True):
        job.write_text(f"[cluster]\nworld_size = 4\n\n[planner]\n{line}\n{TABLES}")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *map(str, jobs)], capture_output=True, text=True, check=True
    )
    told = done.stdout.splitlines()
    assert len(told) == len(asked)
    for line in told:
        loaded = {name for name in line.split() if "torch" in name}
        assert "shardwright.torchrec.profile" in loaded
        assert {name.split(".")[0] for name in loaded} == {"shardwright"}
        assert not any(name.startswith("shardwright.torchrec.adapter") for name in loaded)


def test_the_planner_knows_of_no_other_profile() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = profiles.nonsense


RATES = """
[cluster]
compute_device = "cuda"
world_size = 16
local_world_size = 4
inter_host_bw = 1e6
{more}
[planner]
constants = "torchrec-1.9"
"""


@pytest.mark.parametrize("more", ["", 'hbm_cap = "1 GiB"\n'])
def test_rates_of_torchrecs_are_held_against_its_own_machine(more: str) -> None:
    job = parse_job(tomllib.loads(RATES.format(more=more) + TABLES), "job")
    made = plan(job, model_of)
    assert made.cluster.constants["inter_host_bw"].value == 1e6
    assert made.cluster.name == "torchrec-1.9"
