"""Click logs for a DLRM: a Criteo file, or rows from a known click model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import InputError, expected
from shardwright.core.job import Job, data_files
from shardwright.core.measurement import Quality
from shardwright.lab.sources.made_up import make_up, read_facts

TABLES_OF_CRITEO = 26
DENSE_OF_CRITEO = 13
LONG = 256 * 2**20  # bytes of a log that take about a second to count


def check(job: Job) -> None:
    """Raise InputError unless the model fits click logs and the log is one."""
    if job.data.kind not in ("criteo", "synthetic"):
        raise InputError(
            expected("data.kind", "'criteo' or 'synthetic' for a dlrm", f"'{job.data.kind}'")
        )
    _check_model(job)
    if job.data.kind == "synthetic":
        _refuse_paths(job)
    else:
        from shardwright.data.criteo import check_file

        if not job.data.path:
            raise InputError(
                expected("data.path", "a click log", "none", "Use --set data.path=FILE.")
            )
        for path in filter(None, (job.data.path, job.data.test_path)):
            check_file(path)


def _refuse_paths(job: Job) -> None:
    """Made-up rows go into the run folder: a path would be one to read or one to write over."""
    for name in ("path", "test_path"):
        if named := getattr(job.data, name):
            raise InputError(
                expected(
                    f"data.{name}",
                    "none for data.kind 'synthetic', whose rows go into train.out",
                    f"'{named}'",
                    "To train on a file, set data.kind=criteo.",
                )
            )


def _check_model(job: Job) -> None:
    if len(job.tables) != TABLES_OF_CRITEO or job.model.dense_features != DENSE_OF_CRITEO:
        raise InputError(
            expected(
                f"data.kind '{job.data.kind}'",
                f"{TABLES_OF_CRITEO} tables and model.dense_features = {DENSE_OF_CRITEO}",
                f"{len(job.tables)} tables and {job.model.dense_features}",
                "Click logs have 13 integer and 26 categorical columns.",
            )
        )
    for table in job.tables:
        if not table.pooled or table.pooling_factors != (1.0,) or table.poolings != (1.0,):
            raise InputError(
                expected(
                    f"tables '{table.name}'.pooling_factors",
                    "[1.0] for training",
                    f"{list(table.pooling_factors)}",
                    "This version trains one id per table and sample; plan and explain take any.",
                )
            )
        if table.dtype != "fp32":
            raise InputError(
                expected(f"tables '{table.name}'.dtype", "fp32 for training", table.dtype)
            )
    if job.model.top[-1] != 1:
        raise InputError(
            expected("model.top", "1 as its last width, a click's logit", str(job.model.top[-1]))
        )


def prepare(job: Job) -> None:
    """Make the rows up if they are synthetic."""
    if job.data.kind == "criteo":
        return
    from shardwright.data.synthetic import ClickModel

    model = ClickModel(cardinalities=tuple(t.rows for t in job.tables), seed=job.data.seed)
    files = data_files(job)
    for name, rows, start in (
        (files.train, job.data.rows, 0),
        (files.test, job.data.test_rows, job.data.rows),
    ):
        if name:
            make_up(Path(name), partial(model.write, rows=rows, start=start))


def samples(job: Job) -> int | None:
    """Rows of the log; None of one that would take long to count."""
    from shardwright.data.criteo import count_rows

    path = Path(data_files(job).train)
    return count_rows(path) if path.stat().st_size <= LONG else None


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
