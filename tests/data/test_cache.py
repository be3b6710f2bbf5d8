"""Rows in binary are what the text says, for every rank, from any row on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.core.errors import InputError
from shardwright.data import cache
from shardwright.data.cache import (
    LIST,
    CachedRows,
    cached_evaluation,
    write_cache,
)
from shardwright.data.logs import BagColumn, ColumnLog, CriteoLog
from shardwright.data.reading import (
    ClickBatch,
    ClickLog,
    ClickReader,
    DealtRows,
    evaluation_batches,
    numbered_batches,
)
from shardwright.data.synthetic import ClickModel, dense_names

TABLES = (50,) * 26
BAGS = ("user", "seen", "empty")
ROWS = 37


@pytest.fixture(params=["criteo", "bags", "weighted"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> ClickLog:
    path = tmp_path / "log.txt"
    if request.param == "criteo":
        ClickModel(cardinalities=TABLES).write(path, ROWS)
        return CriteoLog(path, TABLES)
    model = ClickModel().named(BAGS, (50, 9, 20), (1.0, 2.5, 0.3), 3)
    model.write(path, ROWS)
    features = [BagColumn(name, size) for name, size in zip(BAGS, (50, 9, 20), strict=True)]
    if request.param == "weighted":
        lines = path.read_text().splitlines()
        weighted = [line.rpartition("\t")[0] + f"\t3:0.{n} 7" for n, line in enumerate(lines)]
        path.write_text("\n".join([lines[0], *weighted[1:]]) + "\n")
        features[2] = BagColumn("empty", 20, weighted=True)
    return ColumnLog(path, "label", dense_names(3), features)


def arrays(batch: ClickBatch) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    yield "dense", batch.dense
    yield "labels", batch.labels
    if isinstance(batch.ids, dict):
        for name, bag in batch.ids.items():
            yield from ((f"{name} {n}", values) for n, values in enumerate(bag))
    else:
        yield "ids", batch.ids


def assert_same(one: ClickBatch, two: ClickBatch) -> None:
    for (name, a), (other, b) in zip(arrays(one), arrays(two), strict=True):
        assert (name, a.dtype, a.tolist()) == (other, b.dtype, b.tolist())


def cached(log: ClickLog, folder: Path, **options: Any) -> CachedRows:
    write_cache(log, folder / "rows", narrow=True, **options)
    return CachedRows(folder / "rows")


@pytest.mark.parametrize(("batch", "world_size"), [(1, 1), (4, 2), (5, 3), (30, 2)])
def test_a_rank_reads_the_batches_that_the_text_has(
    log: ClickLog, tmp_path: Path, batch: int, world_size: int
) -> None:
    rows = cached(log, tmp_path)
    for rank in range(world_size):
        text = ClickReader(log, batch, rank, world_size)
        for one, two in islice(zip(numbered_batches(rows.at, batch, rank, world_size), text), 12):  # noqa: B905
            assert_same(one, two)


@pytest.mark.parametrize(
    "dealt",
    [
        (DealtRows(4, (8, 8)),),
        (DealtRows(4, (9, 8)),),
        (DealtRows(3, (6, 6, 6)), DealtRows(5, (10,))),
    ],
    ids=["the same ranks", "one took more", "other ranks twice"],
)
def test_a_resumed_rank_goes_on_with_the_rows_that_the_text_has_left(
    log: ClickLog, tmp_path: Path, dealt: tuple[DealtRows, ...]
) -> None:
    rows = cached(log, tmp_path)
    for rank in range(2):
        text = ClickReader(log, 4, rank, 2, dealt=dealt)
        binary = numbered_batches(rows.at, 4, rank, 2, dealt=dealt)
        for _ in range(12):
            assert_same(next(binary), next(text))


@pytest.mark.parametrize(("batch", "world_size"), [(4, 2), (50, 1), (30, 3)])
def test_held_out_rows_are_read_once_under_their_numbers(
    log: ClickLog, tmp_path: Path, batch: int, world_size: int
) -> None:
    rows = cached(log, tmp_path)
    for rank in range(world_size):
        text = list(evaluation_batches(log, batch, rank, world_size))
        binary = list(cached_evaluation(rows, batch, rank, world_size))
        assert [n.tolist() for _, n in binary] == [n.tolist() for _, n in text]
        for (one, _), (two, _) in zip(binary, text, strict=True):
            assert_same(one, two)


def test_what_was_read_is_let_go_of_again(
    log: ClickLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = []
    monkeypatch.setattr(cache, "_LET_GO", 100)
    monkeypatch.setattr(CachedRows, "_let_go", lambda rows: let_go.extend(rows._pages))
    rows = cached(log, tmp_path)
    rows.batch(0, ROWS)
    assert len(let_go) == len(rows.list.arrays)


def test_a_step_reads_only_its_rank_s_rows(log: ClickLog, tmp_path: Path) -> None:
    rows = cached(log, tmp_path)
    asked: list[tuple[int, int]] = []
    read = rows.batch
    rows.batch = lambda a, b: (asked.append((a, b)), read(a, b))[1]  # type: ignore[method-assign]
    list(islice(numbered_batches(rows.at, 4, 1, 3), 3))
    assert asked == [(4, 8), (16, 20), (28, 32)]


def test_a_bad_row_is_named_and_leaves_nothing_or_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    ClickModel(cardinalities=TABLES).write(path, 8)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "not\ta row", *lines[3:]]) + "\n")
    log = CriteoLog(path, TABLES)
    with pytest.raises(InputError, match=r"log.txt:4, row: expected 40 fields, got 2"):
        write_cache(log, tmp_path / "rows", narrow=True)
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]
    found = cached(log, tmp_path, skip_bad_rows=True)
    assert (len(found), found.list.bad_rows) == (8, 1)


def test_a_cache_that_lost_bytes_or_files_is_refused_by_name(log: ClickLog, tmp_path: Path) -> None:
    folder = cached(log, tmp_path).folder
    labels = (folder / "labels").read_bytes()
    (folder / "labels").write_bytes(labels[:-1])
    with pytest.raises(InputError, match=rf"labels: expected {ROWS} bytes, got {ROWS - 1}. Remove"):
        CachedRows(folder)
    (folder / "labels").unlink()
    with pytest.raises(InputError, match=r"labels: expected a file of the cache, got 'No such"):
        CachedRows(folder)
    (folder / LIST).write_text('{"schema": "other"}')
    with pytest.raises(InputError, match=r"rows.json"):
        CachedRows(folder)
