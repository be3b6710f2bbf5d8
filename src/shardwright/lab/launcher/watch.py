"""Looking at every rank of a running launch: its pulse, its status, its process."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path
from typing import Final

from shardwright.lab.launcher.processes import process_state, worker_pids
from shardwright.lab.launcher.verdict import RankView
from shardwright.runtime.pulse import PulseReading, pulse_file, read_pulse, read_status, status_file

_SCAN: Final = 0.5  # seconds between searches for workers that have no pulse yet


class Watch:
    """Remembers when each pulse last changed, by this process's own clock."""

    def __init__(
        self, folder: Path, world_size: int, torchrun: subprocess.Popen[bytes], mark: str
    ) -> None:
        self.folder = folder
        self.world_size = world_size
        self.torchrun = torchrun
        self.mark = mark
        self._pids: dict[int, int] = {}
        self._last: dict[int, PulseReading | None] = {}
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

    def output(self, rank: int) -> Path | None:
        """The rank's stderr, as torchrun keeps it (one node: local rank = rank)."""
        paths = self.folder.glob(f"logs/{self.mark}_*/attempt_0/{rank}/stderr.log")
        return next(iter(paths), None)

    def _view(self, rank: int, now: float) -> RankView:
        pulse = read_pulse(pulse_file(self.folder, rank))
        if pulse is not None:
            self._pids[rank] = pulse.pid
        if pulse != self._last.get(rank):
            self._last[rank], self._moved[rank] = pulse, now
        # the process first: a status is written before its process ends
        pid = self._pids.get(rank)
        process = "unknown" if pid is None else process_state(pid)
        status = read_status(self.folder, rank)
        spoke = 0.0
        with contextlib.suppress(OSError):
            spoke = status_file(self.folder, rank).stat().st_mtime
        return RankView(rank, pulse, status, process, now - self._moved[rank], spoke)
