"""``shardwright calibrate [JOB.toml] -o cluster.toml``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.core.cluster import write_calibration
from shardwright.core.errors import InputError, expected
from shardwright.core.outputs import CLUSTER, beside, check_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``calibrate``."""
    parser.epilog = 'A job names the file: [cluster] file = "cluster.toml".'
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="cluster.toml",
        help="write the constants",
    )
    parser.add_argument(
        "job",
        type=Path,
        nargs="?",
        metavar="JOB.toml",
        help="measure for this job, which is run at half of its batch and at all of it",
    )
    shared.set_option(parser)
    parser.add_argument(
        "-n", "--ranks", type=int, metavar="N", help="ranks to measure with (2, or the job's)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds, and figures that vary more"
    )
    parser.add_argument("--full", action="store_true", help="every constant and its source")
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Measure, write, show."""
    check_output(options.output, CLUSTER)  # before half a minute of work
    if options.set and options.job is None:
        raise InputError(expected("--set", "a job to override", "none"))
    from shardwright.train.calibrate import calibrate

    if options.job is None:
        ranks = 2 if options.ranks is None else options.ranks
        outcome, found, folder = calibrate(ranks, sys.stderr, quick=options.quick)
    else:
        from shardwright.train.calibrate.probes import calibrate_for

        options.on = ""
        job = shared.job_of(options)
        outcome, found, folder = calibrate_for(job, sys.stderr, quick=options.quick)
    if found is None:
        print(f"shardwright: {outcome.reason}", file=sys.stderr)
        if folder:
            print(f"details in {folder}", file=sys.stderr)
        return outcome.code
    changed = beside(options.output)
    write_calibration(found, options.output)
    if options.json:
        shared.print_json(found)
    else:
        from shardwright.report.table import calibration_summary

        shared.show(calibration_summary(found, full=options.full))
    print(f"cluster written to {options.output}{changed}", file=sys.stderr)
    shared.warn_of_busy(found, str(options.output))
    return 0
