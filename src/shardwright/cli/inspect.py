"""``shardwright inspect JOB.toml``: how often ids of its log repeat."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.core.document import read_bytes, write_atomically
from shardwright.core.errors import InputError, expected
from shardwright.core.outputs import beside, same_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``inspect``."""
    parser.epilog = "Another file: --set data.path=FILE. What is printed are tables of a job."
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="JOB.toml",
        help="write the job with what was found in its tables; JOB.toml itself, or a new file",
    )
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
    new = options.output is None or not options.output.exists()
    if not new and not same_file(options.output, options.job):
        wanted = f"{options.job}, or a new file"
        raise InputError(expected("-o", wanted, f"{options.output}, which is there"))
    from shardwright.train.popularity import as_toml, left_out, popularity, put, put_into

    found = popularity(job, job.cluster.world_size or 1, options.rows)
    if options.output:
        text = read_bytes(options.job, "job").decode()
        made = put_into(text, job, found, str(options.job))
        changed = "" if options.output.exists() else beside(options.output)
        write_atomically(options.output, made.encode())
        written, kept = put(job, found)
        print(f"wrote {written} into {options.output}{changed}")
        for line in (*kept, *left_out(job, found, options.rows)):
            print(f"left out: {line}")
    elif options.json:
        shared.print_json(found)
    else:
        print("".join(as_toml(job, found, options.rows)), end="")
    return 0
