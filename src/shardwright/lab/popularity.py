"""How often the ids of a click log repeat, table by table: what plans are told of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright.core.batch import expected_distinct
from shardwright.core.errors import InputError, expected
from shardwright.core.imported import written
from shardwright.core.job import Job, data_files
from shardwright.core.model import TableSpec
from shardwright.data.reading import evaluation_batches
from shardwright.lab.sources import source_of
from shardwright.lab.sources.clicks import rows_of

STEEPEST = 5.0


@dataclass(frozen=True, slots=True)
class Popularity:
    """What a table is asked for: ``ids`` of ``distinct`` rows in all; in a batch of all ranks
    ``distinct_per_batch`` different ones, the mean, as ``zipf`` gives them. ``lengths`` are ids per
    bag of each feature."""

    table: str
    rows: int
    dim: int
    ids: int
    distinct: int
    distinct_per_batch: float
    lengths: tuple[float, ...]
    zipf: float


def popularity(job: Job, world_size: int, limit: int | None = None) -> list[Popularity]:
    """Of every table of ``job``, over the rows of its log or the first ``limit``; InputError for
    what is no log."""
    source_of(job).check(job)
    seen = [_Seen(table) for table in job.tables]
    path, size = data_files(job).train, job.batch.size * world_size
    if not Path(path).exists():
        remedy = "Train the job first: its rows are made up then."
        raise InputError(expected(path, "a click log", "none", remedy))
    skip = job.data.skip_bad_rows
    log = rows_of(job, "train")
    assert log is not None
    for batch, numbers in evaluation_batches(log, size, limit=limit, skip_bad_rows=skip):
        feature = iter(range(sum(len(table.feature_names) for table in job.tables)))
        for each in seen:
            own = []
            for name in each.table.feature_names:
                number = next(feature)
                ids = batch.ids
                own.append(ids[name][0] if isinstance(ids, dict) else ids[:, number])
            each.add([part.astype(np.int64) for part in own], len(numbers), len(numbers) == size)
    return [each.popularity() for each in seen]


class _Seen:
    """What a table was asked for so far."""

    def __init__(self, table: TableSpec) -> None:
        self.table = table
        self._rows = np.zeros(table.rows, dtype=bool)
        self._ids = [0] * len(table.feature_names)
        self._samples = 0
        self._batches: list[tuple[int, int]] = []  # ids, different ones

    def add(self, parts: list[NDArray[np.int64]], samples: int, whole: bool) -> None:
        """A batch, of which ids count as those of a step where it is a ``whole`` one."""
        ids = np.concatenate(parts)
        distinct = np.unique(ids)
        self._rows[distinct] = True
        self._ids = [n + len(part) for n, part in zip(self._ids, parts, strict=True)]
        self._samples += samples
        if whole or not self._batches:
            self._batches.append((len(ids), len(distinct)))

    def popularity(self) -> Popularity:
        """The means over batches, and the exponent that gives them."""
        found = np.array(self._batches or [(0, 0)], dtype=np.float64).mean(0)
        ids, distinct = float(found[0]), float(found[1])
        lengths = tuple(round(n / max(self._samples, 1), 4) for n in self._ids)
        rows = self.table.rows
        zipf = exponent(round(ids), rows, distinct)
        total, different = sum(self._ids), int(self._rows.sum())
        name, dim = self.table.name, self.table.dim
        return Popularity(name, rows, dim, total, different, distinct, lengths, zipf)


def exponent(ids: int, rows: int, distinct: float) -> float:
    """That of a popularity of ``rows`` by which so many of ``ids`` draws are different; 0 where
    they repeat no more than evenly drawn ones."""
    low, high = 0.0, STEEPEST
    if expected_distinct(ids, rows) <= distinct:
        return low
    for _ in range(20):
        middle = (low + high) / 2
        steeper = expected_distinct(ids, rows, middle) > distinct
        low, high = (middle, high) if steeper else (low, middle)
    return round((low + high) / 2, 3)


def as_toml(job: Job, found: list[Popularity]) -> Iterator[str]:
    """Entries of tables with what was found, to be put in the place of the job's, of which they
    keep all other keys."""
    fields = msgspec.structs.fields(TableSpec)
    plain = {f.name: f.default for f in fields if f.name != "fqn"}  # which no job says
    for table, each in zip(job.tables, found, strict=True):
        yield (
            f"# {each.ids:,} ids of {each.distinct:,} rows; "
            f"{each.distinct_per_batch:,.1f} different ones in a batch"
        )
        yield "[[tables]]"
        said = {f: v for f in plain if (v := getattr(table, f)) not in (plain[f], None)}
        if each.lengths != table.pooling_factors:
            said["pooling_factors"] = each.lengths
        for key, value in (said | {"zipf": each.zipf}).items():
            yield f"{key} = {written(msgspec.to_builtins(value))}"
        yield ""
