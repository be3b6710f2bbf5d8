"""``shardwright fit JOB.toml``: the largest batch and sequence that fit, and the fewest ranks."""

from __future__ import annotations

import argparse

from shardwright.cli import options as shared
from shardwright.cli.planning import EstimateProgress
from shardwright.core.errors import EXIT_NO_PLAN, EXIT_OK
from shardwright.core.footprint import Fit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fit``."""
    parser.epilog = (
        "A capacity is needed: cluster.preset, or cluster.hbm_cap. Exit code 3: nothing fits, not "
        "even perhaps, under no checkpointing policy."
    )
    shared.job_argument(parser)
    shared.json_option(parser)
    parser.add_argument("--full", action="store_true", help="everything that was tried")


def execute(options: argparse.Namespace) -> int:
    """Search and show; 3 where no policy lets a single batch fit."""
    job = shared.job_of(options)
    from shardwright.estimate.fit import fit

    progress = EstimateProgress()
    try:
        found = fit(job, progress=progress, hear=progress.hear, known=progress.known)
    finally:
        progress.end()
    if options.json:
        shared.print_json(found)
    else:
        from shardwright.report.fit_report import fit_report

        shared.show(fit_report(found, full=options.full))
    return EXIT_OK if anything_fits(found) else EXIT_NO_PLAN


def anything_fits(found: Fit) -> bool:
    """Whether some policy lets some batch fit, if only perhaps, as `plan` and `memory` say it."""
    rows = (row.largest_batch for row in found.policies)
    return any(largest.size or largest.next_perhaps for largest in rows)
