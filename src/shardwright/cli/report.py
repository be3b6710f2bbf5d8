"""``shardwright report RUN_DIR|plan.json -o report.html``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.core.document import read_bytes, write_atomically
from shardwright.core.errors import InputError, expected
from shardwright.core.measurement import Curve, read_measurement
from shardwright.core.outputs import REPORT, TRACE, beside, check_output
from shardwright.core.quantities import counted, format_seconds
from shardwright.job.job import named_files
from shardwright.job.plan import read_plan
from shardwright.launcher.ending import RunOutcome, decode_outcome
from shardwright.launcher.folder import is_going_on, measurement_file, outcome_file, plan_file
from shardwright.launcher.progress import so_far
from shardwright.train.compare import compare

DEFAULT = Path("report.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``report``."""
    said = "the folder of a run, or a plan alone"
    parser.add_argument("run", type=Path, metavar="RUN_DIR|plan.json", help=said)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="report.html",
        help=f"the page to write ({DEFAULT}, in the current folder)",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="a step planned and measured, for Perfetto"
    )


def execute(options: argparse.Namespace) -> int:
    """Write one self-contained page, and a trace where one is asked for."""
    output = options.output or DEFAULT
    changed = beside(output)
    write_report(options.run, output)
    print(f"report written to {options.output or DEFAULT.absolute()}{changed}", file=sys.stderr)
    if options.trace:
        changed = beside(options.trace)
        write_trace(options.run, options.trace)
        print(f"trace written to {options.trace}{changed}", file=sys.stderr)
    return 0


def write_report(source: Path, output: Path) -> None:
    """A page about a run's folder, or about a plan alone."""
    from shardwright.report.html import render

    if not source.exists():
        wanted = "the folder of a run, or a plan"
        raise InputError(expected(str(source), wanted, "none", "Train first: train --out DIR."))
    alone = source.is_file()
    plan_read = source if alone else plan_file(source)
    measured, ended = measurement_file(source), outcome_file(source)
    plan = read_plan(plan_read)
    inputs = (plan_read, *(() if alone else (measured, ended)), *named_files(plan.job))
    check_output(output, REPORT, inputs)
    if alone:
        page = render(plan, None, None)
    else:
        measurement = read_measurement(measured) if measured.exists() else None
        comparison = compare(plan, measurement) if measurement else None
        found = read_bytes(ended, "outcome") if ended.exists() else b""
        text = _how_it_ended(decode_outcome(found, str(ended))) if found else ""
        curve = None
        if measurement is None and (run := so_far(source)):
            steps, losses = zip(*run.points, strict=True) if run.points else ((), ())
            curve = Curve(steps, losses)
            how = "goes on: it is" if is_going_on(source) else "has no measurement: it came"
            text += f"{'. ' * bool(text)}The run {how} up to step {run.step:,} of {run.steps:,}."
        page = render(plan, measurement, comparison, text, curve)
    write_atomically(output, page.encode())


def _how_it_ended(outcome: RunOutcome) -> str:
    """A run's end as a sentence of its own."""
    if outcome.code:
        return outcome.reason
    took, ranks = format_seconds(outcome.seconds), counted(outcome.world_size, "rank")
    return f"The run finished on {ranks}, in {took} with its start."


def write_trace(source: Path, output: Path) -> None:
    """What was planned and, of a run that was measured, what it took: one Chrome trace."""
    from shardwright.report.traces import run_trace

    alone = source.is_file()
    plan_read, measured = (source if alone else plan_file(source)), measurement_file(source)
    check_output(output, TRACE, (plan_read, *(() if alone else (measured,))), "--trace")
    measurement = None if alone or not measured.exists() else read_measurement(measured)
    write_atomically(output, run_trace(read_plan(plan_read), measurement).encode())
