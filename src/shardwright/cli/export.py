"""``shardwright export JOB.toml --to ENGINE``: a job's layout in the words of an engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from shardwright.cli import options as shared
from shardwright.core.document import write_atomically
from shardwright.core.errors import EXIT_OK, InputError, expected
from shardwright.core.outputs import beside
from shardwright.job.exported import ENGINES, exported
from shardwright.planner.profiles import cluster_of


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
    # Here and not where it is exported: what a preset has stands on a floor above.
    cluster, _ = cluster_of(job)
    section = msgspec.structs.replace(job.cluster, world_size=cluster.world_size)
    text = exported(msgspec.structs.replace(job, cluster=section), options.to)
    if options.out is None:
        print(text, end="")
        return EXIT_OK
    if options.out.exists():
        named = str(options.out)
        raise InputError(expected(named, "no file yet", "one", "Name another, or move it away."))
    changed = beside(options.out)
    write_atomically(options.out, text.encode())
    print(f"wrote {options.out}{changed}")
    return EXIT_OK
