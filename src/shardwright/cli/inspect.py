"""``shardwright inspect JOB.toml``: how often ids of its log repeat."""

from __future__ import annotations

import argparse

from shardwright.cli import options as shared
from shardwright.core.errors import InputError, expected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``inspect``."""
    parser.epilog = "Another file: --set data.path=FILE. What is printed are tables of a job."
    shared.job_argument(parser)
    parser.add_argument("--rows", type=int, metavar="N", help="only the first rows of the log")
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Read the log once."""
    job = shared.job_of(options)
    if not job.model.traits.reads_clicks:
        remedy = "Inspect a job that trains a DLRM on a click log."
        raise InputError(expected("model.kind", "'dlrm'", f"'{job.model.kind}'", remedy))
    if options.rows is not None and options.rows < 1:
        raise InputError(expected("--rows", "at least 1", str(options.rows)))
    from shardwright.train.popularity import as_toml, popularity

    found = popularity(job, job.cluster.world_size or 1, options.rows)
    if options.json:
        shared.print_json(found)
    else:
        print("".join(as_toml(job, found)), end="")
    return 0
