"""Runs six jobs of different shape and keeps what was predicted beside what was measured.

    python benchmarks/predicted_against_measured.py --machine cpu-2-cores

writes ``validation/<machine>/<case>.json`` for each case, or for those of ``--cases demo,...``.
Memory must come out exactly (weights, gradients, optimizer states, padding) and within ten percent
(peak); seconds are kept as they are, beside the load of the machine, for the preset's constants are
not this machine's. ``tests/test_figures.py`` holds the demo's file to the plan of today.

    python benchmarks/predicted_against_measured.py --machine cpu-2-cores --calibrate

calibrates for each case and runs it with the preset's constants, with those, and at three quarters
of its batch with those, in turns: their seconds and the load of others go to
``validation/<machine>/calibrated.json``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import operator
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shardwright.core.cluster import BUSY
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job, read_job
from shardwright.job.plan import Plan
from shardwright.train.calibrate.probes import calibrate_for, calibrated_job, smaller
from shardwright.train.session import Session, run

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def uniform_job(
    out: str, *, rows: int, dim: int, batch: int, top: list[int], optimizer: str
) -> Job:
    """26 tables, every third ten times smaller, on two ranks."""
    tables = [
        {"name": f"C{i}", "rows": rows if i % 3 else max(1, rows // 10), "dim": dim}
        for i in range(26)
    ]
    return parse_job(
        {
            "model": {"bottom": [64, dim], "top": top},
            "tables": tables,
            "cluster": {"world_size": 2, "ddr_cap": "1 GiB"},
            "batch": {"size": batch},
            "data": {"kind": "synthetic", "rows": 8 * batch, "test_rows": 0},
            "train": {"steps": 25, "optimizer": optimizer, "learning_rate": 0.01, "out": out},
        }
    )


def jobs(folder: Path) -> dict[str, Job]:
    """The demo, a job whose activations dominate, one whose tables dominate, a small GPT, and
    models of one's own with and without tables."""
    return {
        "demo": read_job(EXAMPLES / "demo.toml", [f"train.out={folder / 'demo'}"]),
        "large_batch": uniform_job(
            str(folder / "large_batch"),
            rows=2_000,
            dim=32,
            batch=2048,
            top=[256, 64, 1],
            optimizer="adagrad",
        ),
        "large_tables": uniform_job(
            str(folder / "large_tables"),
            rows=200_000,
            dim=16,
            batch=64,
            top=[64, 1],
            optimizer="sgd",
        ),
        "transformer": read_job(
            EXAMPLES / "transformer.toml", [f"train.out={folder / 'transformer'}", "train.steps=40"]
        ),
        "own_model": read_job(EXAMPLES / "own_model.toml", [f"train.out={folder / 'own_model'}"]),
        "recommender": read_job(
            EXAMPLES / "recommender.toml", [f"train.out={folder / 'recommender'}"]
        ),
    }


def summary(session: Session) -> dict[str, Any]:
    """Predicted beside measured, small enough to read."""
    measured, comparison = session.measurement, session.comparison
    if measured is None or comparison is None:
        raise SystemExit(f"run failed: {session.outcome.reason}")
    exact = [line for line in comparison.exact if line.predicted or line.measured]
    return {
        "date": datetime.date.today().isoformat(),
        "versions": measured.versions,
        "machine": measured.machine,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "plan_fingerprint": session.plan.fingerprint,
        "plan": {
            "max_rank_seconds": session.plan.max_rank_seconds,
            "lower_bound_seconds": session.plan.lower_bound_seconds,
            "gap": session.plan.gap,
        },
        "exact_bytes_compared": len(exact),
        "exact_bytes_unequal": sum(line.predicted != line.measured for line in exact),
        "peaks": [
            {
                "rank": line.rank,
                "predicted_bytes": line.predicted,
                "measured_bytes": line.measured,
                "error": line.error,
            }
            for line in comparison.peaks
        ],
        "phase_peaks": [
            {
                "rank": line.rank,
                "phase": line.phase,
                "predicted_bytes": line.predicted,
                "measured_bytes": line.measured,
            }
            for line in comparison.phase_peaks
        ],
        "seconds": [
            {
                "rank": line.rank,
                "phase": line.phase,
                "predicted": line.predicted,
                "measured": line.measured,
            }
            for line in comparison.seconds
        ],
        "samples_per_second": measured.samples_per_second,
        "quality": None if measured.quality is None else msgspec.to_builtins(measured.quality),
        "failures": list(comparison.failures),
    }


STEPS, TURNS, TRIES = 60, 3, 2
QUIET = BUSY * (os.cpu_count() or 1)  # load of others


def calibrated(job: Job) -> dict[str, Any]:
    """Seconds of a step by phase, means over ranks, with a preset's constants and with those that
    were calibrated for the job: in turns, for a busy machine changes, and each again while the
    machine is busy, at most so many times."""
    loads: dict[str, list[float]] = {}

    def quietest(what: str, attempt: Callable[[], tuple[Any, dict[str, str]]]) -> Any:
        best: tuple[float, Any] = (math.inf, None)
        for _ in range(TRIES):
            found, machine = attempt()
            best = min(best, (float(machine["load"]), found), key=operator.itemgetter(0))
            if best[0] <= QUIET:
                break
        loads.setdefault(what, []).append(best[0])
        return best[1]

    def calibration() -> tuple[Any, dict[str, str]]:
        outcome, found, _ = calibrate_for(job, sys.stderr)
        if found is None:
            raise SystemExit(f"calibration failed: {outcome.reason}")
        return found, found.machine

    def trained(made: Plan) -> tuple[Session, dict[str, str]]:
        session = run(made, Path(job.train.out), sys.stderr)
        if session.measurement is None:
            raise SystemExit(f"run failed: {session.outcome.reason}")
        return session, session.measurement.machine

    found = quietest("calibration", calibration)
    job = smaller(job, 1, STEPS, Path(job.train.out))
    plans = {"preset": plan(job), "calibrated": plan(calibrated_job(job, found))}
    size = max(job.batch.size * 3 // 4, 1)  # a batch that calibration has not run
    unseen = msgspec.structs.replace(job, batch=msgspec.structs.replace(job.batch, size=size))
    plans["unseen batch"] = plan(calibrated_job(unseen, found))
    turns: dict[str, list[Session]] = {name: [] for name in plans}
    for _ in range(TURNS):
        for name, made in plans.items():
            turns[name].append(quietest(name, functools.partial(trained, made)))
    return {
        "date": datetime.date.today().isoformat(),
        "load_of_others": loads,
        "phases": {name: _phases(turns[name]) for name in turns},
    }


def _phases(sessions: list[Session]) -> dict[str, Any]:
    """Milliseconds of each phase and of a step: predicted, the median of the turns, and the first
    over the second."""
    found: dict[str, dict[str, list[float]]] = {}
    for session in sessions:
        ranks = session.plan.world_size
        for side in ("predicted", "measured"):
            totals: dict[str, float] = {}
            for line in session.comparison.seconds if session.comparison else ():
                own = 1e3 * (getattr(line, side) or 0.0) / ranks
                totals[line.phase] = totals.get(line.phase, 0.0) + own
            for phase, ms in (totals | {"all": sum(totals.values())}).items():
                found.setdefault(phase, {}).setdefault(side, []).append(ms)
    told: dict[str, dict[str, float | None]] = {}
    for phase, its in found.items():
        predicted, measured = (statistics.median(its[s]) for s in ("predicted", "measured"))
        told[phase] = {
            "predicted": round(predicted, 2),
            "measured": round(measured, 2),
            "ratio": round(predicted / measured, 2) if measured else None,
        }
    return told


def main() -> int:
    """Run every case; 1 if a prediction failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", required=True, help="a name for this machine")
    parser.add_argument("--cases", help="some of them, such as demo,transformer")
    parser.add_argument("--calibrate", action="store_true", help="seconds before and after it")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        known = jobs(Path(scratch))
        for case in options.cases.split(",") if options.cases else known:
            job = known[case]
            if options.calibrate:
                target = ROOT / "validation" / options.machine / "calibrated.json"
                kept = json.loads(target.read_text()) if target.exists() else {}
                kept[case] = calibrated(job)
                target.write_text(json.dumps(kept, indent=2) + "\n")
                both = {name: its["all"] for name, its in kept[case]["phases"].items()}
                print(case, both, kept[case]["load_of_others"], flush=True)
                continue
            made = plan(job)
            result = summary(run(made, Path(job.train.out), sys.stderr))
            target = ROOT / "validation" / options.machine / f"{case}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(result, indent=2) + "\n")
            failed += bool(result["failures"])
            for peak in result["peaks"]:
                print(
                    f"{case:<13} rank {peak['rank']}: peak {peak['error']:+.2%} off, "
                    f"{result['exact_bytes_unequal']} of {result['exact_bytes_compared']} "
                    "exact figures unequal"
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
