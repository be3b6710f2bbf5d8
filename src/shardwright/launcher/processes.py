"""The processes of one launched run: finding them, asking how they are, and ending them.

A run's processes carry a mark (an environment variable with a random value), so that the ones
no heartbeat names yet, and the ones whose parent is gone, are found too. Where the system has no
``/proc`` (macOS), only the pids known from the heartbeats are looked after.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal

from shardwright.launcher.folder import MARK

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
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[1])
