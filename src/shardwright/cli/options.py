"""Options that several commands share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from shardwright.core.cluster import Calibration
from shardwright.core.document import encode_toml, to_json, write_atomically
from shardwright.core.errors import InputError, expected
from shardwright.core.outputs import beside
from shardwright.core.quantities import counted, format_bytes
from shardwright.job.asked import SHORT, in_one_line, of_same_structure
from shardwright.job.exported import unlike
from shardwright.job.job import Job, asked, job_in, set_key
from shardwright.job.model_of_job import is_planned

PROFILED = 20  # steps


def job_argument(parser: argparse.ArgumentParser, *, also_plan: bool = False) -> None:
    """JOB.toml, or a model that stands for one, with overrides."""
    name, config = "JOB.toml|MODEL", ", a config.json"
    if also_plan:
        name, config = f"{name}|plan.json", ""  # whose JSON is a plan's
    what = f"a job file, or a model: llama3-8b{config}, package.module:function"
    what += "; or a plan, as plan -o writes it" * also_plan
    parser.add_argument("job", type=Path, metavar=name, help=what)
    set_option(parser)
    parser.add_argument(
        "--on",
        default="",
        metavar="MACHINE",
        help="instead of the job's [cluster]: 8xH100, 2x8xA100-40, a preset or a cluster file",
    )
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="number of ranks")
    parser.add_argument("--write", type=Path, metavar="job.toml", help="write the job, a new file")
    short = parser.add_argument_group("short for --set")
    for option, key in SHORT.items():
        short.add_argument(f"--{option}", metavar="VALUE", help=key)


def set_option(parser: argparse.ArgumentParser) -> None:
    """--set."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key of the job; may be repeated",
    )


def plan_argument(
    parser: argparse.ArgumentParser, name: str = "plan", metavar: str = "plan.json"
) -> None:
    """A plan."""
    said = "a plan, as shardwright plan JOB.toml -o plan.json writes it"
    parser.add_argument(name, type=Path, metavar=metavar, help=said)


def job_of(options: argparse.Namespace, engine: str = "") -> Job:
    """The job with its overrides; ``--on`` replaces its cluster, ``-n`` sets the world size, keys
    that nobody gives are as an ``engine`` has them. One that has no file is said, and written where
    that is asked for."""
    given = ((key, getattr(options, name, None)) for name, key in SHORT.items())
    overrides = [f"{key}={value}" for key, value in given if value is not None]
    overrides += options.set
    if options.ranks is not None:
        # Last, so that -n wins over --set; and as text, so that it is checked as any other key.
        overrides.append(f"cluster.world_size={options.ranks}")
    document = asked(options.job, overrides, options.on)
    job = job_in(document, options.job)
    given = {f"{name}.{key}" for name, keys in document.items() for key in keys}
    filled = unlike(job, engine, given) if engine else {}
    for key, value in filled.items():
        set_key(document, f"{key}={json.dumps(value)}")
    job = job_in(document, options.job) if filled else job
    warn_of_busy(job.cluster.measured, job.cluster.file)
    _say(document, options.job, getattr(options, "write", None))
    if filled:
        print(f"Not given, so as {engine} has it: {in_one_line(filled)}", file=sys.stderr)
    if _is_asked(document, options.job):
        _say_machine(job)
    return job


def _is_asked(document: dict[str, Any], model: Path) -> bool:
    """Whether a document is of no job's file, which names neither itself nor a file inside."""
    named = of_same_structure(str(model)) or str(model)
    return any(str(value).startswith(named) for value in document.get("model", {}).values())


def _say_machine(job: Job) -> None:
    """Say which machine a job has that names none."""
    from shardwright.cost.constants import says_capacity
    from shardwright.planner.profiles import cluster_of

    if not says_capacity(job.cluster):
        its, _ = cluster_of(job)
        ranks = counted(its.world_size, f"{its.compute_device.upper()} rank")
        each = f" of {format_bytes(its.memory_per_rank)} each" if is_planned(job) else ""
        text = f"No machine is named: {ranks}{each} (preset {its.name}). Name one: --on 8xH100"
        print(text, file=sys.stderr)


def _say(document: dict[str, Any], model: Path, path: Path | None) -> None:
    if path is not None:
        if path.suffix != ".toml" or path.exists():
            wanted, found = "a new file that ends in .toml", f"'{path}'"
            raise InputError(expected("--write", wanted, found, "Name another, or move it away."))
        changed = beside(path)
        write_atomically(path, encode_toml(document).encode())
        print(f"job written to {path}{changed}", file=sys.stderr)
    elif _is_asked(document, model):
        named = of_same_structure(str(model))
        if named:
            print(f"{model} is taken for {named}, which has its structure.", file=sys.stderr)
        print(f"The job: {in_one_line(document)} (--write job.toml)", file=sys.stderr)


def warn_of_busy(measured: Calibration | None, file: str) -> None:
    """Say of a cluster file that was made on a busy machine that it was."""
    if measured is not None and measured.busy:
        text = f"{file} was {measured.busy}: seconds are off; calibrate again when it is quiet"
        print(text, file=sys.stderr, flush=True)


def run_argument(parser: argparse.ArgumentParser) -> None:
    """RUN_DIR."""
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the folder of a run")


def run_folder(options: argparse.Namespace) -> Path:
    """The folder of a finished run."""
    folder: Path = options.run
    if not folder.is_dir():
        raise InputError(
            expected(str(folder), "the folder of a run", "none", "Train first: train --out DIR.")
        )
    return folder


def resume_option(parser: argparse.ArgumentParser) -> None:
    """--resume."""
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, if there is one"
    )


def profile_option(parser: argparse.ArgumentParser) -> None:
    """--profile."""
    parser.add_argument(
        "--profile",
        type=int,
        nargs="?",
        const=PROFILED,
        default=0,
        metavar="STEPS",
        help=f"trace some steps of training and as many held-out batches, by default {PROFILED}",
    )


def check_profile(options: argparse.Namespace) -> None:
    """InputError where --profile is no number of steps."""
    if options.profile < 0:
        found = str(options.profile)
        raise InputError(
            expected("--profile", "a number of steps", found, "Leave it out for none.")
        )


def tokens_option(parser: argparse.ArgumentParser) -> None:
    """--tokens."""
    said = "of the whole training, such as 15e12: shows days and GPU-hours"
    parser.add_argument("--tokens", type=float, metavar="N", help=said)


def check_tokens(options: argparse.Namespace) -> None:
    """InputError where --tokens is no number of tokens."""
    if options.tokens is not None and not options.tokens > 0:
        raise InputError(expected("--tokens", "a number above 0", f"{options.tokens:g}"))


def json_option(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def print_json(value: Any) -> None:
    """A value as JSON on stdout."""
    print(to_json(value))


def show(renderable: Any) -> None:
    """A table on stdout, in the terminal's width; 120 columns where there is no terminal."""
    from shardwright.report.table import text_of

    text = text_of(renderable, color=not os.environ.get("NO_COLOR"))
    # not through rich, which ends the process with 1 when the reader is gone (`| head`)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="")
