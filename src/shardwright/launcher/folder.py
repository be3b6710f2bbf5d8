"""The run folder: what its files are called, and which of them a run writes over."""

# Names of files follow from the rank and stand here alone: what a run writes is also what the next
# one clears away, and what check_inputs keeps a user's files from. A name that is written
# elsewhere and missing here would either survive into the next run's results or overwrite an
# input.

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from shardwright.core.errors import InputError
from shardwright.core.outputs import same_file

REMEDY = "Choose another train.out."
MARK: Final = "SHARDWRIGHT_RUN"  # environment variable with the number of the run, if launched
LONGEST_MARK: Final = 64  # bytes of the lock file that are read
_OF_A_RUN = {
    *("plan.json", "outcome.json", "measured.json", "comparison.json"),
    *("progress.jsonl", "torchrun.sh", "torchrun.log", "launcher.lock", "rendezvous", "store"),
}
_OF_A_RANK = re.compile(
    r"rank-\d+\.(pulse|status\.json|log|record\.json|scores\.npy|validation\.npy|\w+\.trace\.json)"
)


def _of_run(name: str) -> Callable[[Path], Path]:
    """A file of a run, by its folder."""
    return lambda folder: folder / name


def _of_rank(ending: str) -> Callable[[Path, int], Path]:
    """A file of a rank, by the folder of its run and its number."""
    return lambda folder, rank: folder / f"rank-{rank}.{ending}"


plan_file = _of_run("plan.json")  # that the run executed
measurement_file = _of_run("measured.json")  # what all ranks measured, merged
comparison_file = _of_run("comparison.json")  # predicted beside measured
outcome_file = _of_run("outcome.json")  # how the run ended
command_file = _of_run("torchrun.sh")  # the command line that started the ranks
progress_file = _of_run("progress.jsonl")
lock_file = _of_run("launcher.lock")  # locked as long as a launcher lives; has the run's number
# For torch.distributed.FileStore, a store that listens on no port at all: a TCPStore, as ``env://``
# makes one, listens on every interface of the machine.
store_file = _of_run("store")

record_file = _of_rank("record.json")  # what a rank measured
heartbeat_file = _of_rank("pulse")
status_file = _of_rank("status.json")
log_file = _of_rank("log")  # the traceback of an error that a worker did not expect

HELD_OUT = ("test", "validation")  # parts that are scored; only the first is always there


def scores_file(folder: Path, rank: int, part: str = "test") -> Path:
    """A rank's scores of a held-out part: rows of three numbers, as its task has them."""
    return folder / f"rank-{rank}.{'scores' if part == 'test' else part}.npy"


def trace_file(folder: Path, rank: int, stage: str) -> Path:
    """What a rank did in the profiled steps of a stage; opens in Perfetto."""
    return folder / f"rank-{rank}.{stage}.trace.json"


def facts_file(rows: Path) -> Path:
    """Beside generated rows: what is known about them."""
    return rows.with_suffix(".facts.json")


def is_going_on(folder: Path) -> bool:
    """Whether a run holds the folder."""
    try:
        descriptor = os.open(lock_file(folder), os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared, so that two reports that look at once do not take each other for a run.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def results_of_a_run(folder: Path) -> list[Path]:
    """What an earlier run left and the next one would mistake for its own."""
    ranks = files_of_ranks(folder, "record.json", "scores.npy", "validation.npy")
    traces = [path for path in folder.glob("rank-*.trace.json") if _is_written(path.name)]
    return [*ranks, *traces, measurement_file(folder), comparison_file(folder)]


def files_of_ranks(folder: Path, *endings: str) -> list[Path]:
    """The files ``rank-R.ending`` that are there, of any rank."""
    matches = [(path, _OF_A_RANK.fullmatch(path.name)) for path in folder.glob("rank-*")]
    return [path for path, match in matches if match and match[1] in endings]


def check_inputs(folder: Path, inputs: Iterable[Path], plan: Path | None = None) -> None:
    """Raise InputError if a run in ``folder`` would write over one of ``inputs`` or over ``plan``.

    Only ``plan`` may be the folder's ``plan.json``: it stays as it is.
    """
    written = _written(folder, plan)
    for path in filter(None, (*inputs, plan)):
        if any(same_file(path, each) for each in written):
            wanted = "a file that the run does not write over"
            raise InputError(str(path), wanted, f"one of {folder}", REMEDY)


def check_folder(folder: Path, plan: Path | None = None) -> None:
    """Raise InputError if no run ever was in ``folder``, and one would write over what is there."""
    written = _written(folder, plan)
    # A lock means that a run was here before, whose files may be replaced; without one they are
    # somebody else's.
    if written and not lock_file(folder).exists():
        wanted = "a new folder, or one of an earlier run"
        raise InputError(str(folder), wanted, f"one with a {written[0].name}", REMEDY)


def _written(folder: Path, plan: Path | None) -> list[Path]:
    """What is there that a run of ``plan`` would write over."""
    if not folder.is_dir():
        return []
    own = plan_file(folder)
    kept = plan is not None and same_file(plan, own)
    names = (path.name for path in folder.iterdir())
    return sorted(folder / n for n in names if _is_written(n) and not (kept and n == own.name))


def _is_written(name: str) -> bool:
    return name in _OF_A_RUN or _OF_A_RANK.fullmatch(name) is not None
