"""``shardwright compare RUN_DIR``."""

from __future__ import annotations

import argparse

from shardwright.cli import options as shared
from shardwright.core.errors import EXIT_MISMATCH, EXIT_OK, InputError, expected
from shardwright.core.measurement import read_measurement
from shardwright.job.plan import read_plan
from shardwright.launcher.folder import measurement_file, plan_file
from shardwright.train.compare import compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``compare``."""
    shared.run_argument(parser)
    parser.add_argument(
        "--tolerance", type=float, default=0.1, metavar="T", help="allowed error of peaks (0.1)"
    )
    parser.add_argument("--full", action="store_true", help="every exact byte, more ranks")
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Show the comparison; 4 if exact bytes differ or a peak is outside the tolerance."""
    if not 0 <= options.tolerance < 10:
        raise InputError(expected("--tolerance", "a share from 0 to 10", str(options.tolerance)))
    folder = shared.run_folder(options)
    plan = read_plan(plan_file(folder))
    shared.warn_of_busy(plan.job.cluster.measured, plan.job.cluster.file)
    found = compare(plan, read_measurement(measurement_file(folder)), options.tolerance)
    if options.json:
        shared.print_json(found)
    else:
        from shardwright.report.table import comparison_summary

        shared.show(comparison_summary(found, plan, full=options.full))
    return EXIT_MISMATCH if found.failures else EXIT_OK
