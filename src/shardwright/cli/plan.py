"""``shardwright plan JOB.toml -o plan.json``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.core.plan import Plan, write_plan
from shardwright.planner import plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``plan``."""
    shared.job_argument(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="plan.json", help="write the plan")
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Plan, write, show."""
    made = plan(shared.job_of(options))
    if options.output:
        write_plan(made, options.output)
    if options.json:
        shared.print_json(as_report(made))
    else:
        from shardwright.report.table import plan_summary

        shared.show(plan_summary(made))
    if options.output:
        print(f"plan written to {options.output}", file=sys.stderr)
    return 0


def as_report(made: Plan) -> dict[str, object]:
    """The plan's figures by the names users script against."""
    return {
        "schema": made.schema,
        "fingerprint": made.fingerprint,
        "max_rank_seconds": made.max_rank_seconds,
        "lower_bound_seconds": made.lower_bound_seconds,
        "gap": made.gap,
        "ranks": [
            {
                "rank": r.rank,
                "seconds": r.seconds,
                "hbm_bytes": r.hbm_bytes,
                "ddr_bytes": r.ddr_bytes,
                "peak_bytes": r.peak_bytes,
                "peak_phase": r.peak_phase,
                **r.exact,
            }
            for r in made.ranks
        ],
        "tables": [
            {
                "name": t.name,
                "sharding_type": t.sharding_type,
                "compute_kernel": t.compute_kernel,
                "ranks": t.ranks,
                "shard_sizes": t.shard_sizes,
                "seconds": t.seconds,
                "bytes": t.nbytes,
            }
            for t in made.tables
        ],
        "units": made.units,
        "proposals": made.search.proposals,
        "wall_seconds": made.search.wall_seconds,
        "assumptions": made.assumptions,
    }
