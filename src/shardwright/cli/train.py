"""``shardwright train JOB.toml|plan.json [-n N]``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import UNSET

from shardwright.cli import options as shared
from shardwright.core.cluster import Cluster
from shardwright.core.errors import EXIT_PREEMPTED, EXIT_RUN_FAILED, InputError, expected
from shardwright.core.measurement import Quality, scores_text
from shardwright.job.asked import SHORT
from shardwright.job.job import DataSection, Job, checkpoint_folder
from shardwright.job.plan import Plan, read_plan, sealed
from shardwright.job.train import Forward, TrainSection
from shardwright.launcher.folder import outcome_file, plan_file
from shardwright.planner.profiles import cluster_of
from shardwright.report.wording import saved_text, straggler_text
from shardwright.train.session import Session, run
from shardwright.train.sources import source_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``train``."""
    parser.epilog = "The exit code is the run's; 'shardwright compare RUN_DIR' gates on memory."
    shared.job_argument(parser, also_plan=True)
    parser.add_argument("--out", metavar="DIR", help="the run's folder, instead of train.out")
    parser.add_argument(
        "--forward", choices=get_args(Forward), help="every rank a process, or a thread of one"
    )
    shared.resume_option(parser)
    shared.profile_option(parser)
    parser.add_argument("--full", action="store_true", help="every exact byte, more ranks")
    shared.json_option(parser)


def execute(options: argparse.Namespace) -> int:
    """Plan unless a plan is given, run, compare; the code is the run's."""
    shared.check_profile(options)
    again = _again(options)  # before --out and --forward become overrides of the job
    plan = _plan_of(options)
    _check_device(plan.cluster)
    out, begin = Path(plan.job.train.out), {"resume": options.resume, "profile": options.profile}
    session = run(plan, out, sys.stderr, given=options.job, **begin)
    code = finish(session, json=options.json, full=options.full)
    if code in (EXIT_RUN_FAILED, EXIT_PREEMPTED):
        print(_how_to_go_on(session, again), file=sys.stderr)
    return code


def _again(options: argparse.Namespace) -> list[str]:
    """The command that trains the same once more."""
    given = {"-n": options.ranks, "--on": options.on, "--out": options.out}
    given |= {f"--{name}": getattr(options, name) for name in ("forward", *SHORT)}
    words = [word for name, value in given.items() if value for word in (name, str(value))]
    settings = [word for each in options.set for word in ("--set", each)]
    return ["shardwright", "train", str(options.job), *words, *settings]


def _how_to_go_on(session: Session, words: list[str]) -> str:
    """The command that goes on with a run that did not come to its end."""
    job = session.plan.job
    if job.checkpoint is UNSET:
        again = shlex.join([*words, "--set", "checkpoint.every=10 min"])
        return f"nothing was saved, for the job has no [checkpoint]; with one: {again}"
    from shardwright.runtime.checkpoint.folders import complete_steps  # it brings torch

    saved = complete_steps(checkpoint_folder(job, session.folder))
    where = f"after step {saved[-1]}" if saved else "from its beginning, for nothing was saved yet"
    return f"to go on {where}: {shlex.join([*words, '--resume'])}"


def finish(session: Session, *, json: bool = False, full: bool = False, brief: bool = False) -> int:
    """Say how a run ended."""
    if session.outcome.code != 0:
        print(f"shardwright: {session.outcome.reason}", file=sys.stderr)
        if (details := outcome_file(session.folder)).exists():
            print(f"details in {details}", file=sys.stderr)
        if json:
            shared.print_json({"outcome": session.outcome})
        return session.outcome.code
    assert session.measurement is not None
    assert session.comparison is not None
    if json:
        shared.print_json({"outcome": session.outcome, "measurement": session.measurement})
        return 0
    from shardwright.report.table import comparison_summary, prose

    shared.show(comparison_summary(session.comparison, session.plan, full=full, brief=brief))
    if session.measurement.profile:
        from shardwright.report.table import profile_summary

        shared.show(profile_summary(session.measurement.profile, full=full))
    print()
    shared.show(prose("\n".join(result_lines(session))))
    print(f"results in {session.folder}", file=sys.stderr)
    return 0


def result_lines(session: Session) -> list[str]:
    """What was trained on, loss, quality beside the best possible, throughput, rows left out."""
    measured, job = session.measurement, session.plan.job
    assert measured is not None
    together = job.batch.size * session.plan.world_size
    trained = (
        f"{measured.steps:,} steps of {together:,} samples, {job.batch.size:,} on each of "
        f"{session.plan.world_size} ranks"
    )
    samples = source_of(job).samples()
    if samples:
        share = measured.steps * together / samples
        trained += f": {share:.1f} times all {samples:,}" if share >= 1 else f", out of {samples:,}"
    first, last = measured.curve.loss[0], measured.curve.loss[-1]
    lines = [
        trained,
        f"loss {first:.4f} at the start, {last:.4f} at step {measured.steps}; "
        f"{measured.samples_per_second:,.0f} samples per second",
    ]
    quality = measured.quality
    if measured.scores:
        last = measured.scores[-1]
        lines.append(
            f"while training, {last.rows:,} rows up to step {last.step}: {scores_text(last)}"
        )
    if measured.validation is not UNSET:
        lines.extend(f"validation: {line}" for line in _quality_lines(measured.validation))
    held_out = _quality_lines(quality) if quality else [_nothing_held_out(job)]
    lines.extend(held_out)
    if measured.saved is not UNSET:
        lines.append(saved_text(measured.saved))
    if measured.straggler is not UNSET:
        lines.append(straggler_text(measured.straggler))
    if measured.skipped is not UNSET:
        lines.append(f"{measured.skipped:,} steps were left out (train.not_finite)")
    if measured.bad_rows:
        lines.append(f"{measured.bad_rows:,} bad rows were left out (data.skip_bad_rows)")
    return lines


HOLDING_OUT = {
    "criteo": "data.test_path names a file of some, data.days holds the last of several out",
    "columns": "data.test_path names a file of some, data.days holds the last of several out",
    "synthetic": "data.test_rows says how many",
    "python": "model.python may return an sw.Task, which holds some out and scores them",
}


def _nothing_held_out(job: Job) -> str:
    hint = HOLDING_OUT.get(job.data.kind, "")
    return "no samples were held out to be scored" + (f": {hint}" if hint else "")


def _quality_lines(quality: Quality) -> Iterator[str]:
    def beside(best: float | None) -> str:
        return f" (best possible {best:.4f})" if best else ""

    loss = f"{quality.log_loss:.4f}"
    if quality.bits_per_byte is not None:
        yield (
            f"held out, {quality.rows:,} tokens: {loss} nats per token"
            f"{beside(quality.best_log_loss)}, {quality.bits_per_byte:.4f} bits per byte"
        )
        return
    auc = "" if quality.auc is None else f"AUC {quality.auc:.4f}{beside(quality.best_auc)}, "
    if quality.majority == 1.0:
        auc = "no AUC, for all have one label, "
    yield f"held out, {quality.rows:,} rows: {auc}log loss {loss}{beside(quality.best_log_loss)}"
    if quality.accuracy is not None:
        yield (
            f"accuracy {quality.accuracy:.4f}{beside(quality.best_accuracy)}, "
            f"{quality.majority:.4f} by always giving the majority class"
        )


def _check_device(cluster: Cluster) -> None:
    """InputError before any rank starts, where a plan or a job is for GPUs that are not here."""
    if cluster.compute_device == "cpu":
        return
    import torch  # the ranks need it anyway

    there = torch.cuda.device_count()
    if there < cluster.world_size:
        remedy = "Plan for this machine: --set cluster.preset=local."
        wanted = f"{cluster.world_size} CUDA devices, for it names them"
        raise InputError(expected("cluster", wanted, str(there), remedy))


def _plan_of(options: argparse.Namespace) -> Plan:
    if options.job.suffix != ".json":
        from shardwright.cli.planning import planned

        for key in ("out", "forward"):
            if value := getattr(options, key):
                options.set.append(f"train.{key}={value}")
        job = shared.job_of(options)
        source_of(job)  # tables alone are trained nowhere
        _check_device(cluster_of(job)[0])  # before a long search for nothing
        # A new search may end at another plan, and sums over other cuts round otherwise: a run that
        # goes on keeps the plan that it began with, as long as the job asks for nothing else.
        before = _planned_before(job) if options.resume else None
        return before or planned(job)
    for option in ("set", "on", "write", *SHORT):
        if getattr(options, option):
            remedy = f"Plan again with --{option}, then train."
            raise InputError(expected(f"--{option}", "a job to override", "a plan", remedy))
    # Checked to tile its model, whoever made it: ranks would find out one by one, after they
    # started.
    given = read_plan(options.job, check=True)
    shared.warn_of_busy(given.job.cluster.measured, given.job.cluster.file)
    if options.ranks not in (None, given.world_size):
        planned_for = f"{given.world_size}, as the plan"
        remedy = f"Plan for {options.ranks} ranks first: {_plan_command(options)}."
        raise InputError(expected("-n", planned_for, str(options.ranks), remedy))
    if options.forward and not given.job.model.traits.reads_clicks:
        wanted = f"none beside model.kind '{given.job.model.kind}'"
        raise InputError(expected("--forward", wanted, f"'{options.forward}'"))
    changed = {key: value for key in ("out", "forward") if (value := getattr(options, key))}
    if not changed:
        return given
    train = msgspec.structs.replace(given.job.train, **changed)
    return sealed(
        msgspec.structs.replace(given, job=msgspec.structs.replace(given.job, train=train))
    )


def _plan_command(options: argparse.Namespace) -> str:
    return f"shardwright plan JOB.toml -n {options.ranks} -o {options.job}"


def _planned_before(job: Job) -> Plan | None:
    """The plan of the run that goes on, unless the job asks for another one: a new search need not
    find the same, and sums over other cuts round otherwise."""
    path = plan_file(Path(job.train.out))
    if not path.exists():
        return None
    found = read_plan(path, check=True)
    if _without_run(found.job) != _without_run(job):
        return None
    return sealed(msgspec.structs.replace(found, job=job))


def _without_run(job: Job) -> Job:
    """What a plan depends on."""
    given = job.train
    train = TrainSection(
        optimizer=given.optimizer, table_optimizer=given.table_optimizer, overlap=given.overlap
    )
    data = DataSection(kind=job.data.kind, zipf=job.data.zipf)  # whose ids cost what they repeat
    return msgspec.structs.replace(job, train=train, data=data, checkpoint=UNSET)
