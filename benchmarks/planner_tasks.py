"""The public table-sharding tasks at the additive cost: how near to a perfect balance plans come.

A task file is a JSON object with ``tables`` of name, rows, dim and pooling; one of the NeuroShard
protocol has ``tasks`` of ids into the tables of a ``pool`` file beside it, and dims. Batch is 4096
per rank. A table of rows r, dim d and L ids per sample costs on W ranks, in ms,

    c = 1000 x (3 x B x W x L x d x 4 / 900e9 + 2 x B x (W - 1) x d x 4 / 10e9),

a shard of columns its share of that, so no plan can be faster than sum(c) / W.

The single tasks are planned at our own costs as well, on 2 to 16 ranks of two machines: what their
searches take in seconds of CPU, and how far the plans are from the proven bound.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner_check import shards_of

from shardwright.core.errors import NoPlanError
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan

VARIABLE = "SHARDWRIGHT_TASKS"
GIB = 2**30
BATCH = 4096  # samples per rank
ELEMENT_BYTES = 4
MACHINES = {  # ranks and GiB of each, by the name of a task file
    "mlperf_dlrm_v2": ((8, 16), (8, 24)),
    "mlperf_dlrm_v1": ((8, 24),),
    "criteo_kaggle": ((4, 4),),
    "dlrm_study": ((4, 4), (2, 4)),
}
NATIVE_RANKS = (2, 4, 8, 16)
NATIVE_MACHINES = (("h100-8", 80), ("h100-8", 16), ("a100-8", None))  # preset, GiB; None: tight
TIGHT = 1.3  # times the bytes of all tables, over the ranks
NATIVE_OPTIMIZERS = ("rowwise_adagrad", None, "adam")
TARGET_SECONDS = 0.6
WAYS: dict[str, tuple[str, ...]] = {
    "table_wise": ("table_wise",),
    "column_wise": ("table_wise", "column_wise"),
}


def run(where: str) -> tuple[dict[str, Any], list[str]]:
    """Every task file of a folder, or one; figures and what is wrong."""
    name = where or os.environ.get(VARIABLE, "")
    if not name:
        raise SystemExit(f"--tasks: name a file or a folder, or set {VARIABLE}")
    path = Path(name)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    figures: dict[str, Any] = {"single": [], "series": [], "native": {}}
    wrong: list[str] = []
    print(
        "task                                    way          feasible  ratio (worst)      seconds"
    )
    for file in files:
        document = json.loads(file.read_text())
        if "tasks" in document:
            figures["series"].append(_series(file, document, wrong))
        elif file.stem in MACHINES:
            for ranks, gib in MACHINES[file.stem]:
                figures["single"].append(_single(file, document, ranks, gib, wrong))
    known = [file for file in files if file.stem in MACHINES]
    figures["native"] = _native([found for file in known for found in _native_plans(file)])
    return figures, wrong


def _native_plans(file: Path) -> Iterator[dict[str, Any]]:
    """A task's plans at our own costs; a machine without enough memory for Adam is left out."""
    tables = json.loads(file.read_text())["tables"]
    cases = itertools.product(NATIVE_MACHINES, NATIVE_RANKS, NATIVE_OPTIMIZERS)
    for (preset, gib), ranks, optimizer in cases:
        if optimizer == "adam" and gib is not None:
            continue
        states = 3 if optimizer == "adam" else 1
        nbytes = sum(t["rows"] * (t["dim"] * ELEMENT_BYTES * states + 4) for t in tables)
        learning = {"optimizer": optimizer} if optimizer else {}
        job = parse_job(
            {
                "tables": [_section(t, **learning) for t in tables],
                "cluster": {
                    "preset": preset,
                    "world_size": ranks,
                    "hbm_cap": int(nbytes / ranks * TIGHT) if gib is None else gib * GIB,
                },
                "batch": {"size": BATCH},
            }
        )
        found: dict[str, Any] = {
            "task": file.stem,
            "machine": preset,
            "gib_per_rank": gib,
            "ranks": ranks,
            "optimizer": optimizer,
        }
        started = time.process_time()
        try:
            made = plan(job)
        except NoPlanError:
            made = None
        found["cpu_seconds"] = time.process_time() - started
        yield found | ({"ms": made.max_rank_seconds * 1e3, "gap": made.gap} if made else {})


def _section(table: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A table of a task as a job has it, with more ``keys``."""
    size = {key: table[key] for key in ("name", "rows", "dim")}
    return {**size, "pooling_factors": [table["pooling"]], **keys}


def _native(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the plans at our own costs add up to, and each of them."""
    if not jobs:
        return {}
    seconds = [job["cpu_seconds"] for job in jobs]
    found = {
        "jobs": len(jobs),
        "planned": sum("ms" in job for job in jobs),
        "target_cpu_seconds": TARGET_SECONDS,
        "within_target": sum(own <= TARGET_SECONDS for own in seconds),
        "median_cpu_seconds": statistics.median(seconds),
        "worst_cpu_seconds": max(seconds),
        "each": jobs,
    }
    print(
        f"at our own costs: {found['within_target']} of {len(jobs)} within {TARGET_SECONDS} s"
        f" of CPU, median {found['median_cpu_seconds']:.2f}, worst {max(seconds):.2f}"
    )
    return found


def _single(
    file: Path, document: dict[str, Any], ranks: int, gib: int, wrong: list[str]
) -> dict[str, Any]:
    """One problem, with and without column splits."""
    found: dict[str, Any] = {"task": file.stem, "ranks": ranks, "gib_per_rank": gib}
    for way, types in WAYS.items():
        found[way] = _solve(
            document["tables"], ranks, gib * GIB, types, f"{file.stem} {way}", wrong
        )
        _tell(f"{file.stem}, {ranks} ranks, {gib} GiB", way, [found[way]])
    found["bound_ms"] = _bound(document["tables"], ranks)
    return found


def _series(file: Path, document: dict[str, Any], wrong: list[str]) -> dict[str, Any]:
    """All tasks over one pool of tables: how many have a plan, and how good it is."""
    pool = json.loads((file.parent / document["pool"]).read_text())["tables"]
    ranks, capacity = document["devices"], int(document["max_mem_gb"] * GIB)
    found: dict[str, Any] = {"task": file.stem, "ranks": ranks, "tasks": len(document["tasks"])}
    for way, types in WAYS.items():
        solved = []
        for number, task in enumerate(document["tasks"]):
            tables = [
                {
                    "name": f"t{i}",
                    "rows": pool[k]["rows"],
                    "dim": dim,
                    "pooling": pool[k]["pooling"],
                }
                for i, (k, dim) in enumerate(zip(task["ids"], task["dims"], strict=True))
            ]
            spot = f"{file.stem}[{number}] {way}"
            solved.append(_solve(tables, ranks, capacity, types, spot, wrong))
        found[way] = {"all": _summary(solved), "first_30": _summary(solved[:30])}
        _tell(f"{file.stem}, {ranks} ranks", way, solved)
    return found


def _solve(
    tables: list[dict[str, Any]],
    ranks: int,
    capacity: int,
    types: tuple[str, ...],
    spot: str,
    wrong: list[str],
) -> dict[str, Any]:
    """Our plan of one task, added up again; ``ms`` is None where nothing fits."""
    job = parse_job(
        {
            "tables": [_section(table, sharding_types=list(types)) for table in tables],
            "cluster": {"world_size": ranks, "hbm_cap": capacity},
            "batch": {"size": BATCH},
            "planner": {"constants": "additive"},
        }
    )
    bound = _bound(tables, ranks)
    started = time.perf_counter()
    try:
        made = plan(job)
    except NoPlanError as error:
        seconds = time.perf_counter() - started
        return {"ms": None, "seconds": seconds, "bound_ms": bound, "refusal": str(error)}
    seconds = time.perf_counter() - started
    milliseconds, nbytes = _added_up(made, tables, ranks)
    if max(nbytes) > capacity:
        wrong.append(f"{spot}: a rank holds {max(nbytes)} of {capacity} bytes")
    if abs(max(milliseconds) - made.max_rank_seconds * 1e3) > 1e-9 * max(milliseconds):
        said = made.max_rank_seconds * 1e3
        wrong.append(f"{spot}: the plan says {said} ms, is {max(milliseconds)}")
    return {
        "ms": max(milliseconds),
        "seconds": seconds,
        "bound_ms": bound,
        "ratio": max(milliseconds) / bound,
        "gap": made.gap,
        "shards": sum(len(table.ranks) for table in made.tables),
        "tables": len(tables),
    }


def _added_up(
    made: Plan, tables: list[dict[str, Any]], ranks: int
) -> tuple[list[float], list[int]]:
    """ms and bytes of every rank; a table has to be there with all its columns."""
    milliseconds, nbytes = [0.0] * ranks, [0] * ranks
    for table, found in zip(tables, made.tables, strict=True):
        shards = sorted(shards_of(found), key=lambda shard: shard[1])
        ends = [column + columns for _, column, _, columns, _ in shards]
        starts = [column for _, column, *_ in shards]
        assert [0, *ends] == [*starts, table["dim"]], f"{table['name']}: columns {starts}"
        for _, _, rows, columns, rank in shards:
            assert rows == table["rows"], f"{table['name']}: {rows} rows"
            milliseconds[rank] += _cost(table, ranks) * columns / table["dim"]
            nbytes[rank] += rows * columns * ELEMENT_BYTES
    return milliseconds, nbytes


def _cost(table: dict[str, Any], ranks: int) -> float:
    """ms of a whole table."""
    row = table["dim"] * ELEMENT_BYTES
    lookups = 3 * BATCH * ranks * table["pooling"] * row / 900e9
    return 1000 * (lookups + 2 * BATCH * (ranks - 1) * row / 10e9)


def _bound(tables: list[dict[str, Any]], ranks: int) -> float:
    """ms of a rank if all were equally busy."""
    return sum(_cost(table, ranks) for table in tables) / ranks


def _summary(solved: list[dict[str, Any]]) -> dict[str, Any]:
    fitting = [task for task in solved if task["ms"] is not None]
    times = [task["seconds"] for task in fitting]
    refusals = [task["seconds"] for task in solved if task["ms"] is None]
    return {
        "tasks": len(solved),
        "feasible": len(fitting),
        "mean_ms": statistics.fmean(task["ms"] for task in fitting) if fitting else None,
        "mean_bound_ms": statistics.fmean(t["bound_ms"] for t in fitting) if fitting else None,
        "mean_ratio": statistics.fmean(t["ratio"] for t in fitting) if fitting else None,
        "worst_ratio": max((task["ratio"] for task in fitting), default=None),
        "median_seconds": statistics.median(times) if times else None,
        "worst_seconds": max(times, default=None),
        "worst_refusal_seconds": max(refusals, default=None),
    }


def _tell(task: str, way: str, solved: list[dict[str, Any]]) -> None:
    found = _summary(solved)
    ratio = "-"
    if found["feasible"]:
        ratio = f"{found['mean_ratio']:.5f} ({found['worst_ratio']:.5f})"
    seconds = sum(each["seconds"] for each in solved)
    print(
        f"{task:<38}  {way:<11}  {found['feasible']:>3} of {found['tasks']:<3}  {ratio:<17}"
        f"  {seconds:.2f}",
        flush=True,
    )
