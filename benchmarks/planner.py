"""Our planner and TorchRec's side by side on problems of 26 to 5000 tables.

    python benchmarks/planner.py --torchrec-python OTHER/bin/python --output FILE.json
    python benchmarks/planner.py --tasks FOLDER --output FILE.json
    python benchmarks/planner.py --large --output FILE.json

The first call prints a table and keeps every figure. Each measurement is a process of its own,
ours and TorchRec's in turn; seconds are medians of the CPU's and leave out starting Python and
importing, which is given apart. Ours goes from the job file to the plan on disk, TorchRec's is its
``plan`` alone. Every plan of ours is added up again by planner_check.py, and priced by TorchRec's
own estimators where that interpreter is given. The second call runs the public sharding tasks, see
planner_tasks.py, the third ours alone on up to 30,000 tables and 16,384 ranks, see
planner_large.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import planner_bound
import planner_check
import planner_large
import planner_problems
import planner_tasks
from planner_problems import PROBLEMS, Problem

import shardwright
from shardwright.job.job import read_job
from shardwright.job.plan import read_plan

HERE = Path(__file__).resolve().parent
OPTIONS = ("torchrec", "wide")
OURS_SECONDS = 600  # until a process of ours is given up
PEER_SECONDS = 1800
PEER_OFTEN = 100  # tables; TorchRec plans more of them only once


def run(command: list[str], seconds: float) -> dict[str, Any]:
    """What a process of its own prints, with the seconds until it had imported everything."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["start_seconds"] = found.pop("ready") - started
    return found


def median(runs: list[dict[str, Any]], key: str) -> float:
    """The median of one figure."""
    return statistics.median(run[key] for run in runs)


def measure(problem: Problem, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both planners on one problem, in turn."""
    jobs = {kind: planner_problems.write_job(problem, kind, folder) for kind in OPTIONS}
    peer = planner_problems.write_peer_problem(problem, options.timeout_seconds, folder)
    asked = bool(options.torchrec_python) and problem.peer
    ours: dict[str, list[dict[str, Any]]] = {kind: [] for kind in OPTIONS}
    theirs: list[dict[str, Any]] = []
    for turn in range(options.repeat):
        if asked and (not turn or problem.count <= PEER_OFTEN):
            script = str(HERE / "planner_torchrec.py")
            theirs.append(run([options.torchrec_python, script, "plan", str(peer)], PEER_SECONDS))
        for kind, job in jobs.items():
            script, plan = str(HERE / "planner_once.py"), str(folder / f"{kind}.plan.json")
            ours[kind].append(run([sys.executable, script, str(job), plan], OURS_SECONDS))
    found: dict[str, Any] = {"tables": problem.count, "ranks": problem.ranks}
    if theirs:
        found["torchrec"] = peer_figures(theirs)
    for kind in OPTIONS:
        rated = run_rating(problem, kind, peer, options, folder) if asked else None
        found[f"ours_{kind}"] = our_figures(problem, kind, ours[kind], rated, folder)
        if planner_bound.installed():
            job = read_job(folder / f"{problem.name}.{kind}.toml")
            found[f"ours_{kind}"] |= bound_figures(job, found[f"ours_{kind}"], options)
    if theirs:
        peer_found, our_found = found["torchrec"], found["ours_torchrec"]
        found["torchrec_by_ours"] = {
            "max_rank_ms": peer_found["max_rank_ms"] / our_found["max_rank_ms"],
            "cpu_seconds": peer_found["cpu_seconds"] / our_found["cpu_seconds"],
        }
    found["wide_never_worse"] = (
        found["ours_wide"]["max_rank_ms"] <= found["ours_torchrec"]["max_rank_ms"]
    )
    return found


def peer_figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """TorchRec's medians and its plan."""
    kept = ("max_rank_ms", "mean_rank_ms", "max_hbm_bytes", "proposals", "feasible", "types")
    return {
        "seconds": median(runs, "seconds"),
        "cpu_seconds": median(runs, "cpu_seconds"),
        "start_seconds": median(runs, "start_seconds"),
        "peak_rss_bytes": int(median(runs, "peak_rss_bytes")),
        "runs": len(runs),
        **{key: runs[0][key] for key in kept},
        "versions": runs[0]["versions"],
    }


def our_figures(
    problem: Problem,
    kind: str,
    runs: list[dict[str, Any]],
    rated: dict[str, Any] | None,
    folder: Path,
) -> dict[str, Any]:
    """Our medians, our plan, and what the checks say about it."""
    plan = read_plan(folder / f"{kind}.plan.json")
    types: dict[str, int] = {}
    for table in plan.tables:
        types[table.sharding_type] = types.get(table.sharding_type, 0) + 1
    parts = ("start_seconds", "read_seconds", "plan_seconds", "write_seconds")
    times = ("seconds", "cpu_seconds", *parts)
    found = {
        **{key: median(runs, key) for key in times},
        "peak_rss_bytes": int(median(runs, "peak_rss_bytes")),
        "runs": len(runs),
        "max_rank_ms": plan.max_rank_seconds * 1e3,
        "mean_rank_ms": statistics.fmean(rank.seconds for rank in plan.ranks) * 1e3,
        "bound_ms": plan.lower_bound_seconds * 1e3,
        "gap": plan.gap,
        "options": plan.search.options,
        "shards": sum(len(table.ranks) for table in plan.tables),
        "types": types,
        "plan_file_bytes": (folder / f"{kind}.plan.json").stat().st_size,
        "fingerprint": plan.fingerprint,
        "check": planner_check.check(plan, problem.tables, problem.ranks),
    }
    if rated is not None:
        found["torchrec_max_rank_ms"] = rated["max_rank_ms"]
        found["torchrec_max_hbm_bytes"] = rated["max_hbm_bytes"]
    return found


def run_rating(
    problem: Problem, kind: str, peer: Path, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Our plan at TorchRec's prices."""
    shards = folder / f"{problem.name}.{kind}.shards.json"
    shards.write_text(json.dumps(planner_check.placed(read_plan(folder / f"{kind}.plan.json"))))
    script = str(HERE / "planner_torchrec.py")
    return run([options.torchrec_python, script, "rate", str(peer), str(shards)], PEER_SECONDS)


def bound_figures(job: Any, ours: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The bound of the relaxed program and our plan beside it."""
    found = planner_bound.bound(job, options.bound_seconds)
    return {"relaxed": found, "ratio_to_relaxed": ours["max_rank_ms"] / found["ms"]}


def failures(name: str, found: dict[str, Any]) -> list[str]:
    """What must not be: a broken plan, none or another price of TorchRec's where it was asked, a
    worse plan of more options."""
    wrong = []
    for kind in OPTIONS:
        ours = found[f"ours_{kind}"]
        wrong += [f"{name} {kind}: {text}" for text in ours["check"]["wrong"]]
        rated = ours.get("torchrec_max_rank_ms")
        if rated is None:
            wrong += [f"{name} {kind}: TorchRec did not price it"] if "torchrec" in found else []
        elif abs(rated - ours["max_rank_ms"]) > 1e-9 * rated:
            wrong.append(f"{name} {kind}: TorchRec prices it {rated} ms, not {ours['max_rank_ms']}")
    if not found["wide_never_worse"]:
        wrong.append(f"{name}: options wide are worse than options torchrec")
    return wrong


def unrated(figures: dict[str, Any]) -> list[str]:
    """The problems whose plans have no price of TorchRec's beside ours."""
    rated = [
        name
        for name, found in figures.items()
        if all("torchrec_max_rank_ms" in found[f"ours_{kind}"] for kind in OPTIONS)
    ]
    return [name for name in figures if name not in rated]


def line(name: str, found: dict[str, Any], kind: str) -> str:
    """One row of the table."""
    ours, theirs = found[f"ours_{kind}"], found.get("torchrec")
    ratio = ours.get("ratio_to_relaxed")
    cells = [
        f"{name:>9} {kind:<8}",
        f"{theirs['cpu_seconds']:11.2f} {theirs['max_rank_ms']:11.5f}"
        if theirs
        else f"{'-':>11} {'-':>11}",
        f"{ours['cpu_seconds']:8.3f} {ours['start_seconds']:6.2f} {ours['max_rank_ms']:11.5f}",
        f"{ours['bound_ms']:11.5f} {ours['gap']:8.3%}",
        f"{ratio:8.5f}" if ratio else f"{'-':>8}",
        f"{ours['peak_rss_bytes'] / 2**20:7.0f}",
        f"{theirs['max_rank_ms'] / ours['max_rank_ms']:6.3f}" if theirs else f"{'-':>6}",
        "ok" if not ours["check"]["wrong"] else "WRONG",
    ]
    return "  ".join(cells)


HEADER = (
    "  problem options    TorchRec s  max-rank ms    ours s  start  max-rank ms     bound ms"
    "       gap  /relaxed  RSS MiB  better  plan"
)


def machine() -> dict[str, str]:
    """Where this ran."""
    return {
        "cores": str(os.cpu_count()),
        "processor": platform.machine(),
        "system": platform.system(),
        "load_average": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """What this ran with."""
    found = {"python": platform.python_version(), "shardwright": shardwright.__version__}
    for name in ("numpy", "highspy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def compare(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """All problems that are asked for."""
    wanted = options.problems.split(",") if options.problems else [p.name for p in PROBLEMS]
    known = {problem.name: problem for problem in PROBLEMS}
    figures, wrong = {}, []
    print(HEADER)
    with tempfile.TemporaryDirectory() as scratch:
        for name in wanted:
            found = measure(known[name], options, Path(scratch))
            figures[name] = found
            wrong += failures(name, found)
            for kind in OPTIONS:
                print(line(name, found, kind), flush=True)
    kept = {
        "timeout_seconds": options.timeout_seconds,
        "problems": figures,
        "unrated_by_torchrec": unrated(figures),
    }
    return kept, wrong


def main() -> int:
    """Run what is asked for; 1 if a plan is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torchrec-python", help="an interpreter that has torch and torchrec")
    parser.add_argument("--timeout-seconds", type=float, default=60, help="of TorchRec's search")
    parser.add_argument("--bound-seconds", type=float, default=60, help="of the relaxed program")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--problems", help="some of them, such as 26x8,100x16")
    parser.add_argument(
        "--tasks",
        nargs="?",
        const="",
        help=f"a task file or a folder of them, else that of {planner_tasks.VARIABLE}",
    )
    parser.add_argument("--large", action="store_true", help="up to 30,000 tables, 16,384 ranks")
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args()
    where = machine()
    if options.large:
        figures, wrong = planner_large.run(lambda command: run(command, OURS_SECONDS))
    elif options.tasks is not None:
        figures, wrong = planner_tasks.run(options.tasks)
    else:
        figures, wrong = compare(options)
    document = {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "machine": where,
        **figures,
        "failures": wrong,
    }
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    for text in wrong:
        print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
