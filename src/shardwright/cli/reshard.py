"""``shardwright reshard CHECKPOINT --plan new.json [--out DIR]``."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwright.cli import options as shared
from shardwright.core.errors import InputError, expected
from shardwright.core.quantities import format_bytes
from shardwright.job.plan import read_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``reshard``."""
    parser.epilog = "Name --out as checkpoint.folder of a job, and train it with --resume."
    what = "a checkpoint step-N, or a folder of them: the newest"
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=what)
    parser.add_argument("--plan", type=Path, required=True, metavar="new.json", help="the new plan")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder to write (CHECKPOINT.resharded)"
    )
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Cut the checkpoint anew."""
    given: Path = options.checkpoint
    if not given.is_dir():
        found = "a file" if given.exists() else "nothing"
        remedy = "Name the folder that train saved into."
        raise InputError(expected(str(given), "a folder of checkpoints", found, remedy))
    plan = read_plan(options.plan, check=True)
    saved = given.parent if given.name.startswith("step-") else given
    out = options.out or saved.with_name(f"{saved.name}.resharded")

    from shardwright.train.resharding import reshard

    made = reshard(given, plan, out)
    if options.json:
        shared.print_json(made)
        return 0
    print(
        f"{made.folder}: {made.tensors:,} tensors, {format_bytes(made.nbytes)}, for "
        f"{made.world_size} ranks instead of {made.saved}"
    )
    return 0
