"""Predicted against measured: a join of two timelines, and what fails."""

# What fails a run is decided here: exact bytes that differ by one, a peak beyond the tolerance, a
# phase that only one side has. Seconds are shown and fail nothing. A side that is missing is told
# and never taken for 0, except of exact bytes, where nothing allocated leaves no event.

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from msgspec import UNSET

from shardwright.core.cluster import busy
from shardwright.core.errors import MismatchError, check_type, expected
from shardwright.core.measurement import COMPARISON_SCHEMA, ComparedNumber, Comparison, Measurement
from shardwright.core.timeline import (
    PEAK,
    decode,
    exact_bytes,
    exchange_seconds,
    phase_peaks,
    phase_seconds,
)
from shardwright.job.cluster import ClusterSection
from shardwright.job.plan import Plan

K = TypeVar("K")


def compare(plan: Plan, measurement: Measurement, tolerance: float = 0.1) -> Comparison:
    """Join on (rank, phase, kind, name), peaks on (rank, phase), seconds on phase totals."""
    check_type(plan, Plan, "plan", "read_plan reads a file.")
    check_type(measurement, Measurement, "measurement", "read_measurement reads a file.")
    # Two plans of one job may have the same keys, and the join would succeed with the wrong
    # numbers.
    if plan.fingerprint != measurement.plan_fingerprint:
        raise MismatchError(
            expected(
                "measurement",
                f"one of plan {plan.fingerprint[:12]}",
                f"one of plan {measurement.plan_fingerprint[:12]}",
                "Compare the plan.json and measured.json of one run.",
            )
        )
    if not measurement.memory_steps:
        return _not_measured(plan, measurement, tolerance)
    predicted, measured = decode(plan.timeline), decode(measurement.timeline)
    exact = tuple(
        ComparedNumber(rank, phase, kind, name, a, b)
        for (rank, phase, kind, name), a, b in _join(exact_bytes(predicted), exact_bytes(measured))
    )
    before, after = _totals(phase_peaks(predicted)), _totals(phase_peaks(measured))
    phase_lines = tuple(
        ComparedNumber(rank, phase, "total", PEAK, a, b)
        for (rank, phase), a, b in _join(before, after)
    )
    where = _phases(before) | _phases(after)
    peaks = tuple(
        ComparedNumber(rank, where[rank], "total", PEAK, a, b)
        for rank, a, b in _join(_highest(before), _highest(after))
    )
    seconds = tuple(
        ComparedNumber(rank, phase, "time", phase, a, b)
        for (rank, phase), a, b in _join(phase_seconds(predicted), phase_seconds(measured))
    )
    exchanges = tuple(
        ComparedNumber(rank, phase, kind, name, a, b)
        for (rank, phase, name, kind), a, b in _join(
            exchange_seconds(predicted), exchange_seconds(measured)
        )
    )
    return Comparison(
        schema=COMPARISON_SCHEMA,
        plan_fingerprint=plan.fingerprint,
        tolerance=tolerance,
        exact=exact,
        peaks=peaks,
        phase_peaks=phase_lines,
        seconds=seconds,
        failures=(
            *_exact_failures(exact),
            *_peak_failures(peaks, tolerance),
            *_phase_failures(phase_lines),
        ),
        exchanges=exchanges or UNSET,
        unjudged=_unjudged(plan.job.cluster, measurement.machine) or UNSET,
    )


def _unjudged(cluster: ClusterSection, machine: Mapping[str, str]) -> str:
    """Why seconds that rest on a cluster file are not judged; empty where the machine was quiet
    when it was calibrated and when it ran."""
    if cluster.measured is None:
        return ""
    if cluster.measured.busy:
        return f"{cluster.file} was {cluster.measured.busy}"
    if "load" not in machine:
        return "what else the machine did during the run is not known"
    return f"the machine was busy during the run{said}" if (said := busy(machine)) else ""


def _not_measured(plan: Plan, measurement: Measurement, tolerance: float) -> Comparison:
    """A run too short for its memory to be followed says so, and nothing else."""
    reason = (
        f"Memory was not measured: it is followed on steps 3 to 5, and the run had "
        f"{measurement.steps}; set train.steps to 3 or more, or let your own loop run as long"
    )
    return Comparison(
        COMPARISON_SCHEMA,
        plan.fingerprint,
        tolerance,
        exact=(),
        peaks=(),
        phase_peaks=(),
        seconds=(),
        failures=(reason,),
    )


def _join(
    predicted: Mapping[K, float], measured: Mapping[K, float]
) -> list[tuple[K, float | None, float | None]]:
    keys = sorted({*predicted, *measured})  # type: ignore[type-var]
    return [(key, predicted.get(key), measured.get(key)) for key in keys]


def _totals(peaks: dict[tuple[int, str], dict[str, int]]) -> dict[tuple[int, str], int]:
    return {key: sum(kinds.values()) for key, kinds in peaks.items()}


def _highest(totals: dict[tuple[int, str], int]) -> dict[int, int]:
    return {rank: totals[rank, phase] for rank, phase in _phases(totals).items()}


def _phases(totals: dict[tuple[int, str], int]) -> dict[int, str]:
    """The phase with the highest total of each rank."""
    found: dict[int, str] = {}
    for rank, phase in totals:
        if rank not in found or totals[rank, phase] > totals[rank, found[rank]]:
            found[rank] = phase
    return found


def _exact_failures(lines: tuple[ComparedNumber, ...]) -> list[str]:
    """A prediction of nothing (0 bytes) is met by no event at all."""
    return [
        f"rank {line.rank}: {line.kind} of {line.name} predicted {line.predicted or 0:,} B, "
        f"measured {line.measured or 0:,} B"
        for line in lines
        if (line.predicted or 0) != (line.measured or 0)
    ]


def _phase_failures(lines: tuple[ComparedNumber, ...]) -> list[str]:
    """A phase that only one side knows was not carried out as planned."""
    # A rank that measured nothing at all fails by its peak, not once more for every phase.
    measured = {line.rank for line in lines if line.measured is not None}
    return [
        f"rank {line.rank}: phase {line.phase} was "
        + ("predicted and not measured" if line.measured is None else "measured and not predicted")
        for line in lines
        if line.rank in measured and (line.predicted is None) != (line.measured is None)
    ]


def _peak_failures(lines: tuple[ComparedNumber, ...], tolerance: float) -> list[str]:
    failures = []
    for line in lines:
        if line.predicted is None or line.measured is None:
            failures.append(
                f"rank {line.rank}: no peak {'measured' if line.predicted else 'known'}"
            )
        elif abs(line.difference) > tolerance * line.measured:
            failures.append(
                f"rank {line.rank}: peak predicted {line.predicted:,} B, measured "
                f"{line.measured:,} B, more than {tolerance:.0%} apart"
            )
    return failures
