"""``shardwright calibrate -o cluster.toml``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.core.cluster import write_calibration
from shardwright.core.errors import InputError, expected
from shardwright.core.outputs import CLUSTER, check_output


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
        "-n", "--ranks", type=int, default=2, metavar="N", help="ranks to measure with (2)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds, and figures that vary more"
    )
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Measure, write, show."""
    _check_output(options.output)
    from shardwright.lab.calibrate import calibrate

    attempt = calibrate(options.ranks, sys.stderr, quick=options.quick)
    if attempt.found is None:
        print(f"shardwright: {attempt.outcome.reason}", file=sys.stderr)
        if attempt.folder:
            print(f"details in {attempt.folder}", file=sys.stderr)
        return attempt.outcome.code
    changed = shared.beside(options.output)
    write_calibration(attempt.found, options.output)
    if options.json:
        shared.print_json(attempt.found)
    else:
        from shardwright.report.table import calibration_summary

        shared.show(calibration_summary(attempt.found))
    print(f"cluster written to {options.output}{changed}", file=sys.stderr)
    return 0


def _check_output(path: Path) -> None:
    """Before half a minute of work: the file can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            expected(str(path), "a file that can be written", f"'{error.strerror}'")
        ) from None
    check_output(path, CLUSTER)
