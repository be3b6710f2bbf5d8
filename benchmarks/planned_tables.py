"""The embedding problems that planners are compared on, planned and then run as planned.

    python benchmarks/planned_tables.py --output validation/cpu-2-cores/planned_tables.json

Rows are scaled down until all tables take 96 MiB together, of which a rank may keep three quarters;
bags have at most eight ids. Every problem is planned for ranks of one host and of two, run as one
module of tables on as many processes, and held against what whole tables would give: the rows of a
lookup, and all weights after an update. The plan's seconds, by constants that were not measured
here, stand beside the CPU time of a step, in which no rank waits for a core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from planner_problems import PROBLEMS, Problem
from side_by_side import joined
from torch import multiprocessing
from torch.nn.functional import embedding_bag

import shardwright as sw
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan
from shardwright.runtime.embeddings.initial import blocks_of_whole
from shardwright.runtime.embeddings.route import Table
from shardwright.runtime.embeddings.shard import make_tables
from shardwright.runtime.embeddings.update import EPSILON

MOST_TABLES = 1000
ALL_BYTES = 96 * 2**20
BATCH = 32  # samples per rank
LONGEST = 8  # ids in a bag
RATE, GRADIENT = 0.01, 1e-3
MACHINES = ((2, 2), (4, 2))  # ranks, and those of each host
STEPS = 5
Given = dict[str, tuple[torch.Tensor, torch.Tensor]]


def scaled_job(problem: Problem, ranks: int, local: int) -> Job:
    """The problem with fewer rows, on a CPU."""
    whole = sum(table["rows"] * table["dim"] * 4 for table in problem.tables)
    scale = min(1.0, ALL_BYTES / whole)
    tables = [
        {
            "name": table["name"],
            "rows": max(int(table["rows"] * scale), 2),
            "dim": table["dim"],
            "pooling_factors": [round(min(table["pooling"], LONGEST))],
            "optimizer": "rowwise_adagrad",
            "sharding_types": None if ranks == local else list(HOSTED),
        }
        for table in problem.tables
    ]
    cluster = {"world_size": ranks, "local_world_size": local, "ddr_cap": ALL_BYTES * 3 // 4}
    return parse_job({"tables": tables, "cluster": cluster, "batch": {"size": BATCH}})


HOSTED = ("data_parallel", "table_wise", "table_row_wise", "table_column_wise", "grid_shard")


def batch(made: Plan, rank: int) -> Given:
    """A rank's ids and offsets of every table."""
    generator = torch.Generator().manual_seed(rank)
    found = {}
    for table in made.job.tables:
        length = int(table.pooling_factors[0])
        ids = torch.randint(table.rows, (BATCH * length,), generator=generator)
        found[table.name] = ids, torch.arange(0, BATCH * length + 1, length)
    return found


def weights_of(made: Plan) -> dict[str, torch.Tensor]:
    """Whole tables, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    return {t.fqn: torch.randn(t.rows, t.dim, generator=generator) for t in made.tables}


def updated(weight: torch.Tensor, ids: torch.Tensor, ranks: int) -> torch.Tensor:
    """A whole table after the first step of row-wise Adagrad, all of whose gradients are alike."""
    gradient = torch.bincount(ids, minlength=len(weight)).double() * GRADIENT / ranks
    return weight - (RATE * gradient / (gradient.abs() + EPSILON)).float().unsqueeze(1)


def work(rank: int, made: Plan, store: str, results: Any) -> None:
    """One rank: how far lookups and weights are from whole tables, and the CPU time of a step."""
    ranks = made.world_size
    mesh = joined(rank, ranks, store)
    whole, given = weights_of(made), batch(made, rank)
    tables = [Table.of(table) for table in made.tables]
    module = make_tables(tables, made.expanded(), mesh, blocks_of_whole(whole), RATE)
    found = module(given)
    apart = 0.0
    for table in made.tables:
        ids, offsets = given[table.name]
        wanted = embedding_bag(ids, whole[table.fqn], offsets[:-1], mode="sum")
        apart = max(apart, (found[table.name] - wanted).abs().max().item())
    gradients = [torch.full_like(rows, GRADIENT) for rows in found.values()]
    torch.autograd.backward([*found.values()], gradients)
    kept = sw.full_state_dict(module)
    asked = [batch(made, other) for other in range(ranks)]
    for table in made.tables:
        ids = torch.cat([each[table.name][0] for each in asked])
        wanted = updated(whole[table.fqn], ids, ranks)
        apart = max(apart, (kept[table.fqn] - wanted).abs().max().item())
    spent = []
    for _ in range(STEPS):
        dist.barrier()
        cpu = time.process_time()
        torch.autograd.backward([*module(given).values()], gradients)
        spent.append(time.process_time() - cpu)
    results.put((apart, statistics.median(spent)))
    dist.barrier()
    dist.destroy_process_group()


def run(problem: Problem, ranks: int, local: int) -> dict[str, Any]:
    """A problem on some ranks: what was planned, and what came of it."""
    made = plan(scaled_job(problem, ranks, local))
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (made, str(Path(folder) / "store"), results)
        multiprocessing.spawn(work, arguments, nprocs=ranks)
    found = [results.get() for _ in range(ranks)]
    return {
        "problem": problem.name,
        "ranks": ranks,
        "hosts": ranks // local,
        "types": dict(Counter(f"{t.sharding_type} {t.compute_kernel}" for t in made.tables)),
        "largest_difference": max(apart for apart, _ in found),
        "planned_ms": round(made.max_rank_seconds * 1e3, 3),
        "step_cpu_ms": round(max(cpu for _, cpu in found) * 1e3, 3),
    }


def main() -> None:
    """Every problem of up to a thousand tables, one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = []
    for problem in PROBLEMS:
        for ranks, local in MACHINES if problem.count <= MOST_TABLES else ():
            lines.append(run(problem, ranks, local))
            print(json.dumps(lines[-1]), flush=True)
    if options.output:
        document = {"versions": {"torch": torch.__version__}, "runs": lines}
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
