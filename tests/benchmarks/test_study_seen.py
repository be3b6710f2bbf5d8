"""Quarters of the held-out rows by how often their ids were seen in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET, structs
from study.seen import Quarters, as_log, quarters

from shardwright.data.quality import bayes_auc
from shardwright.job.job import Job, parse_job
from shardwright.train.sources import source_of
from shardwright.train.sources.clicks import model_of_clicks


def columns(tmp_path: Path, train: list[str], test: list[str]) -> Job:
    for name, ids in (("train", train), ("test", test)):
        lines = ["label,I1,a,b", *(f"{k % 2},1.0,{row},0" for k, row in enumerate(ids))]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    data = {"kind": "columns", "path": str(tmp_path / "train.csv")}
    return parse_job(
        {
            "model": {"dense_features": 1, "bottom": [8], "top": [1]},
            "data": data | {"test_path": str(tmp_path / "test.csv")},
            "tables": [{"name": name, "rows": 10, "dim": 8} for name in "ab"],
        }
    )


def found(job: Job, trained: int) -> Quarters:
    made = quarters(job, job, job.tables[:1], trained)
    assert made is not None
    return made


def test_rows_with_ids_that_were_seen_most_and_least_are_a_quarter_each(tmp_path: Path) -> None:
    job = columns(tmp_path, ["1", "1", "1", "2", "2", "3"], ["3", "1", "2", "4", "2"])
    got = found(job, 6)
    assert got.often.tolist() == [False, True, False, False, False]
    assert got.rarely.tolist() == [False, False, False, True, False]
    assert got.seen == pytest.approx((4, 1))  # count and one
    assert got.chance is None


def test_rows_that_training_did_not_come_to_do_not_count_and_passes_do(tmp_path: Path) -> None:
    job = columns(tmp_path, ["1", "1", "1", "2"], ["1", "1", "2", "1"])
    assert found(job, 2).seen == pytest.approx((3, 1))
    assert found(job, 8).seen == pytest.approx((7, 3))  # two passes


def test_a_bag_counts_by_the_mean_over_its_ids(tmp_path: Path) -> None:
    job = columns(tmp_path, ["1 1", "1 2"], ["2 2", "1 2", "", "2"])
    table = structs.replace(job.tables[0], pooling_factors=(2.0,))
    job = structs.replace(job, tables=(table, job.tables[1]))
    got = found(job, 2)
    assert got.often.tolist() == [False, True, False, False]
    assert got.rarely.tolist() == [False, False, True, False]
    assert got.seen == pytest.approx((np.sqrt(4 * 2), 1))


def made_up(tmp_path: Path, **data: Any) -> Job:
    held_out = {} if "days" in data else {"test_rows": 1000}
    job = parse_job(
        {
            "model": {"dense_features": 2, "bottom": [8], "top": [1]},
            "data": {"kind": "synthetic", "rows": 3000, "seed": 4} | held_out | data,
            "train": {"out": str(tmp_path)},
            "tables": [{"name": name, "rows": 500, "dim": 8} for name in "ab"],
        }
    )
    source_of(job).prepare()
    return job


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("days", [{}, {"days": 3, "drift": 0.5}])
def test_the_best_on_a_quarter_is_that_of_the_law_that_made_it(
    tmp_path: Path, cached: bool, days: dict[str, Any]
) -> None:
    job = made_up(tmp_path, **days)
    reading = structs.replace(job, data=as_log(job))
    if cached:
        data = structs.replace(reading.data, cache=str(tmp_path / "rows"))
        reading = structs.replace(job, data=data)
        source_of(reading).prepare()
    got = quarters(job, reading, job.tables, 1500)
    assert got is not None
    first, count = (2500, 500) if days else (3000, 1000)
    made = model_of_clicks(job).rows(first, first + count)
    assert got.chance is not None
    np.testing.assert_array_equal(got.chance, made.probabilities)
    labels = made.batch.labels.astype(np.float64)
    scores = np.stack([np.arange(count), labels, np.zeros(count)], 1)
    quality = got.quality(scores)
    for name, own in (("often", got.often), ("rarely", got.rarely)):
        of_quarter = quality[name]  # type: ignore[index]
        assert of_quarter.rows == own.sum()
        assert of_quarter.best_auc == pytest.approx(bayes_auc(made.probabilities[own]))
        assert of_quarter.majority == max(labels[own].mean(), 1 - labels[own].mean())
    assert got.seen[0] > got.seen[1] > 1


def test_rows_made_up_are_read_where_they_lie_with_the_popularity_that_they_have(
    tmp_path: Path,
) -> None:
    data = as_log(made_up(tmp_path))
    assert (data.kind, data.zipf, data.drift) == ("columns", 1.2, UNSET)
    assert Path(data.path).exists()
    assert Path(data.test_path).exists()


def test_few_held_out_rows_have_no_quarters(tmp_path: Path) -> None:
    job = columns(tmp_path, ["1"], ["1"])
    assert quarters(job, job, job.tables, 1) is None
