"""Our planner on random problems of eight kinds, beside TorchRec's and beside the optimum.

    python benchmarks/planner_random.py --torchrec-python OTHER/bin/python --output FILE.json

Costs are TorchRec's. Every problem is planned by our search, and by TorchRec's planner where that
interpreter is given: ours must not be slower by more than 1 %, nor refuse what TorchRec plans. The
small ones are planned exactly as well where HiGHS is installed: no bound may be above an optimum.
What breaks either rule is listed, and the call ends with 1.

    python benchmarks/planner_random.py --why-not 200 --output FILE.json

asks so many plans what another sharding type or kernel of one of their tables would do, and plans
anew with nothing else allowed for it: both must be the same, to the bit. Each call keeps what the
other has written.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import planner_bound
from planner import machine, versions

from shardwright.core.errors import NoPlanError, ShardwrightError
from shardwright.core.job import Job, parse_job
from shardwright.core.plan import Plan
from shardwright.lab.recordings import plan
from shardwright.planner import explain

HERE = Path(__file__).resolve().parent
MIB = 2**20
KINDS = ("mixed", "tight", "hosts", "columns", "weighted", "uvm", "cpu", "odd")
RANKS = {"hosts": (8, 16), "odd": (3, 5, 6, 7, 12), "cpu": (2, 3, 4, 8)}
DIMS = {"odd": (12, 20, 36, 52, 100, 132), "columns": (256, 512, 768, 1024)}
CUTS = (
    ["column_wise"],
    ["column_wise", "table_wise"],
    ["table_wise", "row_wise", "column_wise"],
)
FORCED = {
    "sharding_types": ("table_wise", "row_wise", "column_wise", "data_parallel"),
    "compute_kernels": ("fused", "fused_uvm", "fused_uvm_caching", "dense"),
}
SMALL = 5  # tables at most of a problem that is planned exactly, on the fewest ranks of its kind
SMALL_EVERY = 4  # problems of a kind, one is small
SLOWER = 1.01  # than TorchRec's is a defect
ROUNDING = 1e-6  # of the solver, relative
EXACT_SECONDS = 10.0


def drawn(kind: str, seed: int) -> dict[str, Any]:
    """A problem of a kind: its tables and the machine, in bytes, that they share."""
    draw = random.Random(f"{kind} {seed}")
    small = seed % SMALL_EVERY == 0
    choices = RANKS.get(kind, (2, 4, 8, 16))
    ranks = draw.choice(choices[:2] if small else choices)
    count = draw.randint(2, SMALL) if small else draw.randint(3, 30)
    tables = [_table(kind, number, draw) for number in range(count)]
    each = [table["rows"] * (4 * table["dim"] + 4) for table in tables]
    scarce = {"tight": (1.15, 1.6), "uvm": (0.3, 1.0)}.get(kind, (1.5, 8.0))
    memory = int(sum(each) / ranks * draw.uniform(*scarce)) + 4 * MIB
    return {
        "name": f"{kind} {seed}",
        "kind": kind,
        "small": small,
        "tables": tables,
        "device": "cpu" if kind == "cpu" else "cuda",
        "ranks": ranks,
        "host": draw.choice((2, 4)) if kind == "hosts" else ranks,
        "hbm": 0 if kind == "cpu" else memory,
        "ddr": memory if kind == "cpu" else 2 * sum(each) // ranks + 64 * MIB,
        "batch": draw.choice((64, 512, 2048)),
        "reserved": 0.0,
        "seconds": 60.0,
    }


def _table(kind: str, number: int, draw: random.Random) -> dict[str, Any]:
    table: dict[str, Any] = {
        "name": f"t{number}",
        "rows": int(10 ** draw.uniform(2, 6.5)),
        "dim": draw.choice(DIMS.get(kind, (16, 32, 64, 128, 256))),
        "pooling": round(10 ** draw.uniform(0, 1.7), 1),
        "weighted": kind == "weighted" and draw.random() < 0.6,
    }
    if kind == "columns":
        table["types"] = draw.choice(CUTS)
    elif kind == "tight" and draw.random() < 0.3:
        table["types"] = ["table_wise"]
    if kind not in ("uvm", "cpu"):
        table["kernels"] = ["dense", "fused"]
    return table


def job_of(problem: dict[str, Any], **planner: Any) -> Job:
    """The problem as a job of ours."""
    tables = [
        {
            "name": table["name"],
            "rows": table["rows"],
            "dim": table["dim"],
            "pooling_factors": [table["pooling"]],
            "module_weighted": table["weighted"],
            "optimizer": "rowwise_adagrad",
            **({"sharding_types": table["types"]} if "types" in table else {}),
            **({"compute_kernels": table["kernels"]} if "kernels" in table else {}),
        }
        for table in problem["tables"]
    ]
    cluster = {
        "compute_device": problem["device"],
        "world_size": problem["ranks"],
        "local_world_size": problem["host"],
        "ddr_cap": problem["ddr"],
        **({"hbm_cap": problem["hbm"]} if problem["hbm"] else {}),
    }
    section = {"constants": "torchrec-1.9", "reservation": {"kind": "none"}, **planner}
    batch = {"size": problem["batch"]}
    return parse_job({"tables": tables, "cluster": cluster, "batch": batch, "planner": section})


def planned(job: Job) -> Plan | None:
    """The plan, None where there is none."""
    try:
        return plan(job)
    except NoPlanError:
        return None


def measured(problem: dict[str, Any]) -> dict[str, Any]:
    """Our plan in ms with its bound, the processor's seconds it took, and the optimum of a small
    problem: the best known and what is proven."""
    begun = time.process_time()
    made = planned(job_of(problem))
    found: dict[str, Any] = {"name": problem["name"], "cpu_seconds": time.process_time() - begun}
    if made is not None:
        found["ms"], found["bound_ms"] = made.max_rank_seconds * 1e3, made.lower_bound_seconds * 1e3
    if problem["small"] and planner_bound.installed():
        best = planned(job_of(problem, search="exact", time_limit=EXACT_SECONDS))
        if best is not None:
            found["exact_ms"] = best.max_rank_seconds * 1e3
            found["exact_bound_ms"] = best.lower_bound_seconds * 1e3
    return found


def of_torchrec(problems: list[dict[str, Any]], interpreter: str) -> Iterator[dict[str, Any]]:
    """What TorchRec's planner makes of every problem, in one process."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "problems.json"
        path.write_text(json.dumps(problems))
        command = [interpreter, str(HERE / "planner_torchrec.py"), "many", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def wrong_with(found: dict[str, Any]) -> Iterator[str]:
    """Which rules a result breaks."""
    ours, theirs, exact = (found.get(key) for key in ("ms", "torchrec_ms", "exact_ms"))
    if ours is None and theirs is not None:
        yield f"refused, TorchRec plans it in {theirs} ms"
    if ours is None and exact is not None:
        yield f"refused, the exact search plans it in {exact} ms"
    if ours and theirs and ours > theirs * SLOWER:
        yield f"{ours} ms, TorchRec {theirs} ms"
    if ours and exact and found["bound_ms"] > exact * (1 + ROUNDING):
        yield f"bound {found['bound_ms']} ms, above a plan of {exact} ms"


def asked(made: Plan, draw: random.Random) -> dict[str, Any] | None:
    """What ``--why-not`` says of one table of a plan, in seconds of the plan with the rest made
    anew, and what planning with nothing else allowed finds; None where it plans nothing."""
    table = draw.choice(made.tables)
    ways = [(field, value) for field, values in FORCED.items() for value in values]
    for field, wanted in draw.sample(ways, len(ways)):
        found = explain.why_not(made, table.name, wanted)
        if found.replanned is None:
            continue
        tables = tuple(
            msgspec.structs.replace(each, **{field: (wanted,)}) if each.name == table.name else each
            for each in made.job.tables
        )
        try:
            alone = plan(msgspec.structs.replace(made.job, tables=tables)).max_rank_seconds
        except ShardwrightError:
            alone = None
        return {"verdict": found.verdict, "said": found.replanned.seconds, "planned": alone}
    return None


def why_not(count: int, kinds: list[str]) -> dict[str, Any]:
    """``asked`` of ``count`` plans, as many of each kind."""
    answers, wrong = [], []
    each = dict.fromkeys(kinds, 0)
    for seed in itertools.count():
        for kind in (kind for kind in kinds if each[kind] * len(kinds) < count):
            made = planned(job_of(drawn(kind, seed)))
            found = asked(made, random.Random(f"{kind} {seed}")) if made else None
            if found is None:
                continue
            each[kind] += 1
            answers.append(found)
            if found["said"] != found["planned"]:
                wrong.append(f"{kind} {seed}: {found['said']} s said, {found['planned']} s planned")
        if len(answers) >= count:
            break
    kept = [found for found in answers if found["planned"] is not None]
    return {
        "date": datetime.date.today().isoformat(),
        "asked": len(answers),
        "equal": len(answers) - len(wrong),
        "with_a_plan": len(kept),
        "said_not_to_fit_in_place_but_planned": sum(f["verdict"] == "does not fit" for f in kept),
        "failures": wrong,
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and ratios of one kind, or of all."""
    both = [r["ms"] / r["torchrec_ms"] for r in results if "ms" in r and "torchrec_ms" in r]
    exact = [r["ms"] / r["exact_ms"] for r in results if "ms" in r and "exact_ms" in r]
    gaps = [r["ms"] / r["bound_ms"] for r in results if r.get("bound_ms")]
    return {
        "problems": len(results),
        "planned": sum("ms" in r for r in results),
        "planned_by_torchrec": sum("torchrec_ms" in r for r in results),
        "cpu_seconds": sum(r["cpu_seconds"] for r in results),
        "torchrec_cpu_seconds": sum(r.get("torchrec_cpu_seconds", 0.0) for r in results),
        "over_torchrec": _ratios(both),
        "over_exact": _ratios(exact),
        "over_bound": _ratios(gaps),
    }


def _ratios(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    above = sum(value > SLOWER for value in values)
    return {
        "count": len(values),
        "mean": statistics.fmean(values),
        "worst": max(values),
        "above_1_percent": above,
    }


def write(path: Path, found: dict[str, Any]) -> None:
    """Bring these keys of a file up to date."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | found, indent=2) + "\n")


def main() -> int:
    """Plan all problems; 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torchrec-python", help="an interpreter that has torch and torchrec")
    parser.add_argument("--each", type=int, default=52, help="problems of every kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of the kinds")
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--why-not", type=int, default=0, help="so many answers alone")
    options = parser.parse_args()
    if options.why_not:
        found = why_not(options.why_not, options.kinds.split(","))
        print(json.dumps(found))
        if options.output:
            write(options.output, {"why_not": found})
        return 1 if found["failures"] else 0
    where, wrong, kinds, everything = machine(), [], {}, []
    for kind in options.kinds.split(","):
        problems = [drawn(kind, seed) for seed in range(options.each)]
        results = [measured(problem) for problem in problems]
        if options.torchrec_python:
            peers = of_torchrec(problems, options.torchrec_python)
            results = [own | its for own, its in zip(results, peers, strict=True)]
        wrong += [f"{r['name']}: {text}" for r in results for text in wrong_with(r)]
        kinds[kind] = summary(results)
        everything += results
        print(kind, json.dumps(kinds[kind]), flush=True)
    document = {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "machine": where,
        "all": summary(everything),
        "kinds": kinds,
        "failures": wrong,
    }
    if options.output:
        write(options.output, document)
    print("all", json.dumps(document["all"]), *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
