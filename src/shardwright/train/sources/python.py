"""Batches of the user's own: functions that can be imported, and nothing to prepare."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import InputError, expected
from shardwright.core.measurement import Quality
from shardwright.job.job import Job


def check(job: Job) -> None:
    """Raise InputError unless the functions of model and data can be imported."""
    from shardwright.estimate.own_model import importable, python_function

    data = job.data
    if data.kind != "python":
        wanted = "'python' for a model of that kind"
        raise InputError(expected("data.kind", wanted, f"'{data.kind}'"))
    for name in ("path", "test_path"):
        if named := getattr(data, name):
            wanted = "none for data.kind 'python', whose function reads what it likes"
            raise InputError(expected(f"data.{name}", wanted, f"'{named}'"))
    for name, where in ((job.model.python, "model"), (data.python, "data")):
        if isinstance(name, str):
            with importable():
                python_function(name, f"{where}.python '{name}'")


def prepare(job: Job, say: Callable[[str], None] = lambda text: None) -> None:
    """Nothing: the data's function makes or reads its batches itself."""


def samples(job: Job) -> None:
    """Not known: the data's function may never end."""


def quality(job: Job, scores: NDArray[np.float64], part: str = "test") -> Quality | None:
    """The mean loss of rows (number, weight, weight times loss)."""
    _, weights, losses = scores.T
    total = math.fsum(weights)
    if not total:
        return None
    return Quality(rows=len(weights), auc=None, log_loss=math.fsum(losses) / total)
