"""Click logs for a DLRM: a Criteo file, one of named columns, or rows from a known click model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from shardwright.core.batch import MADE_UP_ZIPF
from shardwright.core.errors import InputError, expected
from shardwright.core.job import DataSection, Job, data_files
from shardwright.core.measurement import Quality
from shardwright.core.model_of_job import reads_bags
from shardwright.lab.sources.made_up import make_up, read_facts

if TYPE_CHECKING:
    from shardwright.data.reading import ClickLog

TABLES_OF_CRITEO = 26
DENSE_OF_CRITEO = 13
LONG = 256 * 2**20  # bytes of a log that take about a second to count


def check(job: Job) -> None:
    """Raise InputError unless the model fits click logs and the log is one."""
    if job.data.kind not in ("criteo", "columns", "synthetic"):
        wanted = "'criteo', 'columns' or 'synthetic' for a dlrm"
        raise InputError(expected("data.kind", wanted, f"'{job.data.kind}'"))
    if job.model.top[-1] != 1:
        raise InputError(
            expected("model.top", "1 as its last width, a click's logit", str(job.model.top[-1]))
        )
    if job.data.kind == "criteo" and not _is_criteo(job):
        _refuse_criteo(job)
    _check_names(job)
    if job.data.kind == "synthetic":
        _refuse_paths(job)
        return
    if not job.data.path:
        raise InputError(expected("data.path", "a click log", "none", "Use --set data.path=FILE."))
    for path in filter(None, (job.data.path, job.data.test_path)):
        log_of(job, path).check()


def log_of(job: Job, path: str) -> ClickLog:
    """The rows of a file as the tables of ``job`` are given them; InputError if it is no log."""
    from shardwright.data.columns import ColumnLog, Feature
    from shardwright.data.criteo import CriteoLog
    from shardwright.data.synthetic import LABEL, dense_names

    if _is_criteo(job) and job.data.kind != "columns":
        return CriteoLog(path, [table.rows for table in job.tables])
    hashed = job.data.ids == "modulo"
    features = [
        Feature(name, table.rows, table.weighted, hashed)
        for table in job.tables
        for name in table.feature_names
    ]
    label = LABEL if job.data.label is UNSET else job.data.label
    dense = dense_names(job.model.dense_features) if job.data.dense is UNSET else job.data.dense
    return ColumnLog(path, label, dense, features)


def _is_criteo(job: Job) -> bool:
    """Whether the model takes a row of Criteo's logs."""
    shape = (len(job.tables), job.model.dense_features)
    return shape == (TABLES_OF_CRITEO, DENSE_OF_CRITEO) and not reads_bags(
        msgspec.structs.replace(job, data=DataSection())
    )


def _refuse_criteo(job: Job) -> None:
    """Say what of the model is not as Criteo's rows are."""
    wanted, found = (
        f"{TABLES_OF_CRITEO} tables and model.dense_features = {DENSE_OF_CRITEO}",
        f"{len(job.tables)} tables and {job.model.dense_features}",
    )
    for table in job.tables:
        if table.pooling_factors != (1.0,) or table.weighted or table.dim != job.tables[0].dim:
            wanted, found = "tables of one dim with one unweighted id each", f"'{table.name}'"
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


def prepare(job: Job) -> None:
    """Make the rows up if they are synthetic."""
    if job.data.kind != "synthetic":
        return
    from shardwright.data.synthetic import ClickModel

    seed, zipf = job.data.seed, MADE_UP_ZIPF if job.data.zipf is UNSET else job.data.zipf
    if _is_criteo(job):
        cardinalities = tuple(table.rows for table in job.tables)
        model = ClickModel(cardinalities=cardinalities, seed=seed, zipf=zipf)
    else:
        columns = [
            (name, table.rows, length)
            for table in job.tables
            for name, length in zip(table.feature_names, table.pooling_factors, strict=True)
        ]
        names, rows, lengths = zip(*columns, strict=True)
        dense = job.model.dense_features
        model = ClickModel.named(names, rows, lengths, dense, seed=seed, zipf=zipf)
    files = data_files(job)
    for path, count, start in (
        (files.train, job.data.rows, 0),
        (files.test, job.data.test_rows, job.data.rows),
    ):
        if path:
            make_up(Path(path), partial(model.write, rows=count, start=start))


def samples(job: Job) -> int | None:
    """Rows of the log; None of one that would take long to count."""
    path = data_files(job).train
    return log_of(job, path).count() if Path(path).stat().st_size <= LONG else None


def quality(job: Job, scores: NDArray[np.float64]) -> Quality | None:
    """Figures of rows (number, label, logit), beside the best that there is."""
    from shardwright.data import quality as of

    _, labels, logits = scores.T
    if not len(labels):
        return None
    best = read_facts(Path(data_files(job).test))
    clicks = 1.0 / (1.0 + np.exp(-logits))
    is_mixed = 0 < labels.sum() < len(labels)
    return Quality(
        rows=len(labels),
        auc=of.auc(labels, logits) if is_mixed else None,
        log_loss=of.log_loss(labels, clicks),
        best_auc=best.get("bayes_auc"),
        best_log_loss=best.get("bayes_log_loss"),
        accuracy=of.accuracy(labels, clicks),
        best_accuracy=best.get("bayes_accuracy"),
        majority=of.majority(labels),
        normalized_entropy=of.normalized_entropy(labels, clicks) if is_mixed else None,
        calibration=of.calibration(labels, clicks) if labels.any() else None,
    )
