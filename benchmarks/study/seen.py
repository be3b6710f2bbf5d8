"""Which quarter of the held-out rows has ids seen most often in training, and which least often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from shardwright.core.measurement import Quality
from shardwright.core.model import TableSpec
from shardwright.data.cache import CachedRows, cached_evaluation
from shardwright.data.days import Part as PartOfLog
from shardwright.data.days import bounds
from shardwright.data.reading import ClickBatch, evaluation_batches
from shardwright.job.job import DataSection, Job, data_files
from shardwright.planner.problem import batch_of
from shardwright.train.sources.clicks import (
    cache_of,
    is_criteo,
    model_of_clicks,
    quality_of,
    rows_of,
)
from study.found import Part

ROWS = 8192  # that are read, or made up, at a time
QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Quarters:
    """Held-out rows of the test: the ``numbers`` [n] that they have in their log, whether each is
    of the quarter seen most ``often`` [n] or most ``rarely`` [n], and where they were made up the
    chance [n] of a click. ``seen`` is how often ids of these two were seen, the geometric mean of
    count and one."""

    numbers: NDArray[np.int64]
    often: NDArray[np.bool_]
    rarely: NDArray[np.bool_]
    chance: NDArray[np.float64] | None
    seen: tuple[float, float]

    def quality(self, scores: NDArray[np.float64]) -> dict[Part, Quality]:
        """Figures of both quarters of rows (number, label, logit), beside the best possible."""
        found: dict[Part, Quality] = {}
        place = np.searchsorted(self.numbers, scores[:, 0].astype(np.int64))
        for name, of_quarter in (("often", self.often), ("rarely", self.rarely)):
            own = of_quarter[place]
            if quality := quality_of(scores[own], self._best(place[own])):
                found[name] = quality  # type: ignore[index]
        return found

    def _best(self, place: NDArray[np.int64]) -> dict[str, float]:
        from shardwright.data.quality import bayes_accuracy, bayes_auc, bayes_log_loss

        if self.chance is None:
            return {}
        chance = self.chance[place]
        figures = {"auc": bayes_auc, "log_loss": bayes_log_loss, "accuracy": bayes_accuracy}
        return {f"bayes_{name}": figure(chance) for name, figure in figures.items()}


def quarters(
    job: Job, reading: Job, compared: Sequence[TableSpec], trained: int
) -> Quarters | None:
    """The quarters for ``trained`` rows of training, by the ids of the tables that are
    ``compared``: rows in the order of the mean logarithm of how often their ids were seen. None
    where fewer than four rows are held out.

    ``job`` says how rows were made up, if they were; ``reading`` where they are read from.
    """
    features = [
        (number, name, table)
        for number, (name, table) in enumerate(
            (name, table) for table in job.tables for name in table.feature_names
        )
        if table.name in {each.name for each in compared}
    ]
    counts = {table.name: np.zeros(table.rows) for _, _, table in features}
    read = 0
    for batch, _ in _batches(reading, "train", trained):
        for number, name, table in features:
            ids, _ = _ids_of(batch, number, name)
            counts[table.name] += np.bincount(ids, minlength=table.rows)
        read += len(batch.labels)
    for values in counts.values():
        np.log1p(values * (trained / read if read else 0.0), out=values)
    numbers, seen = [], []
    for batch, own in _batches(reading, "test"):
        total, many = np.zeros(len(own)), np.zeros(len(own))
        for number, name, table in features:
            ids, rows = _ids_of(batch, number, name)
            total += np.bincount(rows, weights=counts[table.name][ids], minlength=len(own))
            many += np.bincount(rows, minlength=len(own))
        numbers.append(own)
        seen.append(total / np.maximum(many, 1))
    number, measure = np.concatenate(numbers or [[]]).astype(np.int64), np.concatenate(seen or [[]])
    if len(number) < QUARTERS:
        return None
    order, count = np.argsort(measure, kind="stable"), len(number) // QUARTERS
    rarely, often = np.zeros((2, len(number)), dtype=bool)
    rarely[order[:count]] = often[order[-count:]] = True
    seen_often, seen_rarely = (float(np.exp(measure[own].mean())) for own in (often, rarely))
    return Quarters(number, often, rarely, chances(job, number), (seen_often, seen_rarely))


def as_log(job: Job) -> DataSection:
    """What reads the rows that were made up for ``job`` from where they lie."""
    files, data = data_files(job), job.data
    return msgspec.structs.replace(
        data,
        kind="criteo" if is_criteo(job) else "columns",
        path=files.train,
        test_path=files.test,
        zipf=batch_of(job).zipf,
        drift=UNSET,
    )


def chances(job: Job, numbers: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """The chance of a click of held-out rows of the test, ascending ``numbers`` [n], with which
    they were made up; None of rows that were not."""
    if job.data.kind != "synthetic":
        return None
    days, rows = job.data.days, job.data.rows
    first = rows if days is UNSET else bounds(rows, days)[1]
    model, most = model_of_clicks(job), int(numbers[-1]) + 1 if len(numbers) else 0
    parts = [
        model.rows(first + begin, first + min(begin + ROWS, most)).probabilities
        for begin in range(0, most, ROWS)
    ]
    return np.concatenate(parts)[numbers] if parts else np.empty(0)


def _batches(
    job: Job, part: PartOfLog, limit: int | None = None
) -> Iterator[tuple[ClickBatch, NDArray[np.int64]]]:
    """The first rows of a part of the log with their numbers, from its cache if it has one."""
    folder = cache_of(job, part)
    if folder and folder.exists():
        rows = CachedRows(folder)
        count = len(rows) if limit is None else min(limit, len(rows))
        for batch, numbers in islice(cached_evaluation(rows, ROWS), -(-count // ROWS)):
            if (left := count - int(numbers[0])) < len(numbers):
                yield rows.batch(int(numbers[0]), count), numbers[:left]
            else:
                yield batch, numbers
    elif log := rows_of(job, part):
        skip = job.data.skip_bad_rows
        yield from evaluation_batches(log, ROWS, limit=limit, skip_bad_rows=skip)


def _ids_of(
    batch: ClickBatch, number: int, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids of a feature, and of each the row of the batch that it is in."""
    if not isinstance(batch.ids, dict):
        return batch.ids[:, number], np.arange(len(batch.labels))
    ids, offsets, *_ = batch.ids[name]
    lengths = np.diff(offsets.astype(np.int64))
    return ids.astype(np.int64), np.repeat(np.arange(len(lengths)), lengths)
