"""The profile of ranks of which one comes late: who waited for whom, and for how long."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pool import Pool
from profile_tasks import DELAY, STEPS, offsets, trained, with_a_straggler

from shardwright.core.measurement import Record, by_phase
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan, write_plan
from shardwright.launcher.folder import trace_file
from shardwright.train.compare import compare
from shardwright.train.records import merge, stages_of, waiting
from shardwright.train.sources import source_of

Straggled = Callable[[int], tuple[Path, list[Any]]]


@pytest.fixture(scope="module")
def straggled(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Straggled:
    """A folder with traces of ranks of which the last comes late, and what they found."""

    @cache
    def of(ranks: int) -> tuple[Path, list[Any]]:
        folder = tmp_path_factory.mktemp("straggled")
        return folder, pool.run(ranks, with_a_straggler, folder=folder, straggler=ranks - 1)

    return of


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_delay_of_a_straggler_is_found_again_as_waiting(
    straggled: Straggled, world_size: int
) -> None:
    straggler = world_size - 1
    _, results = straggled(world_size)
    profiles = [profile for profile, _ in results]
    late = statistics.median(results[straggler][1])
    found, unmatched = waiting({profile.rank: profile.meetings for profile in profiles})
    assert unmatched == 0
    for rank in range(straggler):
        own = [seconds for at, m, seconds, _ in found if (at, m.label) == (rank, "rows")]
        assert len(own) == STEPS
        assert statistics.median(own) == pytest.approx(late, rel=0.1)
    assert all(s == 0 for at, m, s, _ in found if (at, m.label) == (straggler, "rows"))
    (stage,) = stages_of([[profile] for profile in profiles])
    assert max(stage.awaited, key=lambda awaited: awaited.seconds).rank == straggler
    for line in by_phase(stage)["exchange_rows"]:
        assert line.waiting + line.moving < line.seconds
        assert (line.waiting > DELAY / 2) == (line.rank != straggler)


ASIDE = 0.5e6 * DELAY  # microseconds by which two clocks of a busy machine may differ here


def test_a_trace_opens_as_chrome_s_and_has_phases_and_collectives(straggled: Straggled) -> None:
    folder, _ = straggled(2)
    for rank in range(2):
        trace = msgspec.json.decode(trace_file(folder, rank, "training").read_bytes())
        spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        by_row = {row: [e for e in spans if e["cat"] == row] for row in ("phases", "collectives")}
        assert [e["name"] for e in by_row["phases"]] == ["exchange_rows"] * STEPS
        assert [e["name"] for e in by_row["collectives"]] == ["start", "rows"] * STEPS
        (first, last) = (by_row["phases"][0], by_row["phases"][-1])
        operators = [e for e in spans if e["cat"] == "cpu_op" and e["name"] == "aten::full"]
        begin, end = first["ts"] - ASIDE, last["ts"] + last["dur"] + ASIDE
        inside = [e for e in operators if begin <= e["ts"] <= end]
        assert len(inside) == STEPS


@pytest.mark.parametrize("world_size", [1, 3])
def test_clocks_of_one_host_are_found_to_be_one_clock(pool: Pool, world_size: int) -> None:
    for offset, error in pool.run(world_size, offsets):
        assert abs(offset) <= error < 1.0


def records(pool: Pool, folder: Path, steps: int, profiled: int) -> tuple[Plan, list[Record]]:
    names = [f"C{i}" for i in range(1, 27)]
    whole = {"rows": 60, "dim": 4, "sharding_types": ["table_wise"]}
    tables = [{"name": name, **whole} for name in names]
    job = parse_job(
        {
            "model": {"bottom": [4], "top": [8, 1]},
            "tables": tables,
            "cluster": {"preset": "local", "world_size": 2},
            "batch": {"size": 4},
            "data": {"kind": "synthetic", "rows": 50, "test_rows": 5000},
            "train": {"steps": steps, "out": str(folder)},
        }
    )
    source_of(job).prepare()
    made = plan(job)
    write_plan(made, folder / "plan.json")
    given = {"plan": str(folder / "plan.json"), "folder": folder, "steps": profiled}
    return made, pool.run(2, trained, **given)


def test_a_run_s_profile_has_its_kernels_and_phases_and_leaves_its_comparison_as_it_is(
    pool: Pool, tmp_path: Path
) -> None:
    made, found = records(pool, tmp_path, steps=12, profiled=3)
    measured = merge(made, found)
    training, test = measured.profile or ()
    assert (training.name, training.steps, test.name, test.steps) == ("training", 3, "test", 3)
    assert training.unmatched == test.unmatched == 0
    calls = {kernel.name: kernel.calls for kernel in training.kernels}
    assert calls["all_to_all"] % (3 * 2) == 0  # as many in every step, on both ranks
    assert calls["aten::addmm"] == 3 * 3 * 2  # three layers
    assert {"load", "forward", "backward", "reduce", "step"} <= set(by_phase(training))
    assert set(by_phase(test)) == {"load", "exchange_ids", "lookup", "exchange_rows", "forward"}
    assert sum(kernel.share for kernel in training.kernels) == pytest.approx(1)
    assert measured.time_steps == (9, 10, 11, 12)  # memory 3 to 5, the profile 6 to 8
    assert compare(made, measured).failures == ()


def test_a_run_with_few_steps_is_profiled_from_its_second_step_on(
    pool: Pool, tmp_path: Path
) -> None:
    made, found = records(pool, tmp_path, steps=4, profiled=20)
    training, test = merge(made, found).profile or ()
    assert (training.steps, test.steps) == (3, 3)  # the second to the fourth; 5,000 rows are three
