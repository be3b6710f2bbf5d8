"""``shardwright diff a.json b.json``."""

from __future__ import annotations

import argparse

from shardwright.cli import options as shared
from shardwright.job.plan import read_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``diff``."""
    shared.plan_argument(parser, "first", "a.json")
    shared.plan_argument(parser, "second", "b.json")
    parser.add_argument("--full", action="store_true", help="every difference on its own")
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Show what changed; always 0, for a difference is not a fault."""
    from shardwright.report.table import differences, plan_difference

    first, second = read_plan(options.first), read_plan(options.second)
    if options.json:
        shared.print_json(differences(first, second))
    else:
        shared.show(plan_difference(first, second, full=options.full))
    return 0
