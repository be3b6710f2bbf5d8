"""``shardwright export JOB.toml --to ENGINE``: a job's layout in the words of an engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.cli.planning import SearchListener
from shardwright.core.document import write_atomically
from shardwright.core.errors import EXIT_NO_PLAN, EXIT_OK, InputError, expected
from shardwright.core.outputs import beside
from shardwright.job.exported import ENGINES, exported
from shardwright.job.job import Job
from shardwright.planner.profiles import with_hosts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``export``."""
    shared.job_argument(parser)
    parser.add_argument(
        "--to",
        required=True,
        choices=ENGINES,
        metavar="ENGINE",
        help="; ".join(f"{name}: {each.title}, {each.version}" for name, each in ENGINES.items()),
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="a new file; by default it is printed"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also say whether it fits, as memory does: exit code 3 where it does not",
    )


def execute(options: argparse.Namespace) -> int:
    """Print or write the layout."""
    job = shared.job_of(options, options.to)
    text = exported(with_hosts(job), options.to)
    if options.out is None:
        print(text, end="")
    elif options.out.exists():
        named = str(options.out)
        raise InputError(expected(named, "no file yet", "one", "Name another, or move it away."))
    else:
        changed = beside(options.out)
        write_atomically(options.out, text.encode())
        print(f"wrote {options.out}{changed}")
    return _checked(job) if options.check else EXIT_OK


def _checked(job: Job) -> int:
    """Say whether a layout fits; 3 where it does not."""
    from shardwright.estimate.footprint import footprint
    from shardwright.report.wording import verdict_sentence

    with SearchListener(sys.stderr) as listener:
        found = footprint(job, ways=False, hear=listener)
    print(verdict_sentence(found), file=sys.stderr)
    return EXIT_NO_PLAN if found.verdict == "does not fit" else EXIT_OK
