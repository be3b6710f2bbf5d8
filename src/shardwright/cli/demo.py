"""``shardwright demo``: the whole path on this machine."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import as_file, files
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.cli.report import write_report
from shardwright.cli.train import finish
from shardwright.core.job import read_job
from shardwright.lab.session import prepare_data, run
from shardwright.planner import plan
from shardwright.report.table import plan_summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``demo``."""
    parser.add_argument("--out", default="runs/demo", help="the run's folder (runs/demo)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")


def execute(options: argparse.Namespace) -> int:
    """Plan, generate, run, compare, report."""
    with as_file(files("shardwright.cli") / "demo.toml") as path:
        job = read_job(path, [*options.set, f"train.out={options.out}"])
    folder = Path(job.train.out)
    made = plan(job)
    shared.show(plan_summary(made))
    _say(f"generating {job.data.rows:,} click-log rows from a known click model")
    prepare_data(job)
    _say(f"training {job.train.steps} steps on {made.world_size} ranks")
    session = run(made, folder, sys.stderr)
    code = finish(session)
    if session.measurement is not None:
        report = folder / "report.html"
        write_report(folder, report)
        print(f"report: {report}")
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
