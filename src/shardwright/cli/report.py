"""``shardwright report RUN_DIR|plan.json -o report.html``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.core.document import write_atomically
from shardwright.core.measurement import read_measurement
from shardwright.core.outcome import decode_outcome
from shardwright.core.plan import read_plan
from shardwright.lab.compare import compare
from shardwright.lab.folder import measurement_file, outcome_file, plan_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``report``."""
    parser.add_argument("run", type=Path, metavar="RUN_DIR|plan.json")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"))


def execute(options: argparse.Namespace) -> int:
    """Write one self-contained page."""
    write_report(options.run, options.output)
    print(f"report written to {options.output}", file=sys.stderr)
    return 0


def write_report(source: Path, output: Path) -> None:
    """A page about a run's folder, or about a plan alone."""
    from shardwright.report.html import render

    if source.is_file():
        page = render(read_plan(source), None, None)
    else:
        plan = read_plan(plan_file(source))
        measured = measurement_file(source)
        measurement = read_measurement(measured) if measured.exists() else None
        comparison = compare(plan, measurement) if measurement else None
        ended = outcome_file(source)
        text = decode_outcome(ended.read_bytes(), str(ended)).reason if ended.exists() else ""
        page = render(plan, measurement, comparison, text)
    write_atomically(output, page.encode())
