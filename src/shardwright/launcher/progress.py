"""Rank 0's progress: written to the run folder by the rank, shown on stderr by the launcher.

A bar for people at a terminal, sparse lines for logs.
"""

# A rank only appends lines, opened and closed each time: where a rank is killed, or the folder is
# moved, nothing is left half written but the last line, which readers pass over.

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Protocol, TextIO

import msgspec

from shardwright.core.document import decode_json
from shardwright.core.errors import RunError
from shardwright.launcher.folder import MARK, progress_file

if TYPE_CHECKING:
    from rich.progress import TaskID


_LONGEST_LINE: Final = 2**16  # bytes


class Writer(Protocol):
    """Where a run's progress is written."""

    def update(self, entry: Mapping[str, Any]) -> None:
        """One entry: ``step, steps, loss, seconds_per_step`` and what else there is. ``text``, when
        given, is what a person reads instead of the loss; what is ``said`` stays, on a line of its
        own."""

    def close(self) -> None:
        """The run is over: leave everything as it should stay."""


class ProgressLog:
    """Rank 0's progress in the run folder, one JSON object a line; RunError where it cannot be
    written. A folder that is gone is its launcher's to tell of, where there is one."""

    def __init__(self, folder: Path) -> None:
        self._path = progress_file(folder)

    def update(self, entry: Mapping[str, Any]) -> None:
        """Opened and closed each time: call it per logged step, not per microsecond."""
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            # The launcher sees the same and ends the run in order, with what can still be saved.
            if MARK in os.environ and isinstance(error, FileNotFoundError | NotADirectoryError):
                return
            raise RunError(str(self._path), "a file to write in", f"'{error.strerror}'") from None

    def close(self) -> None:
        """Nothing is held."""


class ProgressReader:
    """Reads what a :class:`ProgressLog` wrote since the last look."""

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
        # The rest is a line that is being written: it is read as a whole the next time.
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        entries = []
        for line in whole.splitlines():
            try:
                entries.append(decode_json(line, dict[str, Any]))
            except msgspec.DecodeError:
                continue
        return entries


class SoFar(NamedTuple):
    """How far a run has come: its last step, of how many, and rank 0's loss after some of them."""

    step: int
    steps: int
    points: tuple[tuple[int, float], ...]


def so_far(folder: Path, most: int = 1000) -> SoFar | None:
    """What ``progress.jsonl`` says, in at most ``most`` points; None where it says nothing yet.

    Read line by line, for it grows with the run; a line that is none of ours is passed over.
    """
    points: list[tuple[int, float]] = []
    step, steps, stride, seen = 0, 0, 1, 0
    try:
        with progress_file(folder).open("rb") as file:
            for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
                try:
                    entry = decode_json(line, _Step)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                step, steps, seen = entry.step, entry.steps, seen + 1
                if seen % stride == 0:
                    points.append((step, entry.loss))
                # Every other point goes and the stride doubles, so that a run of any length is read
                # in one pass and keeps at most `most` points, evenly apart.
                if len(points) > most:
                    points, stride = points[1::2], 2 * stride
    except OSError:
        return None
    return SoFar(step, steps, tuple(points)) if seen else None


class _Step(msgspec.Struct):
    """An entry about a step."""

    step: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    steps: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    loss: float


def writer_for(stream: TextIO) -> Writer:
    """A bar on a terminal; lines where there is none, under NO_COLOR and on a dumb terminal."""
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Lines(stream) if plain or not stream.isatty() else Bar(stream)


def describe(entry: Mapping[str, Any]) -> str:
    """``step 7/100  loss 0.6931``, or the entry's own text after the step."""
    parts = []
    if "step" in entry:
        total = f"/{entry['steps']}" if "steps" in entry else ""
        parts.append(f"step {entry['step']}{total}")
    if "text" in entry:
        parts.append(str(entry["text"]))
    elif isinstance(entry.get("loss"), int | float):
        parts.append(f"loss {entry['loss']:.4f}")
    return "  ".join(parts)


class Lines:
    """At most one line every ``interval`` seconds; the last entry is never left out."""

    def __init__(
        self, stream: TextIO, interval: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._interval = interval
        self._clock = clock
        self._next = clock()
        self._held: str | None = None

    def update(self, entry: Mapping[str, Any]) -> None:
        if "said" in entry:
            print(entry["said"], file=self._stream, flush=True)
            return
        self._held = describe(entry)
        if self._clock() >= self._next:
            self._next = self._clock() + self._interval
            self.close()

    def close(self) -> None:
        if self._held:
            print(self._held, file=self._stream, flush=True)
        self._held = None


class Bar:
    """A rich progress bar; it appears with the first entry."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._task: TaskID | None = None

    def update(self, entry: Mapping[str, Any]) -> None:
        if "said" in entry:
            self._progress.console.print(str(entry["said"]), markup=False, highlight=False)
            return
        total, step = entry.get("steps"), entry.get("step", 0)
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("", total=total)
        self._progress.update(self._task, description=describe(entry), completed=step, total=total)

    def close(self) -> None:
        if self._task is not None:
            self._progress.stop()
