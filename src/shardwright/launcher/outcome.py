"""How a run ended: the contents of ``outcome.json``, and each rank's last word in it.

The launcher writes the file, so it exists also when rank 0 died. ``code`` is what the ``train``
command exits with (see :mod:`shardwright.core.errors`); torchrun's own code is always 0 or 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from shardwright.core.document import decode_json, write_atomically
from shardwright.core.errors import InputError, expected
from shardwright.launcher.folder import status_file

OUTCOME_SCHEMA: Final = "shardwright.outcome/1"
STOPPED: Final = "stopped by SIGTERM"  # of a rank that ended at once

State = Literal["finished", "failed", "lost", "stopped"]


class RankOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's end.

    ``finished``: the work was done. ``failed``: the rank reported an error of its own, or
    (``peer`` true) it failed only because another one did. ``lost``: it ended, or hung, without
    a word. ``stopped``: it was asked to end. ``code`` is the rank's exit code, minus the signal
    number where a signal is known to have killed it, None where nobody knows.
    """

    rank: int
    state: State
    code: int | None
    step: int | None
    phase: str | None
    message: str
    peer: bool = False


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run's end, in one value.

    ``reason`` is one line, ready to print. ``step`` is the last step any rank reached.
    ``seconds`` is wall time from the start of torchrun to the end of the last process.
    """

    schema: Literal["shardwright.outcome/1"]
    code: int
    reason: str
    step: int | None
    world_size: int
    ranks: tuple[RankOutcome, ...]
    command: tuple[str, ...]
    seconds: float
    versions: dict[str, str]


def encode_outcome(outcome: Outcome) -> bytes:
    """Indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n"


def decode_outcome(data: bytes, where: str = "outcome.json") -> Outcome:
    """The inverse of :func:`encode_outcome`; ``where`` names the file in the InputError."""
    try:
        return decode_json(data, Outcome)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(expected(where, f"JSON of {OUTCOME_SCHEMA}", str(error))) from None


def write_status(folder: Path, status: RankOutcome) -> None:
    """A worker's last word, written just before it exits."""
    write_atomically(status_file(folder, status.rank), msgspec.json.encode(status))


def read_status(folder: Path, rank: int) -> RankOutcome | None:
    """None when the rank has not spoken its last word, or not one that can be read."""
    try:
        return decode_json(status_file(folder, rank).read_bytes(), RankOutcome)
    except (OSError, msgspec.DecodeError):
        return None
