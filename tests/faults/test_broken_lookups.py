"""``train`` of collections, and of a DLRM with fp16 tables, of which rank 1 is killed, stopped or
given a wrong id in the middle of a lookup."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_training_faults import HANGS, outcome

HERE = Path(__file__).parent
TIMEOUT = 6.0
OWN = """
from recommenders import collections, collections_batches

def build(batch):
    return collections(batch)

def batches(batch, rank):
    return collections_batches(batch, rank, 0)
"""
JOBS = {
    "collections": (
        '[model]\nkind = "python"\npython = "own:build"\n[data]\npython = "own:batches"\n'
        '[train]\nsteps = 1000\ntable_optimizer = "sgd"\n'
    ),
    "fp16": (
        '[model]\nkind = "dlrm"\ndense_features = 3\nbottom = [16, 8]\ntop = [8, 1]\n'
        '[data]\nkind = "synthetic"\nrows = 4000\n'
        + "".join(
            f'[[tables]]\nname = "t{n}"\nrows = {300 * (n + 1)}\ndim = 8\ndtype = "fp16"\n'
            f'sharding_types = ["{kind}"]\n'
            for n, kind in enumerate(("row_wise", "table_wise"))
        )
        + "[train]\nsteps = 1000\n"
    ),
}
IDS = {
    "collections": r"ids of table 'bags\.embedding_bags\.goods', feature 'bought', position \d+: "
    "expected ids from 0 to 3700, got 1000000",
    "fp16": "ids of table 't1', sample 15: expected ids from 0 to 599, got 1000000",
}
PHASES = {"request": "(exchange_ids|lookup)", "take": "reduce"}


def broken(folder: Path, kind: str, how: str) -> str:
    """What is said of a run that goes wrong, which is over in time."""
    shutil.copy(HERE / "broken_lookup.py", folder / "sitecustomize.py")
    shutil.copy(HERE.parent / "distributed" / "recommenders.py", folder)
    (folder / "own.py").write_text(OWN)
    timeout = TIMEOUT if "SIGSTOP" in how else 60.0
    rest = f'timeout = {timeout}\nout = "run"\n[batch]\nsize = 16\n'
    (folder / "job.toml").write_text(JOBS[kind] + rest)
    path = os.pathsep.join([str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {**os.environ, "PYTHONPATH": path, "BROKEN": how}
    line = [sys.executable, "-m", "shardwright", "train", "job.toml", "-n", "2"]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=HANGS, cwd=folder, env=env, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == outcome(folder).code
    return done.stderr


def daily(*chosen: tuple[str, str]) -> pytest.MarkDecorator:
    """Every kind in every phase, of which those that are chosen run daily."""
    every = [(kind, where) for kind in JOBS for where in PHASES]
    left = [case for case in every if case not in chosen]
    cases = [*chosen, *(pytest.param(*case, marks=pytest.mark.product) for case in left)]
    return pytest.mark.parametrize(("kind", "where"), cases)


@pytest.mark.product  # daily one that hangs there, and one that is killed in its backward
@daily()
def test_a_rank_that_is_killed_in_a_lookup_is_named(tmp_path: Path, kind: str, where: str) -> None:
    said = broken(tmp_path, kind, f"SIGKILL {where}")
    assert re.search(rf"rank 1 died without a word at step \d+ in {PHASES[where]}", said), said
    assert outcome(tmp_path).code == 5


@pytest.mark.slow
@daily(("fp16", "request"))
def test_a_rank_that_hangs_in_a_lookup_is_named(tmp_path: Path, kind: str, where: str) -> None:
    said = broken(tmp_path, kind, f"SIGSTOP {where}")
    stopped = r"rank 1 made no progress for \d+ s \(the process is stopped\)"
    assert re.search(rf"{stopped}; step \d+, {PHASES[where]}", said), said
    assert outcome(tmp_path).code == 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["collections", pytest.param("fp16", marks=pytest.mark.product)])
def test_a_wrong_id_ends_the_run_with_its_rank_table_and_value(tmp_path: Path, kind: str) -> None:
    said = broken(tmp_path, kind, "id")
    (line,) = [text for text in said.splitlines() if text.startswith("shardwright: rank 1")]
    assert re.search(IDS[kind], line), said
    assert outcome(tmp_path).code == 2
