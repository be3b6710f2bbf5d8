"""A worker of a run: what it does beside its work, so that the launcher knows how it ended.

It shows a heartbeat, ends soon after its launcher is gone, and leaves its last word:
``rank-R.status.json``, and ``rank-R.log`` where the error was not foreseen. A worker module is::

    def body(heartbeat: Heartbeat) -> None:
        import torch.distributed as dist

        store = dist.FileStore(str(store_file(folder)), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        ...
        heartbeat.begin("reduce", step=7)  # just before each collective
        dist.all_reduce(gradient)

    sys.exit(run_worker(folder, rank, body))
"""

# A rank tells how it ended, because torchrun turns every code into 1 and its summary names whoever
# exits first. Whether an error is a peer's is read off its text: gloo and NCCL have no types for
# it, and the phrases differ between versions, so new ones are added below rather than guessed at.

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Final

from shardwright.core import errors
from shardwright.launcher.exhausted import address_space, out_of_memory
from shardwright.launcher.folder import LONGEST_MARK, MARK, lock_file, log_file
from shardwright.launcher.heartbeat import STOPPED, Heartbeat, RankOutcome, State, write_status


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
        # Not sys.exit, which would only end this thread; the main one may be inside of a collective
        # for ever.
        os._exit(errors.EXIT_RUN_FAILED)

    threading.Thread(target=watch, name="guard_parent", daemon=True).start()


def _launcher_gone(folder: Path, mark: str) -> bool:
    """True when the launcher of this run does not hold the folder any more."""
    try:
        descriptor = os.open(lock_file(folder), os.O_RDONLY)
    except OSError:
        return False
    try:
        if os.pread(descriptor, LONGEST_MARK, 0) != mark.encode():
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


Body = Callable[[Heartbeat], None]
NOBODY: Final[Mapping[int, Body]] = MappingProxyType({})


def run_worker(folder: Path, rank: int, body: Body, others: Mapping[int, Body] = NOBODY) -> int:
    """Run ``body`` and leave this rank's last word; the return value is for ``sys.exit``.

    ``others`` are ranks of this process, too, each with a thread of its own.

    ShardwrightError: failed with its code (75: stopped). An error of torch.distributed that
    comes from another rank: failed with 5, ``peer`` true. SIGTERM: stopped with 75. Ctrl-C:
    stopped with 130. Memory exhausted: 5. Anything else: 1, and the traceback in ``rank-R.log``.
    """
    if sys.flags.safe_path:  # a user's module may import others of the folder later, after ours
        sys.path.append(os.getcwd())
    # First of all a sign of life and the guard: an import of torch may take a minute, in which the
    # launcher may die.
    heartbeat = Heartbeat.create(folder, rank)
    guard_parent(folder)
    signal.signal(signal.SIGTERM, _stop)
    codes: dict[int, int] = {}

    def run(rank: int, heartbeat: Heartbeat, body: Body) -> None:
        codes[rank] = _last_word(folder, rank, heartbeat, body)

    threads = [
        threading.Thread(
            target=run, args=(other, Heartbeat.create(folder, other), each), daemon=True
        )
        for other, each in others.items()
    ]
    for thread in threads:
        thread.start()
    run(rank, heartbeat, body)
    for thread in threads:
        thread.join()
    return next(filter(None, codes.values()), 0)


def _last_word(folder: Path, rank: int, heartbeat: Heartbeat, body: Body) -> int:
    """Run ``body`` and leave the rank's last word; its exit code."""
    try:
        status = _ended(heartbeat, rank, body, log_file(folder, rank))
    except StopRequestedError:
        status = _status(heartbeat, rank, "stopped", errors.EXIT_PREEMPTED, STOPPED)
    _ignore_term()
    with suppress(errors.InputError):  # no folder may be there any more to write it in
        write_status(folder, status)
    return status.code or 0


def _ignore_term() -> None:
    """Of ranks that are threads the first one hears signals."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _ended(heartbeat: Heartbeat, rank: int, body: Body, log: Path) -> RankOutcome:
    try:
        body(heartbeat)
        heartbeat.mark("done")
        return _status(heartbeat, rank, "finished", 0, "finished")
    except KeyboardInterrupt:
        return _status(heartbeat, rank, "stopped", errors.EXIT_INTERRUPTED, "stopped by Ctrl-C")
    except SystemExit as end:
        code = (
            end.code if isinstance(end.code, int) else (0 if end.code is None else errors.EXIT_BUG)
        )
        state: State = "failed" if code else "finished"
        return _status(heartbeat, rank, state, code, f"exited with code {end.code or 0}")
    except Exception as error:
        # torchrun stops the other ranks of one that failed; what they have to say comes first
        _ignore_term()
        if not isinstance(error, errors.StoppedError):
            with suppress(OSError):
                log.write_text(traceback.format_exc())
        return _failure(heartbeat, rank, error)


def _status(
    heartbeat: Heartbeat, rank: int, state: State, code: int, message: str, peer: bool = False
) -> RankOutcome:
    last = heartbeat.reading()
    return RankOutcome(rank, state, code, last.step, last.phase, message, peer)


def _failure(heartbeat: Heartbeat, rank: int, error: Exception) -> RankOutcome:
    line = first_line(str(error)) or "no message"
    peer = from_a_peer(error) or isinstance(error, errors.PeerError)
    if isinstance(error, errors.ShardwrightError):
        state: State = "stopped" if error.exit_code == errors.EXIT_PREEMPTED else "failed"
        return _status(heartbeat, rank, state, error.exit_code, line, peer)
    last = heartbeat.reading()
    where = last.phase if last.step is None else f"step {last.step}, {last.phase}"
    if peer:
        text = f"lost its peers at {where}, collective {last.sequence}: {line}"
        return _status(heartbeat, rank, "failed", errors.EXIT_RUN_FAILED, text, peer=True)
    if out_of_memory(error):
        text = f"ran out of memory at {where}: {line}{address_space()}"
        return _status(heartbeat, rank, "failed", errors.EXIT_RUN_FAILED, text)
    return _status(heartbeat, rank, "failed", errors.EXIT_BUG, f"{type(error).__name__}: {line}")


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
    """True when ``error``, or what caused it, is torch.distributed missing a peer."""
    while error is not None:
        if isinstance(error, RuntimeError) and not isinstance(error, errors.ShardwrightError):
            names = {kind.__name__ for kind in type(error).__mro__}
            text = str(error).lower()
            if "DistError" in names or any(mark in text for mark in _PEER_TEXTS):
                return True
        error = error.__cause__
    return False


def first_line(text: str) -> str:
    """The first line that says something, without what gloo puts before and after it."""
    lines = (re.sub(r"^\[[^\]]*:\d+\]", "", line).strip() for line in text.splitlines())
    first = next((line for line in lines if line), "")
    return first.partition(". This is typically caused by")[0]
