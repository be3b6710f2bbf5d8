"""``torchrun ... -m shardwright run plan.json``: one rank of a run."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from shardwright.core.errors import InputError, expected
from shardwright.launcher.folder import check_inputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``run``."""
    parser.add_argument("plan", type=Path, metavar="plan.json")
    parser.add_argument("--out", type=Path, default=Path("runs/latest"), help="the run's folder")
    parser.add_argument("--store", type=Path, help="a file to meet at, instead of a port")


def execute(options: argparse.Namespace) -> int:
    """Train as torchrun's environment says; the status file says how it ended."""
    if "RANK" not in os.environ:
        raise InputError(
            expected("RANK", "to be set by torchrun", "none", "Use shardwright train.")
        )
    from shardwright.lab.training import train_rank
    from shardwright.launcher.worker import run_worker

    rank = int(os.environ["RANK"])
    check_inputs(options.out, (), options.plan)
    options.out.mkdir(parents=True, exist_ok=True)
    return run_worker(
        options.out,
        rank,
        lambda heartbeat: train_rank(options.plan, options.out, options.store, heartbeat),
    )
