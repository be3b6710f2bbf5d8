"""The example of a model and a loop of one's own plans, learns, and takes what was predicted."""

from __future__ import annotations

from pathlib import Path

import example_tasks as tasks
import pytest
from combinations import rare
from pool import Pool

import shardwright as sw
from shardwright.cli.main import main
from shardwright.report.table import comparison_summary, text_of


@pytest.mark.parametrize("ranks", [2, rare(1)])
def test_a_loop_of_one_s_own_learns_and_takes_what_was_predicted(pool: Pool, ranks: int) -> None:
    found = pool.run(ranks, tasks.train_own, steps=40)
    plan, measured = found[0]
    assert [other for _, other in found] == [measured] * ranks
    compared = sw.compare(plan, measured, tolerance=0.01)
    assert compared.failures == ()
    assert {line.rank for line in compared.exact if line.measured} == set(range(ranks))
    assert measured.curve.loss[0] > 2.0  # of ten classes: 2.3
    assert sum(measured.curve.loss[-5:]) / 5 < 1.5


@pytest.mark.slow
def test_what_it_measured_is_a_run_s_folder(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ((plan, measured),) = pool.run(1, tasks.train_own, steps=6)
    sw.write_plan(plan, tmp_path / "plan.json")
    sw.write_measurement(measured, tmp_path / "measured.json")
    assert main(["compare", str(tmp_path)]) == 0
    summary = comparison_summary(sw.compare(plan, measured), plan)
    assert capsys.readouterr().out == text_of(summary, color=False)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0


def test_a_loop_that_raised_leaves_nothing_behind_and_a_short_one_says_so(pool: Pool) -> None:
    ((plan, short, whole),) = pool.run(1, tasks.measured_twice)
    assert (short.steps, short.memory_steps, short.time_steps) == (2, (), (2,))
    (failure,) = sw.compare(plan, short).failures
    assert failure.startswith("Memory was not measured: it is followed on steps 3 to 5")
    assert (whole.steps, whole.memory_steps, whole.time_steps) == (3, (3,), (2,))
    assert sw.compare(plan, whole).failures == ()
    assert whole.curve.loss == ()


def test_every_rank_of_replicas_of_shards_is_measured(pool: Pool) -> None:
    found = pool.run(4, tasks.measured_on_a_grid)
    plan, measured = found[0]
    assert [other for _, other in found] == [measured] * 4
    compared = sw.compare(plan, measured)
    assert compared.failures == ()
    assert {line.rank for line in compared.exact if line.measured} == {0, 1, 2, 3}


@pytest.mark.product  # daily without torchrun, above
def test_it_prints_the_comparison_under_torchrun() -> None:
    done = tasks.under_torchrun(tasks.OWN_LOOP)
    assert "Memory as predicted: exact bytes equal on 2 of 2 ranks" in done
    assert "step 100: loss " in done
