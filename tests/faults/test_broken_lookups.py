"""``train`` of collections, and of a DLRM with fp16 tables, of which rank 1 is killed, stopped or
given a wrong id in the middle of a lookup."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from commands import Call
from test_training_faults import outcome

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("warm_runs")
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


def broken(call: Call, folder: Path, kind: str, how: str) -> str:
    """What is said of a run that goes wrong, which is over in time."""
    shutil.copy(HERE / "broken_lookup.py", folder / "sitecustomize.py")
    shutil.copy(HERE.parent / "distributed" / "recommenders.py", folder)
    (folder / "own.py").write_text(OWN)
    timeout = TIMEOUT if "SIGSTOP" in how else 60.0
    rest = f'timeout = {timeout}\nout = "run"\n[batch]\nsize = 16\n'
    (folder / "job.toml").write_text(JOBS[kind] + rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setenv("BROKEN", how)
        done = call("train", "job.toml", "-n", "2")
    assert "Traceback" not in done.err
    assert done.code == outcome(folder).code
    return done.err


def daily(*chosen: tuple[str, str]) -> pytest.MarkDecorator:
    """Every kind in every phase, of which those that are chosen run daily."""
    every = [(kind, where) for kind in JOBS for where in PHASES]
    left = [case for case in every if case not in chosen]
    cases = [*chosen, *(pytest.param(*case, marks=pytest.mark.product) for case in left)]
    return pytest.mark.parametrize(("kind", "where"), cases)


@pytest.mark.product  # daily one that hangs there, and one that is killed in its backward
@daily()
def test_a_rank_that_is_killed_in_a_lookup_is_named(
    call: Call, tmp_path: Path, kind: str, where: str
) -> None:
    said = broken(call, tmp_path, kind, f"SIGKILL {where}")
    assert re.search(rf"rank 1 died without a word at step \d+ in {PHASES[where]}", said), said
    assert outcome(tmp_path).code == 5


@pytest.mark.slow
@daily(("fp16", "request"))
def test_a_rank_that_hangs_in_a_lookup_is_named(
    call: Call, tmp_path: Path, kind: str, where: str
) -> None:
    said = broken(call, tmp_path, kind, f"SIGSTOP {where}")
    stopped = r"rank 1 made no progress for \d+ s \(the process is stopped\)"
    assert re.search(rf"{stopped}; step \d+, {PHASES[where]}", said), said
    assert outcome(tmp_path).code == 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["collections", pytest.param("fp16", marks=pytest.mark.product)])
def test_a_wrong_id_ends_the_run_with_its_rank_table_and_value(
    call: Call, tmp_path: Path, kind: str
) -> None:
    said = broken(call, tmp_path, kind, "id")
    (line,) = [text for text in said.splitlines() if text.startswith("shardwright: rank 1")]
    assert re.search(IDS[kind], line), said
    assert outcome(tmp_path).code == 2
