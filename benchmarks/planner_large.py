"""Large problems: CPU seconds, memory and gap of our planner, each in a process of its own.

* ``10000x4096`` and ``10000x16384``: the tables of planner_problems.py with the two kernels and
  options of TorchRec, and with every kernel and sharding type of ours;
* ``800x128``: tables of very unequal sizes, on ranks whose memory is 1.05 times what all of them
  hold, at our own costs, four draws;
* ``30000x8``: thousands of tables on every rank, which has memory for four times as many, at our
  own costs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import planner_problems
from planner_problems import Problem

from shardwright.job.plan import read_plan

MANY = 10_000  # tables
MANY_TARGETS = {4096: 30.0, 16384: 120.0}  # seconds of CPU by ranks
KINDS = ("torchrec", planner_problems.EVERY_KERNEL)
TIGHT_TABLES, TIGHT_RANKS, ROOM, TIGHT_TARGET = 800, 128, 1.05, 10.0
SEEDS = (11, 12, 13, 14)
CROWD, CROWDED_RANKS, CROWDED_ROOM, CROWDED_TARGET = 30_000, 8, 4.0, 60.0
Run = Callable[[list[str]], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A job file, the bytes that a rank may hold, and the seconds of CPU that it may take."""

    name: str
    job: Path
    capacity: int
    target: float


def run(measured: Run) -> tuple[dict[str, Any], list[str]]:
    """Every problem; ``measured`` runs a command in a process of its own."""
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    print("problem                      CPU s   limit  RSS MiB  slowest rank ms       gap")
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases(Path(scratch)):
            found = figures[case.name] = _planned(case, measured)
            if found["max_hbm_bytes"] > case.capacity:
                wrong.append(
                    f"{case.name}: a rank holds {found['max_hbm_bytes']} of {case.capacity} bytes"
                )
            print(
                f"{case.name:<26} {found['cpu_seconds']:7.2f}  {case.target:6.0f}"
                f"  {found['peak_rss_bytes'] / 2**20:7.0f}  {found['max_rank_ms']:15.4f}"
                f"  {found['gap']:8.3%}",
                flush=True,
            )
    return {"large": figures}, wrong


def cases(folder: Path) -> Iterator[Case]:
    """Every problem, its job written into ``folder``."""
    for ranks, target in MANY_TARGETS.items():
        problem = Problem(MANY, ranks, peer=False)
        for kind in KINDS:
            job = planner_problems.write_job(problem, kind, folder)
            yield Case(f"{problem.name} {kind}", job, planner_problems.CAPACITY, target)
    for seed in SEEDS:
        yield tight(seed, folder)
    yield crowded(folder)


def _planned(case: Case, measured: Run) -> dict[str, Any]:
    """One problem planned."""
    path = case.job.with_suffix(".plan.json")
    script = str(Path(__file__).with_name("planner_once.py"))
    found = measured([sys.executable, script, str(case.job), str(path)])
    plan = read_plan(path)
    return {
        **{key: found[key] for key in ("cpu_seconds", "seconds", "peak_rss_bytes")},
        "target_cpu_seconds": case.target,
        "max_rank_ms": plan.max_rank_seconds * 1e3,
        "bound_ms": plan.lower_bound_seconds * 1e3,
        "gap": plan.gap,
        "max_hbm_bytes": max(rank.hbm_bytes for rank in plan.ranks),
        "capacity_bytes": case.capacity,
        "fingerprint": plan.fingerprint,
    }


def tight(seed: int, folder: Path, room: float = ROOM) -> Case:
    """Tables of very unequal sizes on ranks that have ``room`` times the bytes of all."""
    drawn = np.random.default_rng(seed)
    count = TIGHT_TABLES
    rows = np.exp(drawn.normal(13.0, 2.3, count)).clip(100, 4e7).astype(int)
    ids = np.exp(drawn.normal(1.0, 1.7, count)).clip(1.0)
    dims = drawn.choice([16, 32, 64, 128], count)
    tables = [
        {
            "name": f"t{i}",
            "rows": int(rows[i]),
            "dim": int(dims[i]),
            "pooling": round(float(ids[i]), 2),
        }
        for i in range(count)
    ]
    name = f"{count}x{TIGHT_RANKS} draw {seed}"
    return _case(name, tables, TIGHT_RANKS, room, TIGHT_TARGET, folder / f"tight{seed}.toml")


def crowded(folder: Path, count: int = CROWD) -> Case:
    """``count`` tables on few ranks: rows from 100 to 10 million, up to 30 ids per sample."""
    drawn = np.random.default_rng(5)
    tables = [
        {
            "name": f"t{i}",
            "rows": int(10 ** drawn.uniform(2, 7)),
            "dim": int(drawn.choice([8, 16, 32, 64, 128])),
            "pooling": round(10 ** float(drawn.uniform(0, 1.5)), 1),
        }
        for i in range(count)
    ]
    name, path = f"{count}x{CROWDED_RANKS}", folder / "crowded.toml"
    return _case(name, tables, CROWDED_RANKS, CROWDED_ROOM, CROWDED_TARGET, path)


def _case(
    name: str, tables: list[dict[str, Any]], ranks: int, room: float, target: float, path: Path
) -> Case:
    """``tables`` on ``ranks`` whose memory is ``room`` times the bytes of all, at our own costs."""
    capacity = int(sum(4 * table["rows"] * table["dim"] for table in tables) * room / ranks)
    reservation = '\n[planner.reservation]\nkind = "none"\n'
    planner_problems.write(path, tables, ranks, capacity, reservation)
    return Case(name, path, capacity, target)
