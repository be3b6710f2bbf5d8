"""``shardwright advise JOB.toml``: the fastest layout of a model on a cluster that fits."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

from shardwright.cli import options as shared
from shardwright.cli.planning import EstimateProgress
from shardwright.core.advice import Advice
from shardwright.core.document import write_atomically
from shardwright.core.errors import EXIT_NO_PLAN, EXIT_OK, InputError, NoPlanError, expected
from shardwright.core.measurement import read_measurement
from shardwright.core.outputs import PICTURE, beside, check_output
from shardwright.core.quantities import parse_bytes
from shardwright.job.exported import ENGINES
from shardwright.job.job import Job, named_files
from shardwright.job.plan import read_plan
from shardwright.launcher.folder import plan_file
from shardwright.planner.profiles import with_hosts

DAYS = re.compile(r"(\d+(?:\.\d+)?)\s*(d|days?|h|hours?|weeks?)")
DAYS_OF = {"d": 1.0, "h": 1 / 24, "w": 7.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``advise``."""
    parser.epilog = (
        "The global batch, the sequence, dtypes and the optimizer of the job are kept; its degrees "
        "are not looked at. Jobs with embedding tables are planned layout by layout. "
        "Exit code 3: no layout fits. Ctrl-C shows what was found."
    )
    shared.job_argument(parser)
    parser.add_argument(
        "--global-batch", type=int, default=0, metavar="N", help="samples of all ranks in a step"
    )
    parser.add_argument(
        "--engine",
        default="",
        metavar="NAME",
        help="only layouts that it runs: torchtitan, megatron ...",
    )
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="AXIS=VALUE",
        help="only layouts with it, such as tensor=8",
    )
    parser.add_argument(
        "--headroom", metavar="SIZE", help='memory to leave free on each device: "6 GiB"'
    )
    parser.add_argument(
        "--measured",
        action="append",
        default=[],
        metavar="SECONDS|RUN.json",
        help="a step of the job as it is took so long, or those of a run; may be repeated",
    )
    shared.tokens_option(parser)
    parser.add_argument(
        "--fewest-gpus", action="store_true", help="as few as fit, or as meet --deadline"
    )
    parser.add_argument("--deadline", metavar="TIME", help='for --tokens: "12 days"')
    parser.add_argument(
        "--export", default="", metavar="ENGINE", help="write the answer as ENGINE reads it to FILE"
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="where --export writes; a new file"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="out.svg", help="all layouts, time against memory"
    )
    parser.add_argument("--full", action="store_true", help="everything that was looked at")
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Search and show; 3 where nothing fits."""
    engine = options.engine or options.export
    job = shared.job_of(options, engine if engine in ENGINES else "")  # another is refused below
    if options.picture:
        if options.picture.suffix != ".svg":
            wanted = "a file that ends in .svg"
            raise InputError(expected("--picture", wanted, f"'{options.picture.name}'"))
        inputs = (options.job, *named_files(job, options.job))
        check_output(options.picture, PICTURE, inputs, "--picture")
    if options.global_batch < 0:
        raise InputError(expected("--global-batch", "at least 1", str(options.global_batch)))
    shared.check_tokens(options)
    deadline = _deadline(options)
    if bool(options.export) != bool(options.out):
        raise InputError(expected("--export", "ENGINE and -o FILE beside it", "one of the two"))
    if options.out is not None and options.out.exists():
        remedy = "Name another, or move it away."
        raise InputError(expected(str(options.out), "no file yet", "one", remedy))
    wanted = {
        "engine": options.engine or options.export,
        "fixed": dict(map(_fixed, options.fix)),
        "headroom": parse_bytes(options.headroom, "--headroom") if options.headroom else 0,
        "global_batch": options.global_batch,
        "measured": [_measured(text, job) for text in options.measured],
    }
    from shardwright.estimate.advise import advise, fewest_ranks

    progress = EstimateProgress()

    def hear(text: str) -> None:
        progress(f"{text} (Ctrl-C ends it)")

    def fast_enough(found: Advice) -> bool:
        return deadline is None or found.days(options.tokens) <= deadline

    try:
        if options.fewest_gpus:
            fewest = fewest_ranks(job, fast_enough, hear, **wanted)
            if fewest is None:
                within = f" within {options.deadline}" if options.deadline else ""
                raise NoPlanError(f"No number of GPUs is enough{within}.")
            job, found = fewest
        else:
            found = advise(job, hear, **wanted)
    finally:
        progress.end()
    _write(job, found, wanted, options)
    if options.json:
        shared.print_json(found)
    else:
        from shardwright.report.advice_report import advice_report

        shared.show(advice_report(found, tokens=options.tokens, full=options.full))
    return EXIT_OK if found.rows else EXIT_NO_PLAN


def _write(job: Job, found: Advice, wanted: dict[str, Any], options: argparse.Namespace) -> None:
    """The files that are asked for."""
    if options.picture:
        from shardwright.report.advice_report import picture

        changed = beside(options.picture)
        write_atomically(options.picture, picture(found).encode())
        print(f"picture written to {options.picture}{changed}", file=sys.stderr)
    if options.out and found.answer:
        from shardwright.estimate.advise import job_of
        from shardwright.job.exported import exported

        held = {**wanted, "global_batch": found.global_batch}  # of however many ranks
        text = exported(with_hosts(job_of(job, found.answer.layout, **held)), options.export)
        changed = beside(options.out)
        write_atomically(options.out, text.encode())
        print(f"wrote {options.out}{changed}", file=sys.stderr)


def _fixed(text: str) -> tuple[str, str]:
    axis, given, value = text.partition("=")
    if not given:
        raise InputError(expected("--fix", "AXIS=VALUE", f"'{text}'", "Such as tensor=8."))
    return axis.strip().replace("-", "_"), value.strip()


def _measured(text: str, job: Job) -> tuple[Job, float]:
    """Seconds of a step of the job as it is; or a run's, with the job of the plan beside it."""
    path = Path(text)
    if not path.is_file():
        try:
            seconds = float(text)
        except ValueError:
            wanted = "seconds, or the measured.json of a run"
            raise InputError(expected("--measured", wanted, f"'{text}'")) from None
        if not 0 < seconds < math.inf:
            raise InputError(expected("--measured", "seconds above 0", text))
        return job, seconds
    found, plan = read_measurement(path), read_plan(plan_file(path.parent))
    if found.plan_fingerprint != plan.fingerprint:
        raise InputError(expected(text, "a run of the plan beside it", "one of another plan"))
    if plan.job.model != job.model:
        raise InputError(expected(text, f"a run of {job.model.name}", plan.job.model.name))
    if not found.samples_per_second:
        raise InputError(expected(text, "steps whose seconds were taken", "none", "Train longer."))
    return plan.job, plan.job.batch.size * plan.world_size / found.samples_per_second


def _deadline(options: argparse.Namespace) -> float | None:
    """Days, where a deadline is given."""
    if options.deadline is None:
        return None
    if options.tokens is None or not options.fewest_gpus:
        raise InputError(expected("--deadline", "--fewest-gpus and --tokens beside it", "neither"))
    found = DAYS.fullmatch(options.deadline.strip())
    if not found:
        raise InputError(expected("--deadline", "such as '12 days'", f"'{options.deadline}'"))
    return float(found[1]) * DAYS_OF[found[2][0]]
