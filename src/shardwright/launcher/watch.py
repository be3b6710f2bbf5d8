"""A look at every rank of a run: its heartbeat, its last word, its process; is there trouble?

A run's processes are found by their mark (an environment variable with a random value), asked how
they are, and ended.
"""

# A look never blocks and never raises: files come and go while ranks start and die. The process is
# looked at before the status, because a rank writes its last word before it ends; the other way
# round a rank that ended in between would be taken for one that died without a word. Processes are
# found by the run's mark in their environment, so that those without a heartbeat yet, and those
# whose parent is gone, are ended too; where there is no /proc (macOS) only pids from heartbeats
# are known.

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from shardwright.launcher.folder import MARK, heartbeat_file, status_file
from shardwright.launcher.heartbeat import Beat, RankOutcome, State, read_heartbeat, read_status

_PROC: Final = Path("/proc")
_LAST_WORDS: Final = 8.0  # seconds for torchrun to say how its workers ended, on a busy machine

Process = Literal["alive", "stopped", "gone", "unknown"]


def process_state(pid: int) -> Process:
    """A zombie is gone: it will not say anything any more."""
    if not _PROC.joinpath("self").exists():
        return "alive" if _exists(pid) else "gone"
    letter, _ = _stat(pid)
    if letter in "ZX":
        return "gone"
    return "stopped" if letter in "Tt" else "alive"


def run_processes(mark: str, known: Iterable[int] = ()) -> set[int]:
    """The pids of the living processes that carry ``mark`` (else: those of ``known``)."""
    if not _PROC.joinpath("self").exists():
        return {pid for pid in known if _exists(pid)}
    wanted = f"{MARK}={mark}".encode()
    return {pid for pid in _pids() if wanted in _environment(pid)}


def worker_pids(torchrun: int, mark: str) -> dict[int, int]:
    """rank -> pid of the workers that run now, whether or not they have a heartbeat."""
    wanted = f"{MARK}={mark}".encode()
    workers = {}
    for pid in _pids():
        variables = _environment(pid)
        # A worker's own children (data loaders) carry the mark and RANK, too: only torchrun's are
        # ranks.
        if wanted not in variables or _stat(pid)[1] != torchrun:
            continue
        for variable in variables:
            if variable.startswith(b"RANK="):
                workers[int(variable[5:])] = pid
    return workers


def end_run(
    torchrun: subprocess.Popen[bytes],
    mark: str,
    known: Iterable[int],
    first: signal.Signals | None,
    grace: float,
    hurry: Callable[[], bool] = lambda: False,
) -> set[int]:
    """End every process of the run; returns the pids that even SIGKILL did not end.

    ``first`` goes to torchrun, which passes it on to every worker (None: torchrun is closing
    the run by itself, because a worker failed). After ``grace`` seconds the workers are killed,
    stopped ones included, and torchrun a moment later: so its log still has their signals.
    ``hurry`` cuts the grace short.
    """
    known = set(known)
    if torchrun.poll() is not None:
        _send(run_processes(mark, known), signal.SIGTERM)
    elif first is not None:
        torchrun.send_signal(first)
    # Workers before torchrun: it writes down how they ended, and is the only one who knows.
    _wait_until_gone(torchrun, mark, known, grace, hurry)
    _send(run_processes(mark, known) - {torchrun.pid}, signal.SIGKILL)
    try:
        torchrun.wait(_LAST_WORDS)
    except subprocess.TimeoutExpired:
        torchrun.kill()
    deadline = time.monotonic() + 5.0
    while (left := run_processes(mark, known)) and time.monotonic() < deadline:
        _send(left, signal.SIGKILL)
        torchrun.poll()
        time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        torchrun.wait(5.0)  # a killed process is no zombie at once
    return left


def _wait_until_gone(
    torchrun: subprocess.Popen[bytes],
    mark: str,
    known: set[int],
    grace: float,
    hurry: Callable[[], bool],
) -> None:
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and not hurry():
        if not run_processes(mark, known) - {torchrun.pid} and torchrun.poll() is not None:
            return
        time.sleep(0.05)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _pids() -> list[int]:
    try:
        return [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()]
    except OSError:
        return []


def _environment(pid: int) -> list[bytes]:
    """Empty for zombies and for other people's processes."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _stat(pid: int) -> tuple[str, int]:
    """The state letter and the parent's pid; ``("X", 0)`` for a process that is not there."""
    try:
        # Behind the last bracket: a process's name stands in brackets and may have blanks and
        # brackets itself.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[1])


_SCAN: Final = 0.5  # seconds between searches for workers that have no heartbeat yet


@dataclass(frozen=True, slots=True)
class RankView:
    """What the launcher sees of one rank: ``quiet`` is how many seconds its heartbeat stood still,
    ``spoke`` when its status was written (seconds, any origin; 0 without one)."""

    rank: int
    beat: Beat | None = None
    status: RankOutcome | None = None
    process: Process = "unknown"
    quiet: float = 0.0
    spoke: float = 0.0

    @property
    def finished(self) -> bool:
        return self.ended_as("finished")

    @property
    def lost(self) -> bool:
        return self.status is None and self.process == "gone"

    @property
    def lost_its_peers(self) -> bool:
        """It failed, but only because another rank did."""
        return self.status is not None and self.status.peer

    @property
    def message(self) -> str:
        return "" if self.status is None else self.status.message

    @property
    def sequence(self) -> int:
        return -1 if self.beat is None else self.beat.sequence

    def ended_as(self, state: State) -> bool:
        """True where its last word says so."""
        return self.status is not None and self.status.state == state


def in_trouble(views: Sequence[RankView], timeout: float, setup_timeout: float) -> bool:
    """True when the run cannot go on by itself. Everybody's silence counts, not one rank's:
    a rank that hangs soon makes the others wait, and one that works alone for long is no fault.
    """
    running = [view for view in views if not view.finished]
    if any(view.status is not None or view.lost for view in running):
        return True
    starting = any(v.beat is None or v.beat.phase in ("setup", "load") for v in running)
    limit = max(timeout, setup_timeout) if starting else timeout
    return bool(running) and min(view.quiet for view in running) > limit


class RunWatch:
    """Remembers when each heartbeat last changed, by this process's own clock. ``in_one_process``
    are ranks that are threads of torchrun's only worker."""

    def __init__(
        self,
        folder: Path,
        world_size: int,
        torchrun: subprocess.Popen[bytes],
        mark: str,
        *,
        in_one_process: bool = False,
    ) -> None:
        self.folder = folder
        self.in_one_process = in_one_process
        self.world_size = world_size
        self.torchrun = torchrun
        self.mark = mark
        self._pids: dict[int, int] = {}
        self._last: dict[int, Beat | None] = {}
        self._moved = dict.fromkeys(range(world_size), time.monotonic())
        self._next_scan = 0.0

    def look(self) -> list[RankView]:
        """One view per rank, in order."""
        now = time.monotonic()
        if len(self._pids) < self.world_size and now >= self._next_scan:
            self._next_scan = now + _SCAN
            # Heartbeats win: they name their own pid.
            self._pids = worker_pids(self.torchrun.pid, self.mark) | self._pids
        return [self._view(rank, now) for rank in range(self.world_size)]

    def pids(self) -> set[int]:
        """The workers seen so far."""
        return set(self._pids.values())

    def exits(self, log: str) -> dict[int, int]:
        """rank -> exit code of the ranks whose end is in torchrun's ``log``."""
        found = exits_in(log)
        if self.in_one_process and found:
            return dict.fromkeys(range(self.world_size), found[0])
        return found

    def output(self, rank: int) -> Path | None:
        """The rank's stderr, as torchrun keeps it (one node: local rank = rank)."""
        worker = 0 if self.in_one_process else rank
        paths = self.folder.glob(f"logs/{self.mark}_*/attempt_0/{worker}/stderr.log")
        return next(iter(paths), None)

    def _view(self, rank: int, now: float) -> RankView:
        before = self._last.get(rank)
        beat = read_heartbeat(heartbeat_file(self.folder, rank)) or before  # its file may be gone
        if beat is not None:
            self._pids[rank] = beat.pid
        if beat != before:
            self._last[rank], self._moved[rank] = beat, now
        # the process first: a status is written before its process ends
        pid = self._pids.get(rank)
        process = "unknown" if pid is None else process_state(pid)
        status = read_status(self.folder, rank)
        spoke = 0.0
        with contextlib.suppress(OSError):
            spoke = status_file(self.folder, rank).stat().st_mtime
        return RankView(rank, beat, status, process, now - self._moved[rank], spoke)


_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_SUMMARY = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*(-?\d+)")


def exits_in(log: str) -> dict[int, int]:
    """rank -> exit code (minus the signal) of the workers whose end is in torchrun's log."""
    found = {int(rank): int(code) for rank, code in _SUMMARY.findall(log)}
    return found | {int(rank): int(code) for code, rank in _FAILED.findall(log)}
