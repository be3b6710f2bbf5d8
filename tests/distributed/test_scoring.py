"""What is trained on is scored over all ranks, at the steps that a job asks for and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import scoring_tasks as tasks
from pool import Pool

from shardwright.core.measurement import Record
from shardwright.data import quality
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan, write_plan
from shardwright.train.records import merge
from shardwright.train.sources import source_of

TABLES = [{"name": f"C{i}", "rows": 60, "dim": 4} for i in range(1, 27)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_scores_are_those_of_all_rows_of_all_ranks_since_the_last_ones(
    pool: Pool, world_size: int
) -> None:
    draw = np.random.default_rng(world_size)
    logits = draw.normal(-1, 1, (5, world_size, 200)).astype(np.float32)
    labels = (draw.random(logits.shape) < 0.3).astype(np.float32)
    results = pool.run(world_size, tasks.scored, logits=logits, labels=labels, every=2)
    assert all(found == results[0][0] for found, _ in results)
    assert [count for _, count in results] == [2] * world_size  # after steps 2 and 4
    for found, steps in zip(results[0][0], (slice(0, 2), slice(2, 4)), strict=True):
        clicked, score = labels[steps].ravel(), logits[steps].ravel().astype(np.float64)
        p = 1 / (1 + np.exp(-score))
        assert (found.step, found.rows) == (steps.stop, clicked.size)
        assert abs(found.auc - quality.auc(clicked, score)) <= found.auc_error < 2e-3
        assert found.log_loss == pytest.approx(quality.log_loss(clicked, p))
        assert found.accuracy == pytest.approx(quality.accuracy(clicked, p))
        assert found.majority == pytest.approx(quality.majority(clicked))
        assert found.normalized_entropy == pytest.approx(quality.normalized_entropy(clicked, p))
        assert found.calibration == pytest.approx(quality.calibration(clicked, p))


def run(pool: Pool, folder: Path, **train: Any) -> tuple[Plan, list[tuple[Record, int]]]:
    folder.mkdir()
    job = parse_job(
        {
            "model": {"bottom": [4], "top": [8, 1]},
            "tables": TABLES,
            "cluster": {"preset": "local", "world_size": 2},
            "batch": {"size": 16},
            "data": {"kind": "synthetic", "rows": 500, "test_rows": 0},
            "train": {"steps": 10, "out": str(folder), **train},
        }
    )
    source_of(job).prepare()
    made = plan(job)
    write_plan(made, folder / "plan.json")
    return made, pool.run(2, tasks.trained, plan=str(folder / "plan.json"), folder=folder)


@pytest.mark.slow
def test_a_run_that_is_scored_learns_the_same_with_a_collective_more_per_score(
    pool: Pool, tmp_path: Path
) -> None:
    _, plain = run(pool, tmp_path / "plain")
    made, scored = run(pool, tmp_path / "scored", metrics_every=4)
    assert [record.losses for record, _ in scored] == [record.losses for record, _ in plain]
    assert [more - count for (_, more), (_, count) in zip(scored, plain, strict=True)] == [2, 2]
    assert plain[0][0].scores == ()
    found = merge(made, [record for record, _ in scored]).scores or ()
    assert [(each.step, each.rows) for each in found] == [(4, 128), (8, 128)]
    mean = np.mean([record.losses[:4] for record, _ in scored])
    assert found[0].log_loss == pytest.approx(mean, rel=1e-6)
    lines = (tmp_path / "scored" / "progress.jsonl").read_bytes().splitlines()
    shown = [entry for line in lines if "scores" in (entry := msgspec.json.decode(line))]
    assert [entry["scores"]["step"] for entry in shown] == [4, 8]
    assert all("AUC" in entry["text"] and "accuracy" in entry["text"] for entry in shown)
