"""A look at every rank of a run: its heartbeat, its last word, its process; is there trouble?"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardwright.launcher.folder import heartbeat_file, status_file
from shardwright.launcher.heartbeat import Beat, read_heartbeat
from shardwright.launcher.outcome import RankOutcome, State, read_status
from shardwright.launcher.processes import Process, process_state, worker_pids

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


class Watch:
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
