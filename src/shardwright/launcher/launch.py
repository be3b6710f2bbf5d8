"""Starts torchrun for one run on this machine, watches every rank, and says how it ended.

What listens where: nothing outside loopback, as long as the workers take their store from
``folder.store_file``. torchrun's rendezvous is a file (``store_type=file``), it starts no TCPStore
of its own (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``), the workers' store is a file, and gloo's
and NCCL's sockets are bound to the loopback interface. A TCPStore listens on every interface
whatever address it is given, so a worker that uses ``env://`` opens one such port (in rank 0).

In the run folder: ``outcome.json``, ``torchrun.log``, the workers' output under ``logs/``,
``rank-R.pulse`` and ``rank-R.status.json`` (see :mod:`shardwright.launcher.worker`).
"""

# No process may be left, whatever happens: one that is would hold a device, a port or the folder,
# and the next run fails for no visible reason. So a run has a number that every process of it
# carries in its environment, the launcher holds a lock that ends with it, and workers that see the
# lock go end by themselves. Nothing listens outside of loopback, for whoever reaches such a port
# is a rank.

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Final, TextIO

from shardwright.core.document import write_atomically
from shardwright.core.errors import InputError, RunError
from shardwright.launcher.ending import End, RunOutcome, encode_outcome, outcome_of, without_folder
from shardwright.launcher.folder import (
    LONGEST_MARK,
    MARK,
    command_file,
    files_of_ranks,
    lock_file,
    outcome_file,
    progress_file,
)
from shardwright.launcher.progress import ProgressReader, Writer, writer_for
from shardwright.launcher.watch import RunWatch, end_run, in_trouble, run_processes

_TICK: Final = 0.1
_LISTEN: Final = 0.5  # after the first sign of trouble: what the others have to say
_LEAVE: Final = 15.0  # for torchrun to end once every rank has finished
_GRACE: Final = 2.0  # for the ranks to end by themselves once the run has failed
_LAST_WORKERS: Final = 10.0  # for the workers of a launcher that was killed to end
_STORES: Final = ("rendezvous", "store")
_PACKAGES: Final = ("shardwright", "torch", "numpy", "msgspec")


@dataclass(frozen=True)
class Launch:
    """One run: ``python -m module arguments`` on ``world_size`` ranks, files in ``folder``. Every
    rank is a process, or all of them are ``in_one_process``.

    ``timeout``: seconds without a sign of life of any rank before the run is ended;
    ``setup_timeout``: the same while a rank is still starting or loading; ``stop_grace``: seconds
    the ranks have to save and end after SIGTERM, and after Ctrl-C if the run ``saves``.
    """

    module: str
    arguments: tuple[str, ...]
    world_size: int
    folder: Path
    timeout: float = 60.0
    setup_timeout: float = 300.0
    stop_grace: float = 30.0
    saves: bool = False
    in_one_process: bool = False


def torchrun_command(launch: Launch, mark: str = "shardwright") -> list[str]:
    """The command line that is run; ``mark`` names the run in torchrun's logs."""
    folder = launch.folder.absolute()
    return [
        sys.executable,
        "-m",
        # As a module of this very interpreter: a torchrun on the PATH may be of another
        # environment.
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={1 if launch.in_one_process else launch.world_size}",
        # Restarts are the session's: torchrun would start the same ranks again without --resume.
        "--max-restarts=0",
        "--monitor-interval=0.2",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={folder / 'rendezvous'}",
        f"--rdzv-id={mark}",
        "--local-addr=127.0.0.1",
        f"--log-dir={folder / 'logs'}",
        # Both streams into files: what a rank says last is read from there when it ended without a
        # word.
        "--redirects=3",
        "-m",
        launch.module,
        *launch.arguments,
    ]


def loopback_environment(world_size: int) -> dict[str, str]:
    """What is set for the run on top of the environment; the user's OMP_NUM_THREADS holds. A file
    in the working directory does not stand in the way of a module of Python's own."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    # torchrun would set 1 and say so at length; cores that this process may use, not all that there
    # are.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // world_size))
    return {
        "GLOO_SOCKET_IFNAME": loopback,
        "TP_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "MASTER_ADDR": "127.0.0.1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": threads,
        # A file called random.py or queue.py in the folder would be imported in place of Python's
        # own.
        "PYTHONSAFEPATH": "1",
    }


def launch(
    request: Launch, stream: TextIO | None = None, prepare: Callable[[], None] | None = None
) -> RunOutcome:
    """Run to the end, whatever that is; ``outcome.json`` is written and no process is left.

    Ends within ``timeout`` (or ``setup_timeout``, ``stop_grace``) and about 10 s more. Ctrl-C
    and SIGTERM end the run (130; 75 when every rank stopped in order), a second one at once.
    ``prepare`` runs once the folder is this run's own and before anything in it changes; a signal
    ends it as it ends any program. Messages go to ``stream`` (stderr). A folder that is removed
    meanwhile ends the run, saved if it ``saves`` (5). InputError: the folder is in use or cannot be
    written.
    """
    mark = secrets.token_hex(6)
    with hold(request.folder, mark) as is_there:
        if prepare:
            prepare()
        with _signals() as caught:
            return _launched(request, stream or sys.stderr, mark, caught, is_there)


def _launched(
    request: Launch, stream: TextIO, mark: str, caught: list[int], is_there: Callable[[], bool]
) -> RunOutcome:
    """Start torchrun in a folder that is held, and see it to its end."""
    if not is_there():
        raise RunError(without_folder(request.folder, " before it began"))
    command = torchrun_command(request, mark)
    extra = loopback_environment(request.world_size)
    _clear(request)
    settings = " ".join(f"{key}={value}" for key, value in extra.items())
    command_file(request.folder).write_text(f"{settings} {shlex.join(command)}\n")
    started = time.monotonic()
    with (request.folder / "torchrun.log").open("wb") as log:
        torchrun = subprocess.Popen(
            command,
            env={**os.environ, **extra, MARK: mark},
            # A worker that reads from the terminal would hang the run.
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C in a terminal goes to the whole group: torchrun and its workers would end
            # before the launcher could ask them to save.
            start_new_session=True,
        )
    watch = RunWatch(
        request.folder, request.world_size, torchrun, mark, in_one_process=request.in_one_process
    )
    try:
        end = _watched(request, watch, caught, writer_for(stream), is_there)
    except BaseException:
        # Whatever happens here, no process may be left.
        end_run(torchrun, mark, watch.pids(), None, 0.0)
        raise
    seconds = time.monotonic() - started
    outcome = outcome_of(end, watch, tuple(command), seconds, versions())
    if not end.gone:
        write_atomically(outcome_file(request.folder), encode_outcome(outcome))
    elif not lock_file(request.folder).exists():  # else it is another run's already
        # What became of the folder may be no folder; what ranks saved can be gone on from in one.
        with contextlib.suppress(InputError, OSError):
            write_atomically(outcome_file(request.folder), encode_outcome(outcome))
            lock_file(request.folder).touch()
    return outcome


def _watched(
    request: Launch,
    watch: RunWatch,
    caught: list[int],
    display: Writer,
    is_there: Callable[[], bool],
) -> End:
    """Wait for the end, and see to it that it is one."""
    progress = ProgressReader(request.folder)
    listen_by = leave_by = float("inf")
    # One rank's error makes others fail, and the first to be seen need not be the first that
    # failed: a moment is left for last words (_LISTEN) before blame is decided on what was seen by
    # then.
    while True:
        views = watch.look()
        for entry in progress.new():
            display.update(entry)
        now = time.monotonic()
        # Ranks are done but torchrun is not: it gets a while to end by itself, so that its log is
        # whole.
        if all(view.finished for view in views):
            leave_by = min(leave_by, now + _LEAVE)
        elif in_trouble(views, request.timeout, request.setup_timeout):
            listen_by = min(listen_by, now + _LISTEN)
        if caught or watch.torchrun.poll() is not None or now > min(listen_by, leave_by):
            break
        if not is_there():
            break
        time.sleep(_TICK)
    for entry in progress.new():
        display.update(entry)
    display.close()
    return _end(request, watch, caught, gone=not is_there())


def _end(request: Launch, watch: RunWatch, caught: list[int], *, gone: bool = False) -> End:
    stopped_by = caught[0] if caught else None
    code = watch.torchrun.poll()
    views = watch.look()
    # None where a rank failed: torchrun is then closing the run by itself, and its log is to say
    # which.
    first, grace = None, _GRACE
    if stopped_by is not None:
        first = signal.SIGINT if stopped_by == signal.SIGINT else signal.SIGTERM
        ends = stopped_by == signal.SIGINT and not request.saves
        grace = _GRACE if ends else request.stop_grace
    elif gone:  # what ranks hold can be saved yet
        first, grace = signal.SIGTERM, request.stop_grace if request.saves else _GRACE
    elif all(view.status is None and not view.lost for view in views):
        first = signal.SIGTERM
    left = end_run(watch.torchrun, watch.mark, watch.pids(), first, grace, lambda: len(caught) > 1)
    return End(tuple(views), code, stopped_by, tuple(sorted(left)), gone)


@contextlib.contextmanager
def hold(folder: Path, mark: str) -> Iterator[Callable[[], bool]]:
    """Hold the folder: one launcher at a time, and workers see when theirs is gone. ``mark`` is the
    run's number, 12 hexadecimal digits. What is given tells whether the folder is still there: it
    may be removed, emptied or moved meanwhile. InputError: it is in use or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not truncated: what is in it is the number of the run before.
        descriptor = os.open(lock_file(folder), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _not_to_write_in(folder, error) from None
    try:
        # flock and no file with a pid: the system gives it back however the launcher ends, and a
        # pid may be another process's by then.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        found, remedy = "one with a run in progress", "Wait for it or choose another folder."
        raise InputError(str(folder), "a folder no run is using", found, remedy) from None
    try:
        try:
            _take_over(folder, descriptor, mark)
        except OSError as error:
            raise _not_to_write_in(folder, error) from None
        yield partial(_is_held, lock_file(folder), descriptor)
    finally:
        os.close(descriptor)


def _is_held(lock: Path, descriptor: int) -> bool:
    """Whether the file is there that was locked; one that cannot be looked at now may be."""
    try:
        # By device and inode: a folder that was removed and made anew has another file under the
        # same name.
        return os.path.samestat(lock.stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _not_to_write_in(folder: Path, error: OSError) -> InputError:
    return InputError(str(folder), "a folder to write in", error.strerror or "none")


def _take_over(folder: Path, descriptor: int, mark: str) -> None:
    """Write the run's number into the lock, and wait for workers of the last one to see it and end.

    There are some if its launcher was killed a moment ago. InputError: they do not end.
    """
    # The lock is free, so its launcher is dead; its workers may live for another moment, and would
    # write into files of this run. The new number makes them end, and they are waited for.
    before = os.pread(descriptor, LONGEST_MARK, 0)
    if before and not re.fullmatch(rb"[0-9a-f]{12}", before):
        path = str(lock_file(folder))
        raise InputError(path, "the lock of a run", "another file", "Move it away.")
    _write_mark(descriptor, mark.encode())
    deadline = time.monotonic() + _LAST_WORKERS
    while before and (left := run_processes(before.decode()) - {os.getpid()}):
        if time.monotonic() > deadline:
            _write_mark(descriptor, before)
            pids = ", ".join(map(str, sorted(left)))
            found = f"one with processes of a run whose launcher is gone: {pids}"
            remedy = "End them or choose another folder."
            raise InputError(str(folder), "a folder no run is using", found, remedy)
        time.sleep(_TICK)


def _write_mark(descriptor: int, mark: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, mark, 0)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The SIGINT, SIGTERM and SIGHUP caught so far, in order (none outside the main thread)."""
    caught: list[int] = []
    # Only the main thread may set handlers; elsewhere a run ends by its own means.
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, _frame: FrameType | None) -> None:
        # Nothing but this: a handler runs between any two bytecodes, and the loop looks every tick.
        caught.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _clear(request: Launch) -> None:
    """Take away what an earlier run in this folder left and this one would mistake for its own."""
    paths = [outcome_file(request.folder), progress_file(request.folder)]
    paths.extend(request.folder / name for name in _STORES)
    paths.extend(files_of_ranks(request.folder, "pulse", "status.json", "log"))
    for path in paths:
        path.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Python's and the packages' versions, from their metadata (nothing is imported)."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
