"""How often the ids of a click log repeat, table by table: what plans are told of it."""

# What plans want to know is how many different rows a global batch touches, so batches are formed
# as a run of as many ranks forms them. One exponent stands for a whole distribution: the one that
# gives the measured number, for bytes and seconds are worked out from that number and not from the
# curve.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwright.core.batch import expected_distinct
from shardwright.core.document import encode_toml
from shardwright.core.errors import InputError, expected
from shardwright.core.model import TableSpec
from shardwright.data.reading import ClickBatch, ClickLog, Row
from shardwright.job.job import Job, data_files
from shardwright.job.tables import entry_of
from shardwright.report.wording import counted
from shardwright.train.sources import source_of
from shardwright.train.sources.clicks import rows_of

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


@dataclass(frozen=True, slots=True)
class Inspected:
    """What is asked for of every table of a job, and by file the bad rows that were left out."""

    tables: list[Popularity]
    bad_rows: dict[str, int]


def popularity(job: Job, world_size: int, limit: int | None = None) -> Inspected:
    """Of every table of ``job``, over the rows of its log or the first ``limit``; InputError for
    what is no log, or has no good row."""
    source_of(job).check()
    seen = [_Seen(table) for table in job.tables]
    path, size = data_files(job).train, job.batch.size * world_size
    if not Path(path).exists():
        remedy = "Train the job first: its rows are made up then."
        raise InputError(expected(path, "a click log", "none", remedy))
    log = rows_of(job, "train")
    assert log is not None
    left_out: Counter[str] = Counter()
    for batch in _batches(log, size, limit, job.data.skip_bad_rows, left_out):
        samples = len(batch.labels)
        feature = iter(range(sum(len(table.feature_names) for table in job.tables)))
        for each in seen:
            own = []
            for name in each.table.feature_names:
                number = next(feature)
                ids = batch.ids
                own.append(ids[name][0] if isinstance(ids, dict) else ids[:, number])
            each.add([part.astype(np.int64) for part in own], samples, samples == size)
    if seen and not seen[0].samples:
        raise InputError(expected(path, "rows to keep", "none"))
    return Inspected([each.popularity() for each in seen], dict(+left_out))


def _batches(
    log: ClickLog, size: int, limit: int | None, skip: bool, left_out: Counter[str]
) -> Iterator[ClickBatch]:
    """Batches of good rows of a pass; as in training the next rows fill what bad ones leave, so
    that only the last batch may be short. ``left_out`` counts the bad ones by file."""
    rows = islice(log.rows(), limit)

    def is_good(row: Row) -> bool:
        good = log.is_good(*row, skip)
        left_out[str(row[0])] += not good
        return good

    while own := list(islice(rows, size)):
        batch = log.parse([line for _, _, line in own])
        if batch is None:
            own = list(islice(filter(is_good, chain(own, rows)), size))
            batch = log.parse([line for _, _, line in own])
            assert batch is not None
        if own:
            yield batch


class _Seen:
    """What a table was asked for so far."""

    def __init__(self, table: TableSpec) -> None:
        self.table = table
        # A byte a row: a set of Python's ints takes many times that for each that was seen.
        self._rows = np.zeros(table.rows, dtype=bool)
        self._ids = [0] * len(table.feature_names)
        self.samples = 0
        self._batches: list[tuple[int, int]] = []  # ids, different ones

    def add(self, parts: list[NDArray[np.int64]], samples: int, whole: bool) -> None:
        """A batch, of which ids count as those of a step where it is a ``whole`` one."""
        ids = np.concatenate(parts)
        distinct = np.unique(ids)
        self._rows[distinct] = True
        self._ids = [n + len(part) for n, part in zip(self._ids, parts, strict=True)]
        self.samples += samples
        # The last batch may be short, and has fewer different rows than a step; alone it is all
        # there is.
        if whole or not self._batches:
            self._batches.append((len(ids), len(distinct)))

    def popularity(self) -> Popularity:
        """The means over batches, and the exponent that gives them."""
        found = np.array(self._batches or [(0, 0)], dtype=np.float64).mean(0)
        ids, distinct = float(found[0]), float(found[1])
        lengths = tuple(round(n / max(self.samples, 1), 4) for n in self._ids)
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
    # Halving: the number of different rows only falls as the exponent grows.
    for _ in range(20):
        middle = (low + high) / 2
        steeper = expected_distinct(ids, rows, middle) > distinct
        low, high = (middle, high) if steeper else (low, middle)
    return round((low + high) / 2, 3)


def as_toml(job: Job, found: Inspected) -> Iterator[str]:
    """Entries of tables with what was found, to be put in the place of the job's, of which they
    keep all other keys."""
    for path, count in found.bad_rows.items():
        yield f"# {path}: {counted(count, 'bad row')} left out, as data.skip_bad_rows asks\n\n"
    for table, each in zip(job.tables, found.tables, strict=True):
        yield (
            f"# {each.ids:,} ids of {each.distinct:,} rows; "
            f"{each.distinct_per_batch:,.1f} different ones in a batch\n"
        )
        said = entry_of(table)
        if each.lengths != table.pooling_factors:
            said["pooling_factors"] = each.lengths
        yield encode_toml({"tables": [said | {"zipf": each.zipf}]}) + "\n"
