from __future__ import annotations

import io
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shardwright.core.cluster import SCHEMA, Calibration, SourcedFigure
from shardwright.core.errors import InputError
from shardwright.core.recording import Unfolded
from shardwright.cost.presets import LOCAL
from shardwright.estimate.recordings import plan, recorded
from shardwright.job.job import Job, parse_job
from shardwright.planner.explain.recompute import draft_of, priced_again
from shardwright.train.calibrate import cases, probes
from shardwright.train.calibrate.probes import Probe, calibrated_job, fitted, least, products_of

BATCH = 512
FIGURES = {n: SourcedFigure(c.value, c.unit, c.source, c.date) for n, c in LOCAL.items()}
CAPACITY = {"ddr_cap": SourcedFigure(2.0**30, "B", "a test", "2026-11", 1)}
MACHINE = Calibration(SCHEMA, "2026-11", 2, "cpu", "gloo", {"cores": "2"}, CAPACITY, FIGURES)
TRUTH = {
    "elementwise_rate": 4e9,
    "operation_latency": 2e-5,
    "parse_cost": 3e-5,
    "row_latency": 5e-8,
    "slowest_share": 0.2,
    "load_latency": 1e-3,
    "exchange_ids_latency": 2e-3,
    "lookup_latency": 1e-4,
    "exchange_rows_latency": 3e-4,
    "reduce_latency": 4e-3,
    "step_latency": 5e-4,
}


def _with(values: dict[str, float]) -> Calibration:
    return probes._with(MACHINE, values, "measured")


@pytest.fixture(scope="module")
def job() -> Job:
    tables = [
        {"name": f"t{i}", "rows": 4000 * (i + 1), "dim": 16, "sharding_types": ["table_wise"]}
        for i in range(4)
    ]
    return parse_job(
        {
            "model": {"bottom": [64, 16], "top": [128, 1]},
            "tables": tables,
            "cluster": {"world_size": 2, "ddr_cap": "1 GiB"},
            "batch": {"size": BATCH},
        }
    )


def _probe(job: Job, size: int, truth: Calibration) -> Probe:
    its = msgspec.structs.replace(job, batch=msgspec.structs.replace(job.batch, size=size))
    made = plan(calibrated_job(its, MACHINE))
    again = msgspec.structs.replace(made, job=calibrated_job(made.job, truth))
    ranks = priced_again(again).seconds
    phases = dict.fromkeys(phase for rank in ranks for phase in rank)
    return Probe(made, {p: statistics.fmean(r.get(p, 0.0) for r in ranks) for p in phases})


@pytest.mark.parametrize("size", [BATCH * 3 // 4, BATCH * 3 // 2])
def test_what_two_batches_took_predicts_another(job: Job, size: int) -> None:
    truth = _with(TRUTH)
    whole, *had = (_probe(job, n, truth) for n in (size, *(BATCH // p for p in probes.PARTS)))
    before, after = (whole.predicted(c) for c in (MACHINE, fitted(had, MACHINE, "measured")))
    assert sum(before.values()) < 0.5 * sum(whole.seconds.values())
    large = {phase: seconds for phase, seconds in whole.seconds.items() if seconds > 1e-3}
    assert {"load", "exchange_ids", "reduce", "step"} <= set(large)
    assert {phase: after[phase] for phase in large} == pytest.approx(large, rel=0.1)
    assert sum(after.values()) == pytest.approx(sum(whole.seconds.values()), rel=0.03)


def test_a_plan_with_fixed_costs_is_made_again_and_no_faster_than_its_bound(job: Job) -> None:
    made = plan(calibrated_job(job, _with(TRUTH)))
    draft = draft_of(made)  # raises where a number comes out otherwise
    assert made.lower_bound_seconds <= made.max_rank_seconds * (1 + 1e-9)
    assert min(rank["exchange_ids"] for rank in draft.seconds) > TRUTH["exchange_ids_latency"]
    usual = plan(calibrated_job(job, MACHINE))
    assert made.max_rank_seconds > usual.max_rank_seconds + 6e-3


def test_ids_that_never_travel_cost_nothing_fixed(job: Job) -> None:
    alone = [msgspec.structs.replace(t, sharding_types=("data_parallel",)) for t in job.tables]
    made = plan(calibrated_job(msgspec.structs.replace(job, tables=tuple(alone)), _with(TRUTH)))
    assert all("exchange_rows" not in rank for rank in draft_of(made).seconds)


def test_the_products_of_a_job_are_all_flops_of_its_step(job: Job, tmp_path: Path) -> None:
    step, found = Unfolded(recorded(job)), products_of(job)
    flops = sum(moment.piece.work.flops for moment in (*step.forward, *step.backward))
    assert sum(product.flops for product in found) == flops > 0
    cases.products_file(tmp_path).write_bytes(msgspec.json.encode(found))
    timed = cases.products(tmp_path, torch.device("cpu"))
    assert sum(each.amount for each in timed.values()) == flops
    next(iter(timed.values())).work()


@pytest.mark.parametrize(
    ("rows", "targets", "values"),
    [
        ([[1.0, 0.0], [0.0, 2.0]], [3.0, 4.0], [3.0, 2.0]),
        ([[1.0, 0.0], [0.0, 2.0]], [-3.0, 4.0], [0.0, 2.0]),
        ([[1.0, 1.0], [1.0, 2.0]], [2.0, 1.0], [1.5, 0.0]),
        ([[1.0], [1.0]], [-1.0, -2.0], [0.0]),
    ],
)
def test_no_cost_is_negative(rows: Any, targets: Any, values: list[float]) -> None:
    found = least(np.array(rows), np.array(targets))
    assert found.tolist() == pytest.approx(values)


def test_tables_alone_cannot_be_run_and_are_refused_before_anything_is_timed() -> None:
    tables = parse_job({"tables": [{"name": "a", "rows": 10, "dim": 4}]})
    with pytest.raises(InputError):
        probes.calibrate_for(tables, io.StringIO())
