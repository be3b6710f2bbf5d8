"""``shardwright schema``: what a job may say, as a JSON Schema, for editors."""

from __future__ import annotations

import argparse

from shardwright.cli import options as shared
from shardwright.core.errors import EXIT_OK
from shardwright.job.schema import job_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``schema`` has no options."""


def execute(options: argparse.Namespace) -> int:
    """Print the schema."""
    shared.print_json(job_schema())
    return EXIT_OK
