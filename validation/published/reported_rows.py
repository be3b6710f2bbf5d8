"""Predictions for figures that people reported of their own runs, each with its job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from published.prediction import Prediction
from shardwright.core.errors import InputError, expected
from shardwright.estimate.footprint import footprint
from shardwright.job.job import parse_job

UNITS = {"GiB": 2**30, "GB": 10**9}


def predict_reported(row: Mapping[str, Any]) -> Prediction:
    """Predict the row's counter: what is allocated, or what the allocator has reserved."""
    source, counter = str(row.get("source")), row.get("counter")
    if counter not in ("allocated", "reserved"):
        wanted = "'allocated' or 'reserved'"
        raise InputError(expected(f"{source}: counter", wanted, repr(counter)))
    found = footprint(parse_job(row["job"], source))
    worst = found.worst
    return Prediction(
        family=str(row["model"]),
        platform=str(row["hw"]),
        predicted=worst.reserved_bytes if counter == "reserved" else worst.peak_bytes,
        measured=round(float(row["memory"]) * UNITS[str(row["unit"])]),
        parts={str(category): size for category, size in worst.by_category.items()},
        assumptions=(*map(str, row.get("differs", ())), *found.assumptions),
        phase=worst.peak_phase,
        parameters=found.parameters,
    )
