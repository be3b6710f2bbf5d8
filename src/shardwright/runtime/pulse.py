"""What a worker tells its launcher: a pulse, its last word, and rank 0's progress.

Everything is a file in the run folder, so it survives the death of either side and needs no
thread, socket or import of torch. A worker module looks like this::

    def body(pulse: Pulse) -> None:
        import torch.distributed as dist

        store = dist.FileStore(str(store_file(folder)), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        ...
        pulse.begin("reduce", step=7)  # just before each collective
        dist.all_reduce(gradient)

    sys.exit(run_worker(folder, rank, body))
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec

from shardwright.core import timeline
from shardwright.core.document import write_atomically
from shardwright.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_RUN_FAILED,
    PeerError,
    ShardwrightError,
)
from shardwright.core.outcome import RankOutcome, State

PHASES: Final = (*timeline.PHASES, "evaluate", "done")
_INDEX: Final = {phase: index for index, phase in enumerate(PHASES)}

MARK: Final = "SHARDWRIGHT_RUN"  # environment variable with the number of the run, if launched

_SIZE: Final = 64
_MAGIC: Final = b"SWPULSE1"
_HEAD: Final = struct.Struct("@8sqq")  # magic, pid, reserved
_BEAT: Final = struct.Struct("@qqqd")  # step (-1: none yet), sequence, phase index, monotonic time
_NO_STEP: Final = -1


@dataclass(frozen=True, slots=True)
class PulseReading:
    """One look at a rank. ``sequence`` counts the collectives it has begun; ``time`` is its
    ``time.monotonic()``, comparable between processes of one machine only."""

    pid: int
    step: int | None
    sequence: int
    phase: str
    time: float


class Pulse:
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
    def create(cls, folder: Path, rank: int) -> Pulse:
        """Make ``rank-R.pulse`` anew, complete from the first moment it can be seen."""
        path = pulse_file(folder, rank)
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
        _BEAT.pack_into(self._memory, _HEAD.size, *beat)

    def reading(self) -> PulseReading:
        """What a launcher sees now."""
        reading = _unpack(bytes(self._memory))
        assert reading is not None
        return reading


def pulse_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pulse"


def status_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.status.json"


def log_file(folder: Path, rank: int) -> Path:
    """Where a worker leaves the traceback of an error it did not expect."""
    return folder / f"rank-{rank}.log"


def store_file(folder: Path) -> Path:
    """The file for ``torch.distributed.FileStore``: a store that listens on no port at all.

    (A TCPStore, as ``env://`` makes one, listens on every interface of the machine.)
    """
    return folder / "store"


def lock_file(folder: Path) -> Path:
    """The file a launcher keeps locked as long as it lives; it holds the number of its run."""
    return folder / "launcher.lock"


def progress_file(folder: Path) -> Path:
    return folder / "progress.jsonl"


def read_pulse(path: Path) -> PulseReading | None:
    """The pulse in ``path``, None when there is none (yet)."""
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


def _unpack(data: bytes) -> PulseReading | None:
    if len(data) < _SIZE:
        return None
    magic, pid, _ = _HEAD.unpack_from(data)
    step, sequence, index, at = _BEAT.unpack_from(data, _HEAD.size)
    if magic != _MAGIC or not 0 <= index < len(PHASES):
        return None
    return PulseReading(pid, None if step == _NO_STEP else step, sequence, PHASES[index], at)


def write_status(folder: Path, status: RankOutcome) -> None:
    """A worker's last word, written just before it exits."""
    write_atomically(status_file(folder, status.rank), msgspec.json.encode(status))


def read_status(folder: Path, rank: int) -> RankOutcome | None:
    """None when the rank has not spoken its last word, or not one that can be read."""
    try:
        return msgspec.json.decode(status_file(folder, rank).read_bytes(), type=RankOutcome)
    except (OSError, msgspec.DecodeError):
        return None


class ProgressLog:
    """Rank 0's progress, one JSON object a line: ``step, steps, loss`` and what else there is.

    ``text``, when given, is what a person reads instead of the loss.
    """

    def __init__(self, folder: Path) -> None:
        self._path = progress_file(folder)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Opened and closed each time: call it per logged step, not per microsecond."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")


class ProgressReader:
    """Reads what a :class:`ProgressLog` appended since the last look."""

    def __init__(self, folder: Path) -> None:
        self._path = progress_file(folder)
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Whole lines only; a line that is no JSON object is passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        entries = []
        for line in whole.splitlines():
            try:
                entries.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:
                continue
        return entries


def guard_parent(folder: Path, interval: float = 0.5) -> None:
    """End this process (code 5) soon after its parent or its launcher is gone.

    The parent is watched by its pid, the launcher by the lock it holds and the number in it, so no
    signal, no reused pid and no other launcher can fool it. Works while the main thread waits in a
    collective.
    """
    parent, mark = os.getppid(), os.environ.get(MARK)

    def watch() -> None:
        while os.getppid() == parent and not (mark and _launcher_gone(folder, mark)):
            time.sleep(interval)
        os._exit(EXIT_RUN_FAILED)

    threading.Thread(target=watch, name="guard_parent", daemon=True).start()


def _launcher_gone(folder: Path, mark: str) -> bool:
    """True when the launcher of this run does not hold the folder any more."""
    try:
        descriptor = os.open(lock_file(folder), os.O_RDONLY)
    except OSError:
        return False
    try:
        if os.pread(descriptor, _SIZE, 0) != mark.encode():
            return True
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


class StopRequestedError(BaseException):
    """Raised in the body by SIGTERM, unless the body has put its own handler there."""


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise StopRequestedError


def run_worker(folder: Path, rank: int, body: Callable[[Pulse], None]) -> int:
    """Run ``body`` and leave this rank's last word; the return value is for ``sys.exit``.

    ShardwrightError: failed with its code (75: stopped). An error of torch.distributed that
    comes from another rank: failed with 5, ``peer`` true. SIGTERM: stopped with 75. Ctrl-C:
    stopped with 130. Memory exhausted: 5. Anything else: 1, and the traceback in ``rank-R.log``.
    """
    pulse = Pulse.create(folder, rank)
    guard_parent(folder)
    signal.signal(signal.SIGTERM, _stop)
    try:
        status = _ended(pulse, rank, body, log_file(folder, rank))
    except StopRequestedError:
        status = _status(pulse, rank, "stopped", EXIT_PREEMPTED, "stopped by SIGTERM")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_status(folder, status)
    return status.code or 0


def _ended(pulse: Pulse, rank: int, body: Callable[[Pulse], None], log: Path) -> RankOutcome:
    try:
        body(pulse)
        pulse.mark("done")
        return _status(pulse, rank, "finished", 0, "finished")
    except KeyboardInterrupt:
        return _status(pulse, rank, "stopped", EXIT_INTERRUPTED, "stopped by Ctrl-C")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else (0 if end.code is None else EXIT_BUG)
        state: State = "failed" if code else "finished"
        return _status(pulse, rank, state, code, f"exited with code {end.code or 0}")
    except Exception as error:
        # torchrun stops the other ranks of one that failed; what they have to say comes first
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        log.write_text(traceback.format_exc())
        return _failure(pulse, rank, error)


def _status(
    pulse: Pulse, rank: int, state: State, code: int, message: str, peer: bool = False
) -> RankOutcome:
    last = pulse.reading()
    return RankOutcome(rank, state, code, last.step, last.phase, message, peer)


def _failure(pulse: Pulse, rank: int, error: Exception) -> RankOutcome:
    line = first_line(str(error)) or "no message"
    peer = from_a_peer(error) or isinstance(error, PeerError)
    if isinstance(error, ShardwrightError):
        state: State = "stopped" if error.exit_code == EXIT_PREEMPTED else "failed"
        return _status(pulse, rank, state, error.exit_code, line, peer)
    last = pulse.reading()
    where = last.phase if last.step is None else f"step {last.step}, {last.phase}"
    if peer:
        text = f"lost its peers at {where}, collective {last.sequence}: {line}"
        return _status(pulse, rank, "failed", EXIT_RUN_FAILED, text, peer=True)
    if out_of_memory(error):
        text = f"ran out of memory at {where}: {line}"
        return _status(pulse, rank, "failed", EXIT_RUN_FAILED, text)
    return _status(pulse, rank, "failed", EXIT_BUG, f"{type(error).__name__}: {line}")


_PEER_TEXTS: Final = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "timed out after",
    "wait timeout",
    "application timeout caused pair closure",
    "socket timeout",
    "monitoredbarrier",
    "connectfullmesh failed",
    "nccl communicator was aborted",
    "ncclremoteerror",
    "ncclsystemerror",
    "watchdog caught collective operation timeout",
)


def from_a_peer(error: BaseException | None) -> bool:
    """True when ``error``, or what caused it, is torch.distributed telling that a peer is gone."""
    while error is not None:
        if isinstance(error, RuntimeError) and not isinstance(error, ShardwrightError):
            names = {kind.__name__ for kind in type(error).__mro__}
            text = str(error).lower()
            if "DistError" in names or any(mark in text for mark in _PEER_TEXTS):
                return True
        error = error.__cause__
    return False


def out_of_memory(error: BaseException) -> bool:
    """True for Python's, the CPU allocator's and the device allocators' way of saying it."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in text
        or "out of memory" in text
    )


def first_line(text: str) -> str:
    """The first line that says something, without what gloo puts before and after it."""
    lines = (re.sub(r"^\[[^\]]*:\d+\]", "", line).strip() for line in text.splitlines())
    first = next((line for line in lines if line), "")
    return first.partition(". This is typically caused by")[0]
