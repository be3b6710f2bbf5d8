"""What a job takes beyond its machine's constants, from short runs of it."""

# Operators that are timed alone, hot and with nobody to wait for are faster than in a step. So the
# job is run at half of its batch and at all of it, and what constants leave unexplained is told
# apart by how it grows: what stays is a fixed cost of its phase, what grows with the batch belongs
# to the phase's own constant, and what grows with all that ranks compute is the wait for the
# slowest. Smaller batches would mislead: their activations stay in a core's cache, where a row
# takes two thirds of what it takes in the job's own.

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from shardwright.core.cluster import Calibration, SourcedFigure
from shardwright.core.measurement import Measurement
from shardwright.core.recording import Unfolded
from shardwright.core.timeline import decode, phase_seconds
from shardwright.core.work import Product
from shardwright.cost.presets import OF_A_JOB
from shardwright.estimate.recordings import plan, recorded_with_shapes
from shardwright.job.job import Job
from shardwright.job.plan import Plan
from shardwright.launcher.ending import RunOutcome
from shardwright.launcher.load import OtherLoad
from shardwright.planner.explain.recompute import priced_again
from shardwright.planner.profiles import cluster_of
from shardwright.train.calibrate import calibrate
from shardwright.train.session import run
from shardwright.train.sources import source_of

Floats = NDArray[np.float64]
PARTS = (2, 1)  # of the batch that are run
STEPS, STEPS_QUICK = 40, 15
TRUST = 0.03  # in what was timed alone, beside a run: both are errors in shares
LEAST = 0.01  # of a constant
START_SHARE = 0.05  # of what ranks compute, until it is known how long they wait
# Phases in the order in which they are fitted, with their constants.
GROUPS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("forward", "backward"): ("elementwise_rate", "operation_latency"),
    ("load",): ("parse_cost",),
    ("lookup",): ("row_latency",),
    ("step",): ("sgd_passes", "rowwise_adagrad_passes", "adagrad_passes", "adam_passes"),
    ("exchange_rows",): ("all_to_all_rate",),
    ("exchange_ids", "reduce"): ("slowest_share", "index_cost", "sort_cost"),
}


def products_of(job: Job) -> list[Product]:
    """The fp32 products of a step, each with all of its calls."""
    step, calls = Unfolded(recorded_with_shapes(job)), Counter[tuple[int, int, int]]()
    for moment in (*step.forward, *step.backward):
        for each in moment.piece.operators.products if moment.piece.operators else ():
            if each.dtype == "fp32":
                calls[each.m, each.n, each.k] += each.calls
    return [Product("fp32", *shape, count) for shape, count in calls.items()]


@dataclass(frozen=True, slots=True)
class Probe:
    """A run: its plan, and the mean over ranks of the measured seconds of a phase."""

    plan: Plan
    seconds: Mapping[str, float]

    def predicted(self, found: Calibration) -> dict[str, float]:
        """The same seconds as they are predicted with other constants."""
        job = calibrated_job(self.plan.job, found)
        ranks = priced_again(msgspec.structs.replace(self.plan, job=job)).seconds
        return {p: statistics.fmean(r.get(p, 0.0) for r in ranks) for p in self.seconds}


def calibrated_job(job: Job, found: Calibration) -> Job:
    """The job on a machine that was measured."""
    name = job.cluster.file or "cluster.toml"
    cluster = msgspec.structs.replace(job.cluster, preset="", file=name, measured=found)
    return msgspec.structs.replace(job, cluster=cluster)


def calibrate_for(
    job: Job, stream: TextIO, *, quick: bool = False
) -> tuple[RunOutcome, Calibration | None, Path | None]:
    """As :func:`calibrate`, with the products of ``job`` and what short runs of it tell beyond.

    InputError: a job that cannot be run, or of which half of the batch cannot.
    """
    source_of(job)  # tables alone are trained nowhere
    ranks, load = cluster_of(job)[0].world_size, OtherLoad()
    outcome, found, folder = calibrate(ranks, stream, quick=quick, products=products_of(job))
    if found is None:
        return outcome, None, folder
    probes = []
    with tempfile.TemporaryDirectory(prefix="shardwright-calibrate-") as scratch:
        for part in PARTS:
            its = smaller(job, part, STEPS_QUICK if quick else STEPS, Path(scratch) / str(part))
            print(f"the job at a batch of {its.batch.size}, {its.train.steps} steps", file=stream)
            session = run(plan(calibrated_job(its, found)), Path(its.train.out), stream)
            if session.measurement is None:
                return session.outcome, None, None
            probes.append(Probe(session.plan, _means(session.measurement)))
    sizes = " and ".join(str(each.plan.job.batch.size) for each in probes)
    found = fitted(probes, found, f"measured: {job.model.kind} in batches of {sizes}")
    machine = found.machine | {"load": f"{load.ended():.1f}"}
    return outcome, msgspec.structs.replace(found, machine=machine), None


def smaller(job: Job, part: int, steps: int, out: Path) -> Job:
    """A part of the job's batch for some steps, with nothing saved, told or held out."""
    size, replaced = max(job.batch.size // part, 1), msgspec.structs.replace
    train = replaced(job.train, steps=steps, out=str(out), log=UNSET, metrics_every=UNSET)
    batch, data = replaced(job.batch, size=size), job.data
    if data.kind == "synthetic":  # no more is made up than is read
        rows = steps * size * cluster_of(job)[0].world_size
        data = replaced(data, rows=min(data.rows, rows), test_rows=0)
    return replaced(job, batch=batch, data=data, train=train, checkpoint=UNSET)


def _means(measured: Measurement) -> dict[str, float]:
    """The mean over ranks of every phase's seconds."""
    ranks: dict[str, list[float]] = {}
    for (_, phase), seconds in phase_seconds(decode(measured.timeline)).items():
        ranks.setdefault(phase, []).append(seconds)
    return {phase: statistics.fmean(seconds) for phase, seconds in ranks.items()}


def fitted(probes: Sequence[Probe], found: Calibration, source: str) -> Calibration:
    """What was found of a machine, with constants as ``probes`` of a job have them."""
    start = {"elementwise_rate": found.constants["memory_rate"].value}
    start |= {"slowest_share": START_SHARE}
    found = _with(found, start, source)
    for phases, names in GROUPS.items():
        found = _fit(probes, found, phases, names, source)
    return found


def _fit(
    probes: Sequence[Probe],
    found: Calibration,
    phases: Sequence[str],
    names: Sequence[str],
    source: str,
) -> Calibration:
    """Constants that make the ``phases`` of all probes as they were, by the least sum of squares of
    relative errors: those of ``names`` on which they depend, and a fixed cost of each phase."""
    points = [(each, phase) for each in probes for phase in phases if each.seconds.get(phase)]
    measured = np.array([each.seconds[phase] for each, phase in points])

    def predicted(constants: Calibration) -> Floats:
        return np.array([each.predicted(constants)[phase] for each, phase in points])

    usual, columns = predicted(found), {}
    for name in names:
        more = predicted(_with(found, {name: _scaled(found, name, 2.0)}, source)) - usual
        if more.any():  # what is due to the constant
            columns[name] = more
    used, rest = [*columns], usual - sum(columns.values())
    for phase in phases:
        columns[f"{phase}_latency"] = np.array([1.0 * (own == phase) for _, own in points])
    columns = {name: column for name, column in columns.items() if column.any()}
    if not columns:
        return found
    rows = np.array([*columns.values()]).T / measured[:, None]
    trust = TRUST * np.eye(len(columns))[: len(used)]
    targets = np.concatenate([(measured - rest) / measured, [TRUST] * len(used)])
    values = least(np.concatenate([rows, trust]), targets)
    off = float(np.sqrt(np.mean((rows @ values - targets[: len(points)]) ** 2)))
    changes = {
        name: _scaled(found, name, max(value, LEAST)) if name in used else value
        for name, value in zip(columns, values.tolist(), strict=True)
    }
    return _with(found, changes, f"{source}, each within {off * 100:.0f} %", len(points))


def least(rows: Floats, targets: Floats) -> Floats:
    """Numbers that are not negative, of nearly the least sum of squares: whichever is furthest
    below 0 is left at 0, until none is."""
    kept = list(range(rows.shape[1]))
    while True:
        values = np.zeros(rows.shape[1])
        values[kept] = np.linalg.lstsq(rows[:, kept], targets, rcond=None)[0]
        if values.min(initial=0.0) >= 0:
            return values
        kept.remove(int(values.argmin()))


def _scaled(found: Calibration, name: str, times: float) -> float:
    """A constant with which what is due to it takes so many times as long."""
    value = found.constants[name].value
    return value / times if name.endswith("_rate") else value * times


def _with(
    found: Calibration, values: Mapping[str, float], source: str, median_of: int = 0
) -> Calibration:
    figures = {}
    for name, value in values.items():
        unit = OF_A_JOB.get(name) or found.constants[name].unit
        value = min(value, 1.0) if unit == "share" else value
        figures[name] = SourcedFigure(value, unit, source, found.date, median_of)
    return msgspec.structs.replace(found, constants=found.constants | figures)
