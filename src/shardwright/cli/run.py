"""``torchrun ... -m shardwright run plan.json``: one rank of a run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.core.errors import InputError, expected
from shardwright.launcher.folder import MARK, check_inputs
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.launcher.outcome import read_status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``run``."""
    parser.add_argument("plan", type=Path, metavar="plan.json")
    parser.add_argument("--out", type=Path, default=Path("runs/latest"), help="the run's folder")
    parser.add_argument("--store", type=Path, help="a file to meet at, instead of a port")
    shared.resume_option(parser)
    shared.profile_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Train as torchrun's environment says; the status file says how it ended."""
    if "RANK" not in os.environ:
        raise InputError(
            expected("RANK", "to be set by torchrun", "none", "Use shardwright train.")
        )
    from shardwright.launcher.worker import run_worker

    if not os.environ["RANK"].isdecimal():
        found = repr(os.environ["RANK"])
        raise InputError(expected("RANK", "a number, as torchrun sets it", found))
    rank = int(os.environ["RANK"])
    shared.check_profile(options)
    check_inputs(options.out, (), options.plan)
    options.out.mkdir(parents=True, exist_ok=True)
    launched = MARK in os.environ  # by `train`, which sees to the folder and says how it ended
    code = run_worker(
        options.out,
        rank,
        lambda heartbeat: _train(options, rank, heartbeat, alone=not launched and rank == 0),
    )
    if code and not launched:
        _say_why(options.out, rank)
    return code


def _train(options: argparse.Namespace, rank: int, heartbeat: Heartbeat, *, alone: bool) -> None:
    """A rank's training; ``alone`` it also does what a launcher does before and after."""
    from shardwright.lab.training import check_ranks, train_rank

    plan = check_ranks(options.plan)
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    resume = options.resume or again  # a restart of torchrun's
    place = (plan, options.plan, options.out, options.store, heartbeat)
    train = partial(train_rank, *place, profile=options.profile)
    if not alone:
        train(resume=resume)
        return
    from shardwright.lab.resuming import check_resume
    from shardwright.lab.session import collect, prepare
    from shardwright.lab.sources import source_of

    source_of(plan.job).check(plan.job)
    check_resume(plan.job, options.out, resume=resume)
    prepare(plan, options.out, sys.stderr, options.plan)
    train(resume=resume)
    collect(plan, options.out)
    print(f"results in {options.out}; shardwright compare {options.out}", file=sys.stderr)


def _say_why(folder: Path, rank: int) -> None:
    """The rank's last word, where torchrun shows it last: in the file that it reads errors from.
    Rank 0 prints it, too."""
    status = read_status(folder, rank)
    if status is None:
        return
    line = f"shardwright: {status.message}"
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
