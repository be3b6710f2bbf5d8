"""``shardwright demo``: the whole path on this machine."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import as_file, files
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.cli.planning import planned
from shardwright.cli.report import write_report
from shardwright.cli.train import finish
from shardwright.core.outputs import REPORT, beside, check_output
from shardwright.job.job import named_files, read_job
from shardwright.job.plan import Plan
from shardwright.planner.statistics import memory_prices
from shardwright.report.plan_report import plan_in_brief
from shardwright.train.session import check, run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``demo``."""
    parser.add_argument("--out", default="runs/demo", help="the run's folder (runs/demo)")
    shared.set_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Plan, generate, run, compare, report."""
    with as_file(files("shardwright.cli") / "demo.toml") as path:
        job = read_job(path, [*options.set, f"train.out={options.out}"])
    folder = Path(job.train.out)
    report = folder / "report.html"
    check(job, folder)
    check_output(report, REPORT, named_files(job), "--out")
    made = planned(job)
    shared.show(plan_in_brief(made, memory_prices(made)))
    print(_announcement(made), file=sys.stderr, flush=True)
    session = run(made, folder, sys.stderr)
    code = finish(session, brief=True)
    if session.measurement is not None:
        changed = beside(report)
        write_report(folder, report)
        print(f"report: {report}{changed}")
    return code


def _announcement(made: Plan) -> str:
    job = made.job
    training = f"training {job.train.steps} steps on {made.world_size} ranks"
    if job.data.kind != "synthetic":
        return training
    return f"generating {job.data.rows:,} click-log rows from a known click model, then {training}"
