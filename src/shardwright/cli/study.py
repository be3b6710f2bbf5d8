"""``shardwright study embeddings JOB.toml``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.core.document import REPORT, STUDY, check_output, write_atomically
from shardwright.core.study import Study, write_study
from shardwright.job.job import named_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``study``."""
    parser.epilog = (
        "[study] of the job names kinds, seeds, and the rows of a table for which lookups are "
        "timed. Ctrl-C stops; the same command goes on with what is left."
    )
    parser.add_argument("what", choices=["embeddings"], help="what is compared")
    shared.job_argument(parser)
    parser.add_argument("--out", metavar="DIR", help="the study's folder, instead of train.out")
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Train what is left, show, and write a page after every run; the code is the last run's."""
    if options.out:
        options.set.append(f"train.out={options.out}")
    job = shared.job_of(options)
    folder, found = Path(job.train.out), []
    from shardwright.train.study import study, study_file

    document, page = study_file(folder), folder / "study.html"
    inputs = (options.job, *named_files(job, options.job))
    for path, kind in ((document, STUDY), (page, REPORT)):
        check_output(path, kind, inputs, "--out")

    def done(so_far: Study) -> None:
        from shardwright.report.study_page import render_study

        write_study(so_far, document)
        write_atomically(page, render_study(so_far).encode())
        found.append(so_far)

    outcome = study(job, folder, sys.stderr, done, options.job)
    if found and options.json:
        shared.print_json(found[-1])
    elif found:
        from shardwright.report.study_sheets import study_summary

        shared.show(study_summary(found[-1]))
    if outcome.code:
        print(f"shardwright: {outcome.reason}", file=sys.stderr)
        print("the same command goes on with what is left", file=sys.stderr)
    if found:
        print(f"report: {page}", file=sys.stderr)
    return outcome.code
