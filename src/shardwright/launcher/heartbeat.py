"""What a rank shows of itself: a heartbeat while it works, and a last word when it ends.

The heartbeat is 64 bytes of shared memory that say where it is and that it moves. The last word
is ``rank-R.status.json``. The rank writes, the launcher reads.
"""

# A file that both sides map: it outlives either side, needs no thread that a busy interpreter
# could starve and no socket that a firewall could block, and costs a microsecond before each
# collective. It is complete before it gets its name, and read until two reads agree, for writes
# are not atomic.

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from shardwright.core import timeline
from shardwright.core.document import decode_json, write_atomically
from shardwright.launcher.folder import heartbeat_file, status_file

PHASES: Final = (*timeline.PHASES, "evaluate", "done")
_INDEX: Final = {phase: index for index, phase in enumerate(PHASES)}

_SIZE: Final = 64
_MAGIC: Final = b"SWPULSE1"
_HEAD: Final = struct.Struct("@8sqq")  # magic, pid, reserved
_BEAT: Final = struct.Struct("@qqqd")  # step (-1: none yet), sequence, phase index, monotonic time
_NO_STEP: Final = -1


@dataclass(frozen=True, slots=True)
class Beat:
    """One look at a rank. ``sequence`` counts the collectives it has begun; ``time`` is its
    ``time.monotonic()``, comparable between processes of one machine only."""

    pid: int
    step: int | None
    sequence: int
    phase: str
    time: float


class Heartbeat:
    """A rank's 64 shared bytes; an update costs about a microsecond and never blocks.

    The phase names are :data:`PHASES`; another one is a KeyError.
    """

    __slots__ = ("_index", "_memory", "_sequence", "_step", "path")

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self._memory = memory
        self._step = _NO_STEP
        self._sequence = 0
        self._index = 0

    @classmethod
    def create(cls, folder: Path, rank: int) -> Heartbeat:
        """Make ``rank-R.pulse`` anew, complete from the first moment it can be seen."""
        path = heartbeat_file(folder, rank)
        # Under another name first: the launcher may look at any moment, and must not read half a
        # header.
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        beat = _BEAT.pack(_NO_STEP, 0, 0, time.monotonic())
        fresh.write_bytes((_HEAD.pack(_MAGIC, os.getpid(), 0) + beat).ljust(_SIZE, b"\0"))
        with fresh.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), _SIZE)
        fresh.rename(path)
        return cls(path, memory)

    def begin(self, phase: str | None = None, step: int | None = None) -> None:
        """Count one more collective; call it just before issuing it."""
        self._sequence += 1
        self.mark(phase, step)

    def mark(self, phase: str | None = None, step: int | None = None) -> None:
        """Show a sign of life; None keeps the phase or the step as it was."""
        if phase is not None:
            self._index = _INDEX[phase]
        if step is not None:
            self._step = step
        beat = (self._step, self._sequence, self._index, time.monotonic())
        # In place and without a lock: the reader looks twice instead, and the writer never waits.
        _BEAT.pack_into(self._memory, _HEAD.size, *beat)

    def reading(self) -> Beat:
        """What a launcher sees now."""
        reading = _unpack(bytes(self._memory))
        assert reading is not None
        return reading


def read_heartbeat(path: Path) -> Beat | None:
    """The heartbeat in ``path``, None when there is none (yet)."""
    try:
        with path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), _SIZE, 0)
            for _ in range(3):  # a writer may be in the middle of its bytes
                again = os.pread(file.fileno(), _SIZE, 0)
                if again == data:
                    break
                data = again
    except OSError:
        return None
    return _unpack(data)


def _unpack(data: bytes) -> Beat | None:
    if len(data) < _SIZE:
        return None
    magic, pid, _ = _HEAD.unpack_from(data)
    step, sequence, index, at = _BEAT.unpack_from(data, _HEAD.size)
    if magic != _MAGIC or not 0 <= index < len(PHASES):
        return None
    return Beat(pid, None if step == _NO_STEP else step, sequence, PHASES[index], at)


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


def write_status(folder: Path, status: RankOutcome) -> None:
    """A worker's last word, written just before it exits."""
    write_atomically(status_file(folder, status.rank), msgspec.json.encode(status))


def read_status(folder: Path, rank: int) -> RankOutcome | None:
    """None when the rank has not spoken its last word, or not one that can be read."""
    try:
        return decode_json(status_file(folder, rank).read_bytes(), RankOutcome)
    except (OSError, msgspec.DecodeError):
        return None
