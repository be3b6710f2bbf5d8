"""Processes of Python that import nothing: forked from one that has torch already.

A rank imports for three processor seconds and torchrun for one and a half, so that a run of two
ranks would spend eight of its nine seconds on what no test is about. A process that is started here
has what one of its own interpreter has and what is looked at: a parent that waits for it, a
session, working directory, streams, command and environment, in /proc, too. Tests of starting
itself start interpreters (tests/launcher, test_launcher_faults.py, test_own_torchrun.py, README).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

from shardwright.launcher import launch

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.run",
    "shardwright.runtime.fully_shard",
    "shardwright.train.training",
    "shardwright.cli.main",
]
TEMPORARY = tempfile.gettempdir()
ROOM = "-" * 16_000  # where a child writes its own command and environment


def server() -> Any:
    """Of contexts of multiprocessing the one whose server has imported what takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, ROOM])  # no module, which it passes over
    with (  # not in a test's folders
        patch.dict(os.environ, ROOM=ROOM, TMPDIR=TEMPORARY),
        patch.object(tempfile, "tempdir", TEMPORARY),
        contextlib.chdir(Path(__file__).parents[2]),
    ):
        forkserver.ensure_running()
    return context


class Popen:
    """What is asked of a ``subprocess.Popen`` of an interpreter with a module or a script."""

    context: Any = None  # how a process that was started so starts others

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        start_new_session: bool = False,
        **_: object,
    ) -> None:
        self.args = args
        paths = []
        self.read: list[IO[str] | None] = []  # by ``communicate``
        for to in (stdout, stderr):
            own = tempfile.TemporaryFile("w+") if to == subprocess.PIPE else None  # noqa: SIM115
            path = f"/proc/{os.getpid()}/fd/{own.fileno()}" if own else getattr(to, "name", None)
            path = os.devnull if to == subprocess.DEVNULL else path and os.path.abspath(path)
            paths.append(path)
            self.read.append(own)
        given = (args, dict(env or os.environ), str(cwd or Path.cwd()), paths, start_new_session)
        self.process = (self.context or server()).Process(target=become, args=given)
        self.process.start()
        multiprocessing.process._children.discard(self.process)  # nobody waits for it at an exit
        self.pid = self.process.pid

    def poll(self) -> int | None:
        code: int | None = self.process.exitcode
        return code

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float = float("inf")) -> int:
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return code

    def communicate(self, timeout: float = float("inf")) -> tuple[str, str]:
        self.wait(timeout)
        out, errors = (_whole(own) if own else "" for own in self.read)
        return out, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


if not Path("/proc/self/stat").exists():  # interpreters of their own, where nothing can be shown
    Popen = partial(subprocess.Popen, text=True)  # type: ignore[assignment, misc]


def run(args: Sequence[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` says of it, streams as text."""
    process = Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        out, errors = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(args, process.wait(), out, errors)


def _whole(own: IO[str]) -> str:
    with own:
        own.seek(0)
        return own.read()


LAUNCHER = SimpleNamespace(Popen=Popen, DEVNULL=subprocess.DEVNULL)  # its ``subprocess``


def become(
    args: Sequence[str], env: dict[str, str], cwd: str, streams: Sequence[str | None], alone: bool
) -> None:
    """In the new process: be what would have been started."""
    if alone:
        os.setsid()
    for number, path in enumerate((os.devnull, *streams)):
        if path is not None:
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY), number)
    os.closerange(3, 4096)
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]  # its pipe is another's
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # environments may name another
    _show(args, [f"{key}={value}" for key, value in env.items()])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    words = [word for word in args[1:3] if word not in ("-m", "-u")] + list(args[3:])
    is_module, sys.argv = "-m" in args[1:3], words
    first = cwd if is_module else os.path.dirname(words[0])
    sys.path[:0] = [first, *env.get("PYTHONPATH", "").split(os.pathsep)]
    for name in ("sitecustomize", words[0]):
        sys.modules.pop(name, None)
    site.execsitecustomize()
    _start_others()
    try:
        if is_module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _start_others() -> None:
    """What the launcher and torchrun start is forked from them."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    Popen.context = multiprocessing.get_context("fork")
    subprocess_handler.Popen = Popen  # type: ignore[misc]
    launch.subprocess = LAUNCHER  # type: ignore[attr-defined]


def _show(*blocks: Sequence[str]) -> None:
    """Write command and environment where /proc/PID/cmdline and environ are read from."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for place, texts in zip((45, 47), blocks, strict=True):
        start, end = int(fields[place]), int(fields[place + 1])
        block = b"".join(os.fsencode(text) + b"\0" for text in texts)
        assert len(block) < end - start, "a command or environment that is too long for ROOM"
        ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)
