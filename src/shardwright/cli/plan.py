"""``shardwright plan JOB.toml -o plan.json``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import UNSET

from shardwright.cli import options as shared
from shardwright.cli.planning import planned
from shardwright.core.cluster import TIERS
from shardwright.core.outputs import PLAN, beside, check_output
from shardwright.job.job import named_files
from shardwright.job.plan import Plan, write_plan
from shardwright.planner.statistics import memory_prices, statistics
from shardwright.planner.statistics.records import MemoryPrice, Statistics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``plan``."""
    shared.job_argument(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="plan.json", help="write the plan")
    parser.add_argument("--full", action="store_true", help="every table, column and rank")
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Plan, write, show."""
    job = shared.job_of(options)
    if options.output:
        check_output(options.output, PLAN, (options.job, *named_files(job, options.job)))
    if not job.model.traits.has_step and job.model.python is not UNSET:
        from shardwright.estimate.unplanned import with_traced_dense  # only such a job needs torch

        job = with_traced_dense(job)
    made = planned(job)
    if options.output:
        changed = beside(options.output)
        write_plan(made, options.output)
    found, prices = statistics(made), memory_prices(made)
    if options.json:
        shared.print_json(as_report(made, found, prices))
    else:
        from shardwright.report.plan_report import plan_report

        shared.show(plan_report(made, found, prices, full=options.full))
    if options.output:
        print(f"plan written to {options.output}{changed}", file=sys.stderr)
    return 0


def as_report(made: Plan, found: Statistics, prices: Sequence[MemoryPrice]) -> dict[str, object]:
    """The plan's figures by the names users script against."""
    return {
        "schema": made.schema,
        "fingerprint": made.fingerprint,
        "max_rank_seconds": made.max_rank_seconds,
        "lower_bound_seconds": made.lower_bound_seconds,
        "gap": made.gap,
        "capacity": dict(zip(TIERS, made.cluster.capacity, strict=True)),
        "reserved": made.reserved,
        "verdict": made.verdict,
        "needs_bytes": dict(zip(("least", "most"), made.needed, strict=True)),
        "ranks": [
            {
                "rank": r.rank,
                "seconds": r.seconds,
                "parts": r.parts,
                "hbm_bytes": r.hbm_bytes,
                "ddr_bytes": r.ddr_bytes,
                "ssd_bytes": r.ssd_bytes,
                "peak_bytes": r.peak_bytes,
                "peak_phase": r.peak_phase,
                "at_peak": r.at_peak,
                **r.exact,
            }
            for r in made.ranks
        ],
        "tables": [
            {
                "name": t.name,
                "sharding_type": t.sharding_type,
                "compute_kernel": t.compute_kernel,
                "cache_load_factor": t.cache_load_factor,
                "ranks": t.ranks,
                "shard_sizes": t.shard_sizes,
                "seconds": t.seconds,
                "bytes": t.nbytes,
            }
            for t in made.tables
        ],
        "units": made.units,
        "checkpointing": made.search.tried or (),
        "search": made.search.name,
        "proposals": made.search.proposals,
        "feasible": made.search.feasible,
        "options": made.search.options,
        "skipped": made.search.skipped,
        "wall_seconds": made.search.wall_seconds,
        "assumptions": made.assumptions,
        "statistics": found,
        "memory_prices": prices,
    }
