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

    python benchmarks/planner_random.py --gaps 150 --output FILE.json
    python benchmarks/planner_random.py --changes 40 --output FILE.json

plan so many ``varied`` problems, of our costs and of TorchRec's, from one rank to 64 and from a few
tables to thousands: how far plans are above their bounds; and, where the first call's problems are
of few tables, what becomes of a plan with each table left out, with more memory, and with a type
forced: it should not get slower, slower and faster.
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
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan
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


VARIED_DIMS = (7, 10, 16, 32, 33, 64, 96, 100, 128, 200, 256, 384, 768, 1000, 1024)
OPTIMIZERS = ("none", "sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")
SHAPES = {"few": 6, "huge": 2, "many": 1}  # of the sizes of tables, and how often
MORE_MEMORY = (1.05, 1.3, 2.0, 4.0)
SLOWER_CHANGES = (1.001, 1.005)  # counted


def varied(seed: int, shapes: tuple[str, ...] = tuple(SHAPES)) -> dict[str, Any]:
    """A problem as a job's document."""
    draw = random.Random(f"varied {seed}")
    ranks = draw.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
    hosts = draw.choice([hosts for hosts in (1, 2, 3, 4, 8) if ranks % hosts == 0])
    (shape,) = draw.choices(shapes, [SHAPES[shape] for shape in shapes])
    tables = [
        {
            "name": f"t{number}",
            "rows": rows,
            "dim": draw.choice(VARIED_DIMS),
            "pooling_factors": [round(10 ** draw.uniform(-0.3, 1.7), 2)],
            "optimizer": draw.choice(OPTIMIZERS),
            "pooled": draw.random() < 0.75,
            "dtype": draw.choice(("fp32", "fp32", "fp32", "fp16")),
        }
        for number, rows in enumerate(_rows(shape, draw))
    ]
    held = sum(8 * table["rows"] * table["dim"] for table in tables)
    scarce = draw.choice(((0.7, 1.3), (1.3, 8.0)))  # times what tables and states are, about
    constants = draw.choice(("cluster", "torchrec-1.9"))
    cluster = {
        "compute_device": "cuda",
        "world_size": ranks,
        "local_world_size": ranks // hosts,
        "hbm_cap": int(held / ranks * draw.uniform(*scarce)) + 4 * MIB,
        "ddr_cap": 2 * held // ranks + 64 * MIB,
        **({"preset": "h100-8"} if constants == "cluster" else {}),
    }
    return {
        "tables": tables,
        "cluster": cluster,
        "batch": {"size": draw.choice((7, 16, 64, 256, 1024, 4096))},
        "planner": {"constants": constants, "reservation": {"kind": "none"}},
    }


def _rows(shape: str, draw: random.Random) -> list[int]:
    """Rows of every table: of any size, few huge ones, or thousands of tiny ones."""
    huge = [10 ** draw.uniform(6, 8) for _ in range(draw.randint(0 if shape == "many" else 1, 4))]
    match shape:
        case "few":
            sizes = [10 ** draw.uniform(0.5, 6.5) for _ in range(draw.randint(3, 40))]
        case "huge":
            sizes = huge + [10 ** draw.uniform(0.5, 4) for _ in range(draw.randint(0, 12))]
        case _:
            tiny = draw.randint(1000, 3000)
            sizes = huge + [10 ** draw.uniform(0.5, 4) for _ in range(tiny)]
    return [int(size) + 1 for size in sizes]


def gaps(count: int) -> dict[str, Any]:
    """How far the plans of ``count`` varied problems are above their bounds."""
    found, spent, refused = [], [], 0
    for seed in range(count):
        job = parse_job(varied(seed))
        begun = time.process_time()
        made = planned(job)
        spent.append(time.process_time() - begun)
        refused += made is None
        if made is not None:
            found.append(made.gap)
    found.sort()
    return {
        "date": datetime.date.today().isoformat(),
        "problems": count,
        "planned": len(found),
        "gap": {f"percentile_{q}": found[q * (len(found) - 1) // 100] for q in (50, 75, 90, 95)},
        "worst": found[-5:],
        "median_cpu_seconds": statistics.median(spent),
        "cpu_seconds": sum(spent),
    }


def changes(count: int) -> dict[str, Any]:
    """What ``count`` varied problems of few tables take, as a share of the plan of each, where
    nothing should make them slower: a table less, and more memory; and where nothing should make
    them faster: one type forced for a table."""
    ratios: dict[str, list[float]] = {"a_table_less": [], "more_memory": [], "a_type_forced": []}
    for seed in range(count):
        problem = varied(seed, ("few", "huge"))
        made = planned(parse_job(problem))
        if made is None:
            continue
        draw = random.Random(seed)
        for kind, other in _changed(problem, draw):
            try:
                seconds = plan(parse_job(other)).max_rank_seconds
            except ShardwrightError:
                continue
            ratios[kind].append(seconds / made.max_rank_seconds)
    forced = ratios.pop("a_type_forced")
    counted = {
        kind: {
            "plans": len(own),
            "worst": max(own),
            **{f"above_{most:g}": sum(ratio > most for ratio in own) for most in SLOWER_CHANGES},
        }
        for kind, own in ratios.items()
    }
    faster = sum(ratio < 1 / SLOWER_CHANGES[0] for ratio in forced)
    counted["a_type_forced"] = {"plans": len(forced), "least": min(forced), "below_0.999": faster}
    return {"date": datetime.date.today().isoformat(), "problems": count, **counted}


def _changed(problem: dict[str, Any], draw: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    tables, cluster = problem["tables"], problem["cluster"]
    for table in tables:
        rest = [other for other in tables if other is not table]
        if rest:
            yield "a_table_less", problem | {"tables": rest}
    for factor in MORE_MEMORY:
        room = {"hbm_cap": int(cluster["hbm_cap"] * factor)}
        yield "more_memory", problem | {"cluster": cluster | room}
    for kind in FORCED["sharding_types"]:
        which = draw.choice(tables)
        forced = [t | {"sharding_types": [kind]} if t is which else t for t in tables]
        yield "a_type_forced", problem | {"tables": forced}


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
    parser.add_argument("--gaps", type=int, default=0, help="so many varied problems alone")
    parser.add_argument(
        "--changes", type=int, default=0, help="what changes so many of these alone"
    )
    options = parser.parse_args()
    alone: dict[str, dict[str, Any]] = {}
    if options.why_not:
        alone["why_not"] = why_not(options.why_not, options.kinds.split(","))
    if options.gaps:
        alone["gaps"] = gaps(options.gaps)
    if options.changes:
        alone["changes"] = changes(options.changes)
    if alone:
        print(json.dumps(alone))
        if options.output:
            write(options.output, alone)
        return 1 if any(found.get("failures") for found in alone.values()) else 0
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
