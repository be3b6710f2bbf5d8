"""Planning starts with little, and without torch where a model's recording is known."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from counting import at_most

from shardwright.estimate.recordings import described, plan
from shardwright.job.job import read_job

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
WITHOUT_TORCH = """
import sys
import shardwright.cli.plan
assert "torch" not in sys.modules, "after the import"
from shardwright.cli.main import main
assert main(["plan", sys.argv[1]]) == 0
assert "torch" not in sys.modules, "after planning"
"""
# The plan's fingerprint, and in a second line the modules that are loaded.
PLANNED = """
import sys
from pathlib import Path
from shardwright.job.job import read_job
from shardwright.estimate.recordings import plan
print(plan(read_job(Path(sys.argv[1]))).fingerprint)
print(*sys.modules)
"""
# A second or two of calls on a machine that is not busy; it takes less than half of them.
CALLS = 1_500_000


def _python(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TABLES = """
[cluster]
preset = "h100-8"
hbm_cap = "2 MiB"

[planner.constraints]
together = [["a", "b"], ["c", "d"]]
apart = [["a", "c", "e"]]
ranks = {e = [1, 2]}

[[tables]]
name = "a"
rows = 1000
dim = 64

""" + "".join(
    f'[[tables]]\nname = "{name}"\nrows = {rows}\ndim = 64\n\n'
    for name, rows in zip("bcdef", (900, 2000, 1000, 300, 10_000), strict=True)
)


@pytest.fixture(scope="module", params=["a model", "tables alone"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "a model":
        described(read_job(DEMO))  # recorded now, if it is not yet
        return str(DEMO)
    path = tmp_path_factory.mktemp("start") / "tables.toml"
    path.write_text(TABLES)
    return str(path)


@functools.cache
def _planned(job: str, seed: str = "1") -> tuple[str, list[str]]:
    """Fingerprint of a plan that another process makes, and the modules that it loads."""
    fingerprint, loaded = _python("-c", PLANNED, job, PYTHONHASHSEED=seed).splitlines()
    return fingerprint, loaded.split()


@pytest.mark.slow_after(1)
def test_planning_never_imports_torch(job: str) -> None:
    _python("-c", WITHOUT_TORCH, job)


@pytest.mark.slow
def test_a_model_needs_torch_once(tmp_path: Path) -> None:
    environment = {"SHARDWRIGHT_CACHE": str(tmp_path)}
    first, second = (_python("-c", PLANNED, str(DEMO), **environment).split() for _ in range(2))
    assert "torch" in first
    assert "torch" not in second


@pytest.mark.slow
def test_hashing_does_not_change_a_plan(job: str) -> None:
    assert _planned(job, "1")[0] == _planned(job, "2")[0] != ""


@pytest.mark.slow_after(1)
def test_planning_loads_nothing_but_numpy_and_msgspec(job: str) -> None:
    loaded = {name.partition(".")[0] for name in _planned(job)[1]}
    foreign = {name for name in loaded - sys.stdlib_module_names if not name.startswith("_")}
    assert foreign - {"typing_extensions"} == {"shardwright", "numpy", "msgspec"}


@pytest.mark.slow_after(1)
def test_planning_loads_no_floor_above_its_own(job: str) -> None:
    _, loaded = _planned(job)
    floors = {name.split(".")[1] for name in loaded if name.startswith("shardwright.")}
    assert floors == {"core", "job", "cost", "heap", "planner", "estimate"}
    of_estimate = {name for name in loaded if name.startswith("shardwright.estimate")}
    names = ("", ".recordings", ".with_tables")
    assert of_estimate == {f"shardwright.estimate{name}" for name in names}


def test_the_demo_is_planned_with_few_calls() -> None:
    demo = read_job(DEMO)
    with at_most(CALLS):
        plan(demo)
