"""One run from a job to its comparison: data, plan, launch, merge, compare."""

# Everything that can be refused is refused before the folder is held or a rank started: data, the
# writers' packages, files that would be written over. Results of an earlier run are removed first,
# so that a run which dies early is not told by another one's figures. Restarts go on from the
# newest checkpoint, and only after a failure of the run: bad input would fail again.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec
from msgspec import UNSET

from shardwright.core.document import read_document, write_document
from shardwright.core.errors import EXIT_RUN_FAILED, InputError, MismatchError, expected
from shardwright.core.measurement import (
    RECORD_SCHEMA,
    Comparison,
    Measurement,
    Quality,
    Record,
    write_measurement,
)
from shardwright.core.outputs import same_file
from shardwright.job.job import Job, checkpoint_folder, named_files, run_in
from shardwright.job.plan import Plan, read_plan, write_plan
from shardwright.job.train import CheckpointSection
from shardwright.launcher.ending import RunOutcome
from shardwright.launcher.folder import (
    HELD_OUT,
    check_folder,
    check_inputs,
    command_file,
    comparison_file,
    measurement_file,
    plan_file,
    record_file,
    results_of_a_run,
    scores_file,
    store_file,
)
from shardwright.launcher.launch import Launch, launch
from shardwright.launcher.load import OtherLoad
from shardwright.train.compare import compare
from shardwright.train.records import merge
from shardwright.train.sources import source_of
from shardwright.train.writers import check_log

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SETUP_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Session:
    """What a run left: its outcome always, the rest if it got that far."""

    folder: Path
    plan: Plan
    outcome: RunOutcome
    measurement: Measurement | None
    comparison: Comparison | None


def run(
    plan: Plan,
    folder: Path,
    stream: TextIO,
    tolerance: float = 0.1,
    given: Path | None = None,
    *,
    resume: bool = False,
    profile: int = 0,
) -> Session:
    """Execute ``plan`` under torchrun; messages and progress go to ``stream``. With ``resume`` it
    goes on from the newest checkpoint, if there is one; of ``profile`` steps a trace is kept.

    ``given`` is the file that the plan or its job was read from. Nothing is written before the
    folder is this run's own, and never over a file that ``given`` or the job names. InputError: the
    data cannot be used, or the folder cannot.
    """
    check(plan.job, folder, given)
    together = plan.job.train.in_one_process
    if profile and together:
        wanted = "none beside train.forward 'parallel'"
        remedy = "torch's profiler follows one rank a process: train with 'distributed'."
        raise InputError(expected("--profile", wanted, str(profile), remedy))
    section = CheckpointSection() if plan.job.checkpoint is UNSET else plan.job.checkpoint

    def begin() -> None:
        # Inside of begin, when the folder is this run's own: another run could be saving there
        # until then.
        if checkpoint_folder(plan.job, folder).exists():
            # Imported here: it brings torch, which a launcher without checkpoints does not need.
            from shardwright.train.resuming import check_resume

            check_resume(plan.job, folder, plan.world_size, resume=resume)
        elif resume:
            saves = "" if request.saves else ", and none will be: the job has no [checkpoint]"
            print(f"no checkpoint is there yet{saves}; this run begins anew", file=stream)
        prepare(plan, folder, stream, given)
        where = command_file(folder)
        how = "ranks, threads of one process" if together else "ranks"
        print(f"{plan.world_size} {how} under torchrun, whose command is in {where}", file=stream)

    arguments = ("run", str(plan_file(folder)), "--out", str(folder))
    if profile:
        arguments = (*arguments, "--profile", str(profile))
    # Ranks that are threads have no store to meet in: they share the process.
    meeting = ("--threads",) if together else ("--store", str(store_file(folder)))
    request = Launch(
        module="shardwright",
        arguments=(*arguments, *meeting),
        world_size=plan.world_size,
        folder=folder,
        timeout=plan.job.train.timeout,
        setup_timeout=SETUP_TIMEOUT,
        stop_grace=section.grace,
        saves=plan.job.checkpoint is not UNSET,
        in_one_process=together,
    )
    if resume:
        request = with_resume(request)
    load = OtherLoad()
    outcome = launch(request, stream, begin)
    for again in range(1, section.restarts + 1):
        # Without the plan the folder is no run's any more, and a restart would fail in another way.
        if outcome.code != EXIT_RUN_FAILED or not plan_file(folder).exists():
            break
        print(f"{outcome.reason}; restart {again} of {section.restarts}", file=stream, flush=True)
        outcome = launch(with_resume(request), stream)
    records = [record_file(folder, rank) for rank in range(plan.world_size)]
    # A run that failed after training (a bad held-out row) has a record of every rank: what was
    # trained is merged and compared although the run did not end well.
    if outcome.code != 0 and not all(record.exists() for record in records):
        return Session(folder, plan, outcome, None, None)
    facts = {"load": f"{load.ended():.1f}"}
    scored = outcome.code == 0
    measurement, comparison = collect(plan, folder, tolerance, scored=scored, facts=facts)
    return Session(folder, plan, outcome, measurement, comparison)


def with_resume(request: Launch) -> Launch:
    """A run that goes on from the newest checkpoint."""
    return replace(request, arguments=(*request.arguments, "--resume"))


def prepare(plan: Plan, folder: Path, stream: TextIO, given: Path | None = None) -> None:
    """Have the data and the plan ready in ``folder``. What an earlier run left there is removed,
    which ``stream`` says."""
    job = run_in(plan.job, folder)
    source_of(job).prepare(partial(print, file=stream, flush=True))
    stale = [path for path in results_of_a_run(folder) if path.exists()]
    for path in stale:
        path.unlink(missing_ok=True)
    if stale:
        print(f"replacing the results of an earlier run in {folder}", file=stream, flush=True)
    # A run from the folder's own plan.json leaves it alone, to the byte: it is the input. With
    # options that change the plan (--forward) ranks would read the old one there, and their records
    # be of another plan.
    own = plan_file(folder)
    if not (given and same_file(given, own) and read_plan(own).fingerprint == plan.fingerprint):
        write_plan(plan, own)


def collect(
    plan: Plan,
    folder: Path,
    tolerance: float = 0.1,
    *,
    scored: bool = True,
    facts: Mapping[str, str] | None = None,
) -> tuple[Measurement, Comparison]:
    """Merge what every rank left, compare it with the plan, and write both down; without the scores
    of held-out rows unless all were ``scored``; ``facts`` are more of the machine's."""
    held_out = (_quality(plan, folder, part) if scored else None for part in HELD_OUT)
    measurement = merge(plan, _records(plan, folder), *held_out)
    machine = {**measurement.machine, **(facts or {})}
    measurement = msgspec.structs.replace(measurement, machine=machine)
    write_measurement(measurement, measurement_file(folder))
    comparison = compare(plan, measurement, tolerance)
    write_document(comparison, comparison_file(folder))
    return measurement, comparison


def check(job: Job, folder: Path, given: Path | None = None) -> None:
    """Raise InputError unless the data can be used, and the folder without loss of a file."""
    source_of(job).check()
    check_log(job.train.log or ())
    check_inputs(folder, named_files(job, given), given)
    check_folder(folder, given)


def _records(plan: Plan, folder: Path) -> list[Record]:
    """What every rank left."""
    records = [
        read_document(record_file(folder, rank), Record, RECORD_SCHEMA, "train")
        for rank in range(plan.world_size)
    ]
    for rank, record in enumerate(records):
        if (record.rank, record.plan_fingerprint) != (rank, plan.fingerprint):
            raise MismatchError(
                expected(
                    str(record_file(folder, rank)),
                    f"the record of rank {rank} under this plan",
                    f"rank {record.rank}'s under plan {record.plan_fingerprint[:12]}",
                )
            )
    return records


def _quality(plan: Plan, folder: Path, part: str) -> Quality | None:
    scores = scores_of(folder, plan.world_size, part)
    job = run_in(plan.job, folder)
    return None if scores is None else source_of(job).quality(scores, part)


def scores_of(folder: Path, world_size: int, part: str) -> NDArray[np.float64] | None:
    """What all ranks scored of a held-out part, [n, 3] in the order of the first column; None where
    there is no such part."""
    import numpy as np

    files = [scores_file(folder, rank, part) for rank in range(world_size)]
    files = [file for file in files if file.exists()]  # a rank may have had no rows
    if not files:
        return None
    scores = np.concatenate([np.load(file, allow_pickle=False) for file in files])
    in_order: NDArray[np.float64] = scores[np.argsort(scores[:, 0], kind="stable")]
    return in_order
