"""A DLRM on click logs: a Criteo file, one of named columns, or rows from a known click model."""

# The same rows have to come out whoever reads them and from where: text or cache, any number of
# ranks, a run that goes on. So what a cache is named by is everything that its rows depend on,
# held-out parts are cut by counted rows, and what is left out follows from the seed.

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from shardwright.core.batch import MADE_UP_ZIPF
from shardwright.core.errors import InputError, expected
from shardwright.core.measurement import Quality
from shardwright.data import quality as figures
from shardwright.data.cache import SCHEMA, CachedRows, cached_evaluation, write_cache
from shardwright.data.days import (
    PARTS,
    Days,
    LogSlice,
    Part,
    bounds,
    day_files,
    is_days,
    slices_of,
)
from shardwright.data.files import parts_of
from shardwright.data.logs import BagColumn, ColumnLog, CriteoLog, DenseColumn, Ids
from shardwright.data.reading import (
    ClickBatch,
    ClickLog,
    ClickReader,
    DealtRows,
    evaluation_batches,
    numbered_batches,
)
from shardwright.data.synthetic import LABEL, ClickModel, dense_names
from shardwright.job.job import Job, data_files
from shardwright.job.model_of_job import reads_bags, tables_of_bags
from shardwright.train.sources.made_up import DIGEST, make_up, read_facts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwright.estimate.own_model import Batch, Task

TABLES_OF_CRITEO = 26
DENSE_OF_CRITEO = 13
LONG = 256 * 2**20  # bytes of a log that take about a second to count
TEST_BATCH = 1024  # rows at least where a job names none; nothing is saved for a backward


class Clicks:
    """Binary cross-entropy; scores are (row, label, logit)."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._reader: ClickReader | None = None
        self._held_out_logs: list[ClickLog] = []  # which count their bad rows
        self.scored: tuple[torch.Tensor, torch.Tensor] | None = None  # logits and labels, if asked

    def check(self) -> None:
        """Raise InputError unless the model fits click logs and the log is one."""
        job = self.job
        if job.data.kind not in ("criteo", "columns", "synthetic"):
            wanted = "'criteo', 'columns' or 'synthetic' for a dlrm"
            raise InputError(expected("data.kind", wanted, f"'{job.data.kind}'"))
        if job.data.kind == "criteo" and not is_criteo(job):
            _refuse_criteo(job)
        _check_names(job)
        if job.data.cache is not UNSET and Path(job.data.cache).is_file():
            raise InputError(expected("data.cache", "a folder", f"the file '{job.data.cache}'"))
        if job.data.kind == "synthetic":
            _refuse_paths(job)
            return
        if not job.data.path:
            raise InputError(
                expected("data.path", "a click log", "none", "Use --set data.path=FILE.")
            )
        if is_folder(job) and job.data.test_path:
            wanted = "none beside a folder of days, of which the last is held out"
            raise InputError(expected("data.test_path", wanted, f"'{job.data.test_path}'"))
        # One row of each: whether the file is such a log at all, without reading it.
        for path in (*files_of(job), *filter(None, (job.data.test_path,))):
            log_of(job, str(path)).check()

    def prepare(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Make the rows up if they are synthetic, and write the cache where there is none yet."""
        job = self.job
        if job.data.kind == "synthetic":
            _make_up(job, say)
        if job.data.cache is UNSET:
            return
        for part in PARTS:
            folder = cache_of(job, part)
            if folder is None or folder.exists() or (log := self._rows(part)) is None:
                continue
            say(f"writing the rows of {part} into {folder}")
            # Ids in four bytes where they fit, which is half of a cache.
            narrow = all(table.rows <= 2**31 for table in job.tables)
            skip = job.data.skip_bad_rows
            found = write_cache(log, folder, narrow=narrow, skip_bad_rows=skip, say=say)
            bad = f", {found.bad_rows:,} bad ones left out" if found.bad_rows else ""
            say(f"{found.rows:,} rows{bad}")

    def samples(self) -> int | None:
        """Rows of the log; None of one that would take long to count."""
        job = self.job
        if folder := cache_of(job, "train"):
            return len(CachedRows(folder))
        size = sum(path.stat().st_size for path in files_of(job))
        log = self._rows("train") if size <= LONG else None
        return log.count() if log else None

    def quality(self, scores: NDArray[np.float64], part: str = "test") -> Quality | None:
        """Figures of rows (number, label, logit), beside the best that there is."""
        return quality_of(scores, _best(self.job, part))

    def task(self) -> Task:
        """Itself: rows and model of a DLRM are one's."""
        return self

    def model(self, device: torch.device) -> nn.Module:
        """DLRM with its index buffers in place."""
        from shardwright.models.dlrm import DLRM
        from shardwright.runtime.sharded_module import move_buffers

        # Parameters stay on the meta device until apply makes what this rank keeps.
        model = DLRM(self.job, device="meta")
        move_buffers(model, device)
        return model

    def batches(
        self, rank: int, world_size: int, dealt: Sequence[DealtRows] = ()
    ) -> Iterator[Batch]:
        """Dense features [B, D], ids [B, F] or bags by feature, labels [B]."""
        place = (self.job.batch.size, rank, world_size)
        if folder := cache_of(self.job, "train"):
            return map(_arrays, numbered_batches(CachedRows(folder).at, *place, dealt=dealt))
        log, skip = self._rows("train"), self.job.data.skip_bad_rows
        assert log is not None
        # Kept, for it counts the bad rows that a checkpoint and the record tell of.
        self._reader = ClickReader(log, *place, skip_bad_rows=skip, dealt=dealt)
        return map(_arrays, self._reader)

    def inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with."""
        dense, ids, _ = batch
        return (dense, ids), {}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean binary cross-entropy."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        dense, ids, labels = batch
        logits = model(dense, ids).squeeze(1)
        if self.job.train.metrics_every:
            self.scored = (logits.detach(), labels)
        return binary_cross_entropy_with_logits(logits, labels)

    def held_out(self, rank: int, world_size: int) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """The test file, or the second half of the last day, if there is one."""
        return self._held_out("test", rank, world_size)

    def validation(self, rank: int, world_size: int) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """The first half of the last day, if there is one."""
        return self._held_out("validation", rank, world_size)

    def _held_out(
        self, part: Part, rank: int, world_size: int
    ) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        rows = self.job.data.test_batch
        if rows is UNSET:
            # A small training batch would make evaluation a matter of calls.
            rows = max(self.job.batch.size, TEST_BATCH)
        place = (rows, rank, world_size)
        folder = cache_of(self.job, part)
        if folder and folder.exists():
            batches = cached_evaluation(CachedRows(folder), *place)
        elif folder or not (log := self._rows(part)):
            return
        else:
            skip = self.job.data.skip_bad_rows
            self._held_out_logs.append(log)
            batches = evaluation_batches(log, *place, skip_bad_rows=skip)
        for batch, numbers in batches:
            yield _arrays(batch), numbers

    def scores(
        self, model: nn.Module, batch: Batch, numbers: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Row number, label and logit."""
        dense, ids, labels = batch
        logits = model(dense, ids).squeeze(1).double().cpu().numpy()
        return np.stack([numbers, labels.cpu().numpy(), logits], 1)

    @cached_property
    def _rows(self) -> Callable[[Part], ClickLog | None]:
        return parts_of_log(self.job)

    @property
    def bad_rows(self) -> int:
        """Of what was trained on and, in the end, of what was held out; those of a cache were left
        out when it was written."""
        trained = self._reader.bad_rows if self._reader else 0
        return trained + sum(log.bad_rows for log in self._held_out_logs)


def log_of(job: Job, path: str) -> ClickLog:
    """The rows of a file as the tables of ``job`` are given them; InputError if it is no log."""
    if is_criteo(job) and job.data.kind != "columns":
        return CriteoLog(path, [table.rows for table in job.tables])
    data, bags = job.data, reads_bags(job)
    ids: Ids = "exact" if data.ids is UNSET else data.ids
    features = [
        BagColumn(name, table.rows, table.weighted, ids)
        for table in job.tables
        for name in table.feature_names
    ]
    label = LABEL if data.label is UNSET else data.label
    dense = [
        DenseColumn(name, name in (data.logarithm or ()), *(data.scale or {}).get(name, (0.0, 1.0)))
        for name in dense_columns(job)
    ]
    words = {"missing": data.missing or (), "header": data.header or ()}
    return ColumnLog(path, label, dense, features, bags=bags, **words)


def dense_columns(job: Job) -> tuple[str, ...]:
    """Names of the dense columns of a log."""
    return dense_names(job.model.dense_features) if job.data.dense is UNSET else job.data.dense


def is_criteo(job: Job) -> bool:
    """Whether the model takes a row of Criteo's logs."""
    shape = (len(job.tables), job.model.dense_features)
    return shape == (TABLES_OF_CRITEO, DENSE_OF_CRITEO) and not any(tables_of_bags(job))


def _refuse_criteo(job: Job) -> None:
    """Say what of the model is not as Criteo's rows are."""
    wanted, found = (
        f"{TABLES_OF_CRITEO} tables and model.dense_features = {DENSE_OF_CRITEO}",
        f"{len(job.tables)} tables and {job.model.dense_features}",
    )
    for name in tables_of_bags(job):
        wanted, found = "tables of one dim with one unweighted id each", f"'{name}'"
    raise InputError(
        expected(
            "data.kind 'criteo'",
            wanted,
            found,
            "Rows of a Criteo log have 13 integer and 26 categorical columns: "
            "use kind columns or synthetic for others.",
        )
    )


def _check_names(job: Job) -> None:
    """InputError unless there are as many named columns as the model takes."""
    data, dense = job.data, job.model.dense_features
    if data.dense is not UNSET and len(data.dense) != dense:
        wanted = f"{dense} columns, as model.dense_features"
        raise InputError(expected("data.dense", wanted, str(len(data.dense))))
    known = dense_columns(job)
    for key, names in (("logarithm", data.logarithm or ()), ("scale", data.scale or {})):
        for name in names:
            if name not in known:
                raise InputError(expected(f"data.{key}", "names in data.dense", f"'{name}'"))
    if data.kind == "synthetic" and any(table.weighted for table in job.tables):
        wanted = "tables without weights, of which none are made up"
        raise InputError(expected("data.kind 'synthetic'", wanted, "a weighted one"))


def _refuse_paths(job: Job) -> None:
    """Made-up rows go into the run folder: a path would be one to read or one to write over."""
    for name in ("path", "test_path"):
        if named := getattr(job.data, name):
            raise InputError(
                expected(
                    f"data.{name}",
                    "none for data.kind 'synthetic', whose rows go into train.out",
                    f"'{named}'",
                    "To train on a file, set data.kind=criteo, or columns.",
                )
            )


def is_folder(job: Job) -> bool:
    """Whether the log is a folder of days."""
    return bool(job.data.path) and is_days(Path(job.data.path))


def files_of(job: Job) -> list[Path]:
    """The files of what is trained on."""
    path = Path(data_files(job).train)
    return day_files(path) if is_folder(job) else [path]


def rows_of(job: Job, part: Part) -> ClickLog | None:
    """The rows of a part of the log; None where it has no such part."""
    return parts_of_log(job)(part)


def parts_of_log(job: Job) -> Callable[[Part], ClickLog | None]:
    """What gives the rows of a part; to know where days begin, a log is read through once."""
    files, data = data_files(job), job.data
    paths = {"train": files.train, "test": files.test}
    days = None if data.days is UNSET else data.days
    slices: dict[Part, tuple[LogSlice, ...]] | None = None
    if days or is_folder(job):
        slices = slices_of(Path(files.train), days, partial(log_of, job))

    def rows(part: Part) -> ClickLog | None:
        if slices is not None:
            return Days(slices[part], data.drop_negatives or 0.0, data.seed)
        log = log_of(job, path) if (path := paths.get(part)) else None
        if log is None or not data.drop_negatives:
            return log
        return Days([LogSlice(log)], data.drop_negatives, data.seed)

    return rows


def cache_of(job: Job, part: Part) -> Path | None:
    """The folder of a part's rows in binary, named by everything they depend on; None without."""
    data, files = job.data, data_files(job)
    if data.cache is UNSET:
        return None
    held_out = [Path(files.test)] if files.test and part == "test" else files_of(job)
    tables = [(table.rows, table.weighted, table.feature_names) for table in job.tables]
    columns = (data.label, data.dense, data.ids, job.model.dense_features)
    columns += (data.logarithm, data.scale, data.missing, data.header)
    chosen = (data.days, data.drop_negatives, data.seed, data.skip_bad_rows)
    bags, logs = reads_bags(job), list(map(_identity, held_out))
    given = (SCHEMA, data.kind, part, tables, bags, columns, chosen, logs)
    digest = hashlib.sha256(repr(given).encode()).hexdigest()
    return Path(data.cache) / f"{part}-{digest[:32]}"


def _identity(path: Path) -> tuple[Any, ...]:
    """What a file is told by: made-up rows by their digest, others by place, size and date."""
    if digest := read_facts(path).get(DIGEST):
        return (digest,)
    # Place, size and date and not a digest: a log of a terabyte would be read once more only to be
    # told.
    found = [(each, each.stat()) for each in parts_of(path)]
    return tuple((str(p.resolve()), of.st_size, of.st_mtime_ns) for p, of in found)


def _make_up(job: Job, say: Callable[[str], None]) -> None:
    model, files, data = model_of_clicks(job), data_files(job), job.data
    # Days are one file, of which the last is held out: train and test rows come from one stream,
    # and the law drifts across both.
    if data.days is not UNSET:
        make_up(Path(files.train), partial(_write_days, model, data.rows, data.days))
    for path, count, start in (
        (files.train if data.days is UNSET else "", data.rows, 0),
        (files.test, data.test_rows, data.rows),
    ):
        if path:
            make_up(Path(path), partial(model.write, rows=count, start=start))
    if best := _best(job, "test"):
        say(
            f"{data.rows:,} rows made up; the best possible on held-out ones: AUC "
            f"{best['bayes_auc']:.4f}, log loss {best['bayes_log_loss']:.4f}, accuracy "
            f"{best['bayes_accuracy']:.4f}"
        )


def model_of_clicks(job: Job) -> ClickModel:
    """The law that rows for the job's tables are made up from."""
    data = job.data
    law: dict[str, Any] = {
        "seed": data.seed,
        "zipf": MADE_UP_ZIPF if data.zipf is UNSET else data.zipf,
        "days": data.days or 1,
        "drift": data.drift or 0.0,
        "total": data.rows,
    }
    if is_criteo(job):
        return ClickModel(cardinalities=tuple(t.rows for t in job.tables), **law)
    columns = [
        (name, table.rows, length)
        for table in job.tables
        for name, length in zip(table.feature_names, table.pooling_factors, strict=True)
    ]
    names, rows, lengths = zip(*columns, strict=True)
    return ClickModel(**law).named(names, rows, lengths, job.model.dense_features)


def _write_days(model: ClickModel, rows: int, days: int, path: Path) -> dict[str, Any]:
    """Write all days; what is known of them, and of what is held out."""
    first, middle = bounds(rows, days)
    known: dict[str, Any] = msgspec.to_builtins(model.write(path, rows=rows))
    for part, start, stop in (("validation", first, middle), ("test", middle, rows)):
        if stop - start > 1:
            known[part] = msgspec.to_builtins(model.facts(start, stop))
    return known


def _best(job: Job, part: str) -> dict[str, Any]:
    """What the best predictor reaches on rows that were made up; else nothing."""
    files = data_files(job)
    if files.test:
        return read_facts(Path(files.test)) if part == "test" else {}
    found = read_facts(Path(files.train)).get(part, {})
    return found if isinstance(found, dict) else {}


def quality_of(scores: NDArray[np.float64], best: dict[str, Any]) -> Quality | None:
    """Figures of rows (number, label, logit), beside what is known of the best predictor."""
    _, labels, logits = scores.T
    if not len(labels):
        return None
    clicks = 1.0 / (1.0 + np.exp(-logits))
    # AUC and normalized entropy have no value where all labels are alike.
    is_mixed = 0 < labels.sum() < len(labels)
    return Quality(
        rows=len(labels),
        auc=figures.auc(labels, logits) if is_mixed else None,
        log_loss=figures.log_loss(labels, clicks),
        best_auc=best.get("bayes_auc"),
        best_log_loss=best.get("bayes_log_loss"),
        accuracy=figures.accuracy(labels, clicks),
        best_accuracy=best.get("bayes_accuracy"),
        majority=figures.majority(labels),
        normalized_entropy=figures.normalized_entropy(labels, clicks) if is_mixed else None,
        calibration=figures.calibration(labels, clicks) if labels.any() else None,
    )


def _arrays(batch: ClickBatch) -> Batch:
    return batch.dense, batch.ids, batch.labels
