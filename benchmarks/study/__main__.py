"""Trains a job's kinds of embeddings one by one and compares their quality, parameters and latency:
``PYTHONPATH=benchmarks python -m study JOB.toml``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.cli.main import Parser, exit_code
from shardwright.core.document import write_atomically
from shardwright.core.outputs import REPORT, FileKind, check_output
from shardwright.job.job import named_files
from study.found import Study, write_study
from study.page import render_study
from study.runs import study, study_file
from study.sheets import study_summary

STUDY = FileKind("study", re.compile(rb'\{\s*"schema":\s*"shardwright\.study/'))
EPILOG = (
    "[study] of the job names kinds, seeds, and the rows of a table for which lookups are "
    "timed. Ctrl-C stops; the same command goes on with what is left."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is left, show, and write a page after every run; the code is the last run's."""
    return exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="study", description=(__doc__ or "").split(":")[0] + ".", epilog=EPILOG)
    shared.job_argument(parser)
    parser.add_argument("--out", metavar="DIR", help="the study's folder, instead of train.out")
    shared.json_option(parser)
    options = parser.parse_args(arguments)
    if options.out:
        options.set.append(f"train.out={options.out}")
    job = shared.job_of(options)
    folder, found = Path(job.train.out), []
    document, page = study_file(folder), folder / "study.html"
    inputs = (options.job, *named_files(job, options.job))
    for path, kind in ((document, STUDY), (page, REPORT)):
        check_output(path, kind, inputs, "--out")

    def done(so_far: Study) -> None:
        write_study(so_far, document)
        write_atomically(page, render_study(so_far).encode())
        found.append(so_far)

    outcome = study(job, folder, sys.stderr, done, options.job)
    if found and options.json:
        shared.print_json(found[-1])
    elif found:
        shared.show(study_summary(found[-1]))
    if outcome.code:
        print(f"study: {outcome.reason}", file=sys.stderr)
        print("the same command goes on with what is left", file=sys.stderr)
    if found:
        print(f"report: {page}", file=sys.stderr)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
