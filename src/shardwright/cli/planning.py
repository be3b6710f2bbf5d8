"""Planning as commands do it: what takes long is heard on stderr, Ctrl-C keeps the best plan."""

# A long search is worth what it has found: the first Ctrl-C ends it with the best plan so far, and
# only the second one throws that away. The handler sets a flag and raises nothing while a search
# goes on, for an exception in the middle of it could leave a plan half made.

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TextIO

from shardwright.core.quantities import format_seconds
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job
from shardwright.job.plan import Plan
from shardwright.planner.search.watch import Watch

FIRST, LONGER = 2.0, 1.5  # seconds until the first line; by how much each waits longer
# Of estimates: seconds before the first line, between two where nobody watches, and where somebody
# does.
QUIET, EVERY, WATCHED = 2.0, 5.0, 0.2
PREPARING = "recording and pricing a step of the model"  # before there is a search
LONG = 10.0  # seconds after which a limit is worth a hint


def planned(job: Job) -> Plan:
    """The best plan found for ``job``."""
    with SearchListener(sys.stderr) as listener:
        return plan(job, listener)


class SearchPatience:
    """Calls ``say`` with the seconds that have passed, less and less often, until it ends."""

    def __init__(self, say: Callable[[float], None]) -> None:
        self._say, self._ended = say, threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        begun, pause = time.monotonic(), min(FIRST, threading.TIMEOUT_MAX)
        while not self._ended.wait(pause):
            elapsed = time.monotonic() - begun
            self._say(elapsed)
            # Each wait is half of what has passed: a search of an hour says about twenty lines, not
            # thousands.
            pause = max(elapsed, 1) * (LONGER - 1)

    def end(self) -> None:
        """Say nothing more."""
        self._ended.set()


class SearchListener:
    """Says how long a step is being recorded, then how it goes when it is called.
    The first Ctrl-C inside ends a search that has a plan, and interrupts anything else; the second
    interrupts any."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.interrupted = False
        self._next = FIRST
        self._before: Any = None
        self._patience: SearchPatience | None = None

    def __enter__(self) -> SearchListener:
        self._patience = SearchPatience(self._recording)
        # A command in the background of a shell ignores SIGINT, and has to go on doing so.
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()
        self._search_begins()

    def __call__(self, watch: Watch) -> None:
        """Every round of the search."""
        self._search_begins()
        if self.interrupted:
            if watch.best is None:
                raise KeyboardInterrupt
            watch.stop()
        elif watch.elapsed >= self._next:
            self._next = watch.elapsed * LONGER
            print(progress_line(watch), file=self.stream, flush=True)

    def _recording(self, elapsed: float) -> None:
        line = f"{PREPARING} for {elapsed:.0f} s (Ctrl-C gives up)"
        print(line, file=self.stream, flush=True)

    def _search_begins(self) -> None:
        if self._patience is not None:
            self._patience.end()
            self._patience = None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        self._give_back()
        if self._patience is not None:  # no search has begun that could end with a plan
            raise KeyboardInterrupt

    def _give_back(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


def progress_line(watch: Watch) -> str:
    """How a search stands."""
    how = f"planning for {watch.elapsed:.0f} s"
    if watch.best is None:
        return f"{how}: no plan yet (Ctrl-C gives up)"
    found = f"{how}: {format_seconds(watch.best)} per step so far"
    if watch.bound:
        found += f", gap {max(watch.best / watch.bound - 1, 0) * 100:.1f} %"
    unlimited = watch.seconds == float("inf") and watch.elapsed > LONG
    limit = "; planner.time_limit limits the search" if unlimited else ""
    return f"{found} (Ctrl-C keeps it{limit})"


class EstimateProgress:
    """What is estimated on stderr: one line that is written over, or a line now and then; above it
    every answer that is known, but of what ends at once."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self._over = sys.stderr.isatty()
        self._shown = False
        self._estimated = "estimate 1"
        self._answers: list[str] = []
        self._patience = SearchPatience(
            lambda seconds: self._show(f"{self._estimated}; {PREPARING} for {seconds:.0f} s")
        )

    def hear(self, watch: Watch) -> None:
        """Every round of a search."""
        self._patience.end()
        since = f" for {watch.elapsed:.0f} s" if watch.elapsed >= 1 else ""
        self._show(f"{self._estimated}; planning{since}")

    def __call__(self, text: str) -> None:
        self._patience.end()
        self._estimated = text
        self._show(text)

    def known(self, text: str) -> None:
        """An answer."""
        self._patience.end()
        self._answers.append(text)
        self._show("")

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._begun < QUIET:
            return
        if self._answers:
            self._wipe()
            print("\n".join(self._answers), file=sys.stderr, flush=True)
            self._answers.clear()
        if not text or now - self._last < (WATCHED if self._over else EVERY):
            return
        self._wipe()
        self._last, self._shown = now, True
        print(text, end="" if self._over else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Say nothing more."""
        self._patience.end()
        self._wipe()

    def _wipe(self) -> None:
        if self._shown and self._over:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
