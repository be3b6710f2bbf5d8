"""How often the ids of a click log repeat, table by table: what plans are told of it."""

# What plans want to know is how many different rows a global batch touches, so batches are formed
# as a run of as many ranks forms them. One exponent stands for a whole distribution: the one that
# gives the measured number, for bytes and seconds are worked out from that number and not from the
# curve.

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from shardwright.core.batch import expected_distinct
from shardwright.core.document import encode_toml, parse_toml
from shardwright.core.errors import InputError, expected
from shardwright.core.model import TableSpec
from shardwright.core.quantities import counted
from shardwright.data.lines import Row
from shardwright.data.reading import ClickBatch, ClickLog
from shardwright.job.job import Job, data_files
from shardwright.job.tables import entry_of
from shardwright.train.sources import source_of
from shardwright.train.sources.clicks import is_folder, rows_of

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
    names = [name for table in job.tables for name in table.feature_names]
    for batch in _batches(log, size, limit, job.data.skip_bad_rows, left_out):
        ids, samples = batch.ids, len(batch.labels)
        own = (
            {name: bag[0] for name, bag in ids.items()}
            if isinstance(ids, dict)
            else dict(zip(names, ids.T, strict=True))
        )
        for each in seen:
            each.add([own[name] for name in each.table.feature_names], samples, samples == size)
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

    def add(self, parts: list[NDArray[Any]], samples: int, whole: bool) -> None:
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
        ids, distinct = np.array(self._batches, dtype=np.float64).mean(0).tolist()
        lengths = tuple(round(n / self.samples, 4) for n in self._ids)
        name, rows, dim = self.table.name, self.table.rows, self.table.dim
        zipf = exponent(round(ids), rows, distinct)
        total, different = sum(self._ids), int(self._rows.sum())
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


def left_out(job: Job, found: Inspected, limit: int | None) -> list[str]:
    """What of the data was not looked at, or not counted."""
    lines = [
        f"{counted(count, 'bad row')} of {path}, as data.skip_bad_rows asks"
        for path, count in found.bad_rows.items()
    ]
    if limit is not None:
        lines.append(f"rows behind the first {limit:,}, as --rows asks")
    if is_folder(job) or job.data.days is not UNSET:
        days = "" if job.data.days is UNSET else f" of {job.data.days} (data.days)"
        lines.append(f"the last day{days}, which is held out")
    return lines


def put(job: Job, found: Inspected) -> tuple[str, list[str]]:
    """What ``put_into`` writes, and what it has no reason to."""
    tables = len(found.tables)
    others = sum("pooling_factors" in each for each in _news(job, found))
    written = f"zipf of {counted(tables, 'table')}"
    written += f" and pooling_factors of {others}" if others else ""
    same = counted(tables - others, "table")
    return written, [f"pooling_factors of {same}, as the job has them"] if others < tables else []


def as_toml(job: Job, found: Inspected, limit: int | None = None) -> Iterator[str]:
    """Entries of tables with what was found, to be put in the place of the job's, of which they
    keep all other keys."""
    for line in left_out(job, found, limit):
        yield f"# left out: {line}\n\n"
    for table, each, news in zip(job.tables, found.tables, _news(job, found), strict=True):
        yield (
            f"# {each.ids:,} ids of {each.distinct:,} rows; "
            f"{each.distinct_per_batch:,.1f} different ones in a batch\n"
        )
        yield encode_toml({"tables": [entry_of(table) | news]}) + "\n"


def put_into(text: str, job: Job, found: Inspected, where: str) -> str:
    """A job's text with what was found in its entries of tables, all else as it stands; InputError
    where its tables do not stand in it one by one."""
    parts = re.split(r"(?m)^(?=[ \t]*\[)", text)
    entries = [i for i, part in enumerate(parts) if re.match(r"[ \t]*\[\[\s*tables\s*\]\]", part)]
    news = _news(job, found)
    wanted = parse_toml(text, where, "a job")
    for place, new, table in zip(entries, news, wanted.get("tables", ()), strict=False):
        parts[place] = _with_keys(parts[place], new)
        table |= new
    made = "".join(parts)
    # Text is changed by patterns, which a key over several lines would be too much for.
    found_again = None
    with suppress(InputError):
        found_again = parse_toml(made, where, "a job")
    if len(entries) != len(news) or found_again != wanted:
        remedy = "Leave -o out, and put what is printed into it by hand."
        raise InputError(expected(where, "each table as a [[tables]] of its own", "others", remedy))
    return made


def _news(job: Job, found: Inspected) -> list[dict[str, Any]]:
    """Of each table the keys that were found."""
    news: list[dict[str, Any]] = []
    for table, each in zip(job.tables, found.tables, strict=True):
        same = each.lengths == table.pooling_factors
        lengths = {} if same else {"pooling_factors": list(each.lengths)}
        news.append(lengths | {"zipf": each.zipf})
    return news


def _with_keys(entry: str, keys: dict[str, Any]) -> str:
    """The text of an entry with other values of ``keys``, new ones behind that of ``dim``."""
    for key, value in keys.items():
        said = encode_toml({key: value}).strip()
        line = rf"(?m)^([ \t]*){key}[ \t]*=[^#\n]*?([ \t]*(?:#.*)?)$"
        entry, there = re.subn(line, lambda m, said=said: f"{m[1]}{said}{m[2]}", entry, count=1)
        if not there:
            behind = r"(?m)^([ \t]*)dim[ \t]*=.*$"
            entry = re.sub(behind, lambda m, said=said: f"{m[0]}\n{m[1]}{said}", entry, count=1)
    return entry
