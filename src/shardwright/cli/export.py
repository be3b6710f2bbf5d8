"""``shardwright export JOB.toml --to ENGINE``: a job's layout in the words of an engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.core.document import write_atomically
from shardwright.core.errors import EXIT_OK, InputError, expected
from shardwright.job.exported import ENGINES, exported
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


def execute(options: argparse.Namespace) -> int:
    """Print or write the layout."""
    job = shared.job_of(options)
    text = exported(with_hosts(job), options.to)
    if options.out is None:
        print(text, end="")
        return EXIT_OK
    if options.out.exists():
        named = str(options.out)
        raise InputError(expected(named, "no file yet", "one", "Name another, or move it away."))
    write_atomically(options.out, text.encode())
    print(f"wrote {options.out}")
    return EXIT_OK
