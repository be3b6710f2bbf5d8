"""Files that an earlier version wrote are read by this one: plans, checkpoints, records of a run.

Those in earlier/ are of commit 7aca9c0, as it wrote them but for the folder in outcome.json: plans
of small jobs, the folder of a run of two ranks with its checkpoint and the records of going on from
it, what ``calibrate --quick`` found (cluster.toml, which jobs of jobs.toml rest on), and what
earlier_tasks.py saved, with its losses. They are never made anew: where they cannot be read, a
format has changed, which takes a new number in its tag.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import earlier_tasks as tasks
import msgspec
import pytest
import resuming_tasks
from pool import Threads

import shardwright as sw
from shardwright.launcher.ending import decode_outcome
from shardwright.train.sources import source_of

EARLIER = Path(__file__).parent / "earlier"
RUN = EARLIER / "run"
CONSTANTS = "the constants of the h100-8 preset changed, and explain takes no plan of others"
OPTIONS = "options are counted otherwise, and explain takes no plan with another count"


def _kept(name: str) -> Any:
    return json.loads((RUN / name).read_text())


def cannot(name: str, why: str) -> Any:
    """A file that this version does not read, though the one that wrote it did."""
    return pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=why))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "run/plan",
        "transformer.plan",
        "llama.plan",
        "recommender.plan",
        "routed.plan",
        cannot("tables_preset.plan", CONSTANTS),
        cannot("tables_options.plan", OPTIONS),
        "memory_section.plan",
    ],
)
def test_a_plan_of_an_earlier_version_has_its_numbers(call: Any, name: str) -> None:
    """``explain`` computes them again, and ends with 4 where one is another."""
    path = EARLIER / f"{name}.json"
    plan = json.loads(path.read_text())
    first = [
        *(table["name"] for table in plan["tables"]),
        *(unit["name"] for unit in plan["units"]),
    ]
    for words in ((), ("--tensor", first[0]), ("--unit", first[-1])):
        answer = call("explain", path, *words)
        assert (answer.code, answer.err) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tables_preset", "tables_options"])
def test_a_plan_that_is_not_explained_is_read(name: str) -> None:
    plan = sw.read_plan(EARLIER / f"{name}.plan.json", check=True)
    assert len(plan.tables) == 3


@pytest.mark.slow
def test_records_of_an_earlier_version_are_read_and_compared(call: Any) -> None:
    measured = sw.read_measurement(RUN / "measured.json")
    assert json.loads(msgspec.json.encode(measured)) == _kept("measured.json")
    assert decode_outcome((RUN / "outcome.json").read_bytes()).reason == "finished"
    assert call("compare", RUN, "--json").json == _kept("comparison.json")
    assert call("report", RUN, "-o", "report.html").code == 0


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on_as_it_did(call: Any, tmp_path: Path) -> None:
    """From step 4 of 8 to the losses that the version which saved it went on to, but for the last
    bits, which another processor's kernels round otherwise; its rows are made up again."""
    out = tmp_path / "dlrm"  # as the plan says
    shutil.copytree(RUN / "checkpoints", out / "checkpoints")
    job = sw.read_plan(RUN / "plan.json").job
    source_of(job).prepare()
    plan = str(RUN / "plan.json")
    found = Threads().run(2, resuming_tasks.train, plan=plan, folder=str(out), resume=True)
    for rank, (losses, _) in enumerate(found):
        assert losses == pytest.approx(_kept(f"rank-{rank}.record.json")["losses"], rel=1e-6)
    assert [said["resumed"] for _, said in found] == [(4,), (4,)]


@pytest.mark.slow
@pytest.mark.parametrize("case", tasks.CASES)
def test_a_checkpoint_of_an_earlier_version_goes_on_as_it_did(case: str) -> None:
    """Units cut in every way, with AdamW's states; tables with row-wise Adagrad and Adam: losses
    are those of the earlier version but for last bits, which another processor rounds otherwise."""
    plan = sw.read_plan(EARLIER / "routed.plan.json")
    then = json.loads((EARLIER / "losses.json").read_text())[case]
    folder = str(EARLIER / "saved" / case)
    found = Threads().run(2, tasks.resumed, case=case, folder=folder, plan=plan)
    expected = [pytest.approx(rank, rel=1e-6) for rank in map(_numbers, then)]
    assert [*map(_numbers, found)] == expected


def _numbers(losses: list[str]) -> list[float]:
    return [float.fromhex(loss) for loss in losses]
