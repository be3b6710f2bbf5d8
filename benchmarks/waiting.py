"""Where the time of a small DLRM goes on two ranks: the profile of the founding study, again.

    python benchmarks/waiting.py --output validation/cpu-2-cores/profile.json

26 tables of 1,000,000 rows of 16 numbers, each whole on one rank, 64 samples a rank; 256 steps each
of training, validation and test, all of such batches, are profiled. The study (two GPUs) found
exchanges to be 73 % of the time of all kernels, with a mean 13 times the median, which is waiting
and not bytes; here both are measured apart.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from msgspec import UNSET

from shardwright.core.measurement import ProfiledStage, by_phase
from shardwright.data.synthetic import ClickModel
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job
from shardwright.train.session import run

STEPS, BATCH, RANKS = 256, 64, 2
LEFT = 20  # steps before and after those that are profiled
TRAINED = (STEPS + LEFT) * BATCH * RANKS  # rows
BLOCK = 8192  # rows that come again
SHOWN = 12  # kernels that are kept


def job(folder: Path, rows: int) -> Job:
    """Two days of a made-up log; half of the second is 256 batches. Its rows come again and again,
    for nobody looks at what is learned."""
    log, held_out = folder / "log", STEPS * BATCH * RANKS
    log.mkdir()
    ClickModel(cardinalities=(rows,) * 26).write(log / "day_0", TRAINED)
    some = (log / "day_0").read_bytes().splitlines(keepends=True)[:BLOCK]
    (log / "day_1").write_bytes(b"".join(some) * (2 * held_out // BLOCK))
    names = [f"C{i}" for i in range(1, 27)]
    table = {"rows": rows, "dim": 16, "sharding_types": ["table_wise"]}
    return parse_job(
        {
            "model": {"bottom": [64, 16], "top": [8, 4, 1]},
            "tables": [{"name": name, **table} for name in names],
            "cluster": {"preset": "local", "world_size": RANKS},
            "batch": {"size": BATCH},
            "data": {
                "kind": "criteo",
                "path": str(log),
                "cache": str(folder / "rows"),
                "test_batch": BATCH,
            },
            "train": {"steps": STEPS + LEFT, "out": str(folder / "run"), "timeout": 600.0},
        }
    )


def figures(stage: ProfiledStage) -> dict[str, Any]:
    """Milliseconds of a step by phase, means over ranks, and of kernels."""
    phases = {
        phase: {
            "step_ms": 1e3 * sum(line.seconds for line in lines) / RANKS,
            "waits_ms": 1e3 * sum(line.waiting for line in lines) / RANKS,
            "moves_ms": 1e3 * sum(line.moving for line in lines) / RANKS,
        }
        for phase, lines in by_phase(stage).items()
    }
    total = {
        key: sum(of[key] for of in phases.values()) for key in ("step_ms", "waits_ms", "moves_ms")
    }
    return {
        "steps": stage.steps,
        "clock_error_ms": 1e3 * stage.clock_error,
        "unmatched": stage.unmatched,
        "all": total,
        "phases": phases,
        "awaited_ms": {str(found.rank): 1e3 * found.seconds for found in stage.awaited},
        "kernels": [
            {
                "name": kernel.name,
                "calls": kernel.calls,
                "mean_us": 1e6 * kernel.mean,
                "median_us": 1e6 * kernel.median,
                "longest_us": 1e6 * kernel.longest,
                "share": kernel.share,
            }
            for kernel in stage.kernels[:SHOWN]
        ],
    }


def rounded(value: Any) -> Any:
    """Three figures behind the point are enough."""
    if isinstance(value, dict):
        return {key: rounded(own) for key, own in value.items()}
    if isinstance(value, list):
        return [rounded(own) for own in value]
    return round(value, 3) if isinstance(value, float) else value


def main() -> int:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each table")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        made = plan(job(Path(place), options.rows))
        session = run(made, Path(made.job.train.out), sys.stderr, profile=STEPS)
        measured = session.measurement
        if measured is None or measured.profile is UNSET:
            print(session.outcome.reason, file=sys.stderr)
            return session.outcome.code or 1
    found = {stage.name: figures(stage) for stage in measured.profile}
    about: dict[str, Any] = {"machine": measured.machine, "versions": measured.versions}
    about["load_average"] = list(os.getloadavg())  # processes that wanted two cores meanwhile
    options.output.write_text(json.dumps(rounded({**found, **about}), indent=2) + "\n")
    print(options.output.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
