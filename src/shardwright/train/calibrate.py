"""This machine measured by its own ranks: launch them, and make a cluster file of their samples."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec

from shardwright.core.cluster import Calibration
from shardwright.core.document import read_document
from shardwright.core.errors import EXIT_BUG, EXIT_RUN_FAILED, InputError, expected
from shardwright.launcher.ending import RunOutcome
from shardwright.launcher.launch import Launch, launch
from shardwright.train.measure.figures import calibration
from shardwright.train.measure.samples import SCHEMA, Samples, samples_file

MODULE = "shardwright.train.measure.worker"
MOST_RANKS = 256
BUSY = 0.5  # of the cores: other work that is worth a word
TIMEOUT, SETUP_TIMEOUT = 60.0, 180.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """How the ranks ended, what they found if they finished, and where their logs are if not."""

    outcome: RunOutcome
    found: Calibration | None
    folder: Path | None


def calibrate(world_size: int, stream: TextIO, *, quick: bool = False) -> Attempt:
    """Measure with ``world_size`` ranks on this machine; messages and progress go to ``stream``.

    About half a minute with two ranks, ``quick`` a few seconds. InputError: too many ranks or none.
    """
    if not 1 <= world_size <= MOST_RANKS:
        raise InputError(expected("-n", f"from 1 to {MOST_RANKS} ranks", f"{world_size}"))
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        text = f"the machine is busy (load {load:.1f} on {cores} cores): times will vary more"
        print(text, file=stream, flush=True)
    folder = Path(tempfile.mkdtemp(prefix="shardwright-calibrate-"))
    request = Launch(
        module=MODULE,
        arguments=(str(folder), *(["--quick"] if quick else [])),
        world_size=world_size,
        folder=folder,
        timeout=TIMEOUT,
        setup_timeout=SETUP_TIMEOUT,
        stop_grace=2.0,
    )
    kept = False
    try:
        outcome = launch(request, stream)
        kept = outcome.code in (EXIT_BUG, EXIT_RUN_FAILED)
        if outcome.code:
            return Attempt(outcome, None, folder if kept else None)
        ranks = [
            read_document(samples_file(folder, rank), Samples, SCHEMA, "shardwright calibrate")
            for rank in range(world_size)
        ]
        found = calibration(ranks, time.strftime("%Y-%m-%d"))
        machine = found.machine | {"load_before": f"{load:.1f}"}
        return Attempt(outcome, msgspec.structs.replace(found, machine=machine), None)
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
