"""``torchrun ... -m shardwright run plan.json``: one rank of a run."""

# A rank is started by `train`, which holds the folder, watches and tells how it ended, or by a
# torchrun of somebody's own, on one host or many. In the second case the ranks do among themselves
# what the launcher would do: compare what they were started with, hold folders, collect results.

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
from shardwright.job.plan import Plan
from shardwright.launcher.folder import MARK, check_inputs
from shardwright.launcher.heartbeat import Heartbeat, read_status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``run``."""
    shared.plan_argument(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/latest"), help="the run's folder")
    parser.add_argument("--store", type=Path, help="a file for the rendezvous, instead of a port")
    what = "all ranks are threads of this process"
    parser.add_argument("--threads", action="store_true", help=what)
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
    if options.threads:
        if not launched:
            remedy = "It starts a process that has all ranks: train --forward parallel."
            raise InputError(expected("--threads", "to be set by shardwright train", "it", remedy))
        from shardwright.train.training import threads_of

        with threads_of(options.plan, options.out, resume=options.resume) as (first, *others):
            return run_worker(options.out, 0, first, dict(enumerate(others, 1)))
    code = run_worker(
        options.out,
        rank,
        lambda heartbeat: _train(options, rank, heartbeat, launched=launched),
    )
    # Under our launcher its own outcome says why; torchrun alone would show its summary and nothing
    # else.
    if code and not launched:
        _say_why(options.out, rank)
    return code


def _train(options: argparse.Namespace, rank: int, heartbeat: Heartbeat, *, launched: bool) -> None:
    """A rank's training; without a launcher, what that one does before and after, too."""
    from shardwright.runtime import comm
    from shardwright.train.hosts import Hosts
    from shardwright.train.training import check_ranks, train_rank

    plan, out = check_ranks(options.plan), options.out
    # torchrun starts its workers again with the same command line, which says nothing of resuming.
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    resume = options.resume or again  # a restart of torchrun's
    store = comm.meet(plan.job.train.timeout, rank, plan.world_size, options.store)
    place = (plan, options.plan, out, rank, store, heartbeat)
    train = partial(train_rank, *place, resume=resume, profile=options.profile)
    if launched:
        train()
        return
    from shardwright.train.session import collect

    hosts = Hosts(plan, rank, out)
    with hosts.ready(store, partial(_prepare, plan, options, resume=resume)):
        if _is_first_here():
            print("\n".join([hosts.names(), *hosts.lines]), file=sys.stderr, flush=True)
        train(hosts=hosts)
        if rank == 0:
            collect(plan, out)
            print(f"results in {out}; shardwright compare {out}", file=sys.stderr)
        elif _is_first_here():
            where = f"results in {hosts.facts[0].folder} on {hosts.facts[0].host}"
            print(where, file=sys.stderr)


def _prepare(plan: Plan, options: argparse.Namespace, *, resume: bool) -> None:
    from shardwright.launcher.folder import outcome_file, progress_file
    from shardwright.train.resuming import check_resume
    from shardwright.train.session import prepare
    from shardwright.train.sources import source_of
    from shardwright.train.writers import check_log

    source_of(plan.job).check()
    check_log(plan.job.train.log or ())
    check_resume(plan.job, options.out, plan.world_size, resume=resume)
    for path in (outcome_file(options.out), progress_file(options.out)):  # of a run before
        path.unlink(missing_ok=True)
    prepare(plan, options.out, sys.stderr, options.plan)


def _is_first_here() -> bool:
    """Whether this is the rank that speaks for its host."""
    return os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"


def _say_why(folder: Path, rank: int) -> None:
    """The rank's last word, where torchrun shows it last: in the file that it reads errors from.
    The first rank of each host prints it, too."""
    status = read_status(folder, rank)
    if status is None:
        return
    line = f"shardwright: {status.message}"
    if _is_first_here():
        print(line, file=sys.stderr, flush=True)
    # In the form of torch.distributed.elastic's own error handler, which is what torchrun prints.
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
