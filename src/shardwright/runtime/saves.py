"""Saves a run while it goes on, and ends it in order where a signal asks for that.

At a step's end all ranks have the same wish, the largest of theirs, so they save and stop at the
same step. Nobody waits for a disk: a save is made of parts, a thread does what needs no other rank,
and the next part begins at the first step's end at which no rank's thread is busy.
"""

# Schedulers send SIGTERM to all ranks, but each hears it at another moment. If ranks acted on
# their own they would save different steps, or one would leave a collective that the others are
# in. So a signal is only a wish, all wishes are compared at a step's end, and the largest is
# everybody's.

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import RunError, StoppedError
from shardwright.core.measurement import Saved
from shardwright.job.train import CheckpointSection, every
from shardwright.runtime import data_workers
from shardwright.runtime.checkpoint.agreement import rank_and_size
from shardwright.runtime.checkpoint.files import shard_name
from shardwright.runtime.checkpoint.folders import complete_steps, step_folder
from shardwright.runtime.checkpoint.write import SaveWork
from shardwright.runtime.model_parts import comm_of, on_disk
from shardwright.runtime.saving import Optimizers, save_parts

SAVE = 1  # a wish above it is a signal's number more
_ONE_SIGNAL = 2.0  # seconds in which a second signal is the first one, passed on by torchrun
_LOOK = 0.05  # seconds between two looks at threads
_BUSY = "whether files are being written"


class Saves:
    """The checkpoints of a run in ``folder``: one ``every`` so often, the newest ``keep``.

    ``extra`` gives this rank's plain values, ``facts`` are the same on all ranks; ``say`` gets
    lines for people. ``clock`` gives seconds.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: Optimizers,
        section: CheckpointSection,
        *,
        extra: Callable[[], Any],
        facts: Mapping[str, str],
        say: Callable[[str], None],
        step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.comm = comm_of(model)
        self._what = (model, optimizer)
        self._section = section
        self._overlaps = section.overlap and not on_disk(model)  # of what no copy may have room
        self._every = every(section.every)
        self._extra, self._facts, self._say, self._clock = extra, facts, say, clock
        self._begun = self.saved = step  # the steps of the last save that began and of the newest
        self._begun_at = self._ended_at = clock()
        self._signal = 0
        self._heard = 0.0
        self._parts: Generator[SaveWork, None, Path] | None = None
        self._work: SaveWork | None = None
        self._cost = 0.0  # seconds that the save under way would take at once
        self._warned = False
        self.count = self.failed = self.nbytes = 0
        self.stall_seconds = self.seconds = 0.0

    # ---- signals ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM and SIGINT are a wish to save and stop; a second one acts as it did before. So is
        the end of a DataLoader's worker, which leaves the batches that others have made."""
        # Python takes signals on the main thread alone, and refuses handlers elsewhere.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

        def note(number: int, _frame: FrameType | None) -> None:
            now = self._clock()
            # torchrun passes a signal on that the scheduler may have sent to every process as well:
            # the same one twice within a moment is one wish, and only a later one means that
            # somebody has lost patience.
            if self._signal and now - self._heard > _ONE_SIGNAL:
                signal.signal(number, before[signal.Signals(number)])
                signal.raise_signal(number)
            elif not self._signal:
                self._signal, self._heard = number, now

        for number in before:
            signal.signal(number, note)
        try:
            with data_workers.outliving_signals(), data_workers.reported(self._lose_worker):
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def has_lost_worker(self) -> bool:
        """Whether a DataLoader's worker of this rank was killed, so that it stops."""
        return self._signal == signal.SIGCHLD

    def is_of_lost_worker(self, error: BaseException) -> bool:
        """Whether an error of batches comes of such an end. Who asks a process whether it lives
        takes its end away from the signal that tells of it, and may be first: the loader does."""
        if data_workers.says_lost(error):
            self._lose_worker()
        return self.has_lost_worker

    def _lose_worker(self) -> None:
        if not self._signal:
            self._signal, self._heard = signal.SIGCHLD, self._clock()

    # ---- steps -----------------------------------------------------------------------------------

    def words(self, step: int) -> tuple[int, int]:
        """What this rank wishes for at the end of ``step``, and whether its files are being
        written; ``after`` wants the largest of all ranks."""
        # A signal is larger than a save that is due, so that the largest wish of all ranks is both.
        wish = SAVE + self._signal if self._signal else SAVE * self._is_due(step)
        return wish, int(self._work is not None and not self._work.done.is_set())

    def agreed(self, step: int) -> Sequence[int]:
        """The largest of all ranks' words (collective), for loops without a guard."""
        words = self.words(step)
        if self.comm is None:
            return words
        numbers = torch.tensor(words, device=self.comm.mesh.device_type)
        self.comm.all_reduce(_BUSY, numbers, largest=True)
        return numbers.tolist()

    def after(self, step: int, words: Sequence[int]) -> None:
        """The step is over: save, go on with a save, or stop (StoppedError) as all ranks wish."""
        wish, busy = words
        now = self._clock()
        step_seconds, began = now - self._ended_at, time.perf_counter()
        # All ranks know by the same numbers that nobody writes any more, so all begin the next
        # part, whose collectives they are in together.
        if self._parts is not None and not busy:
            self._go_on()
        # After the save under way was carried on; ``_stop`` ends that before it begins its own.
        if wish > SAVE:
            self._stop(step, wish - SAVE)
        if wish == SAVE and self._parts is None:
            self._begin(step, overlap=self._overlaps)
        self.stall_seconds += time.perf_counter() - began
        self._warn(step_seconds)
        self._ended_at = self._clock()

    def finish(self, step: int) -> None:
        """The last step is over: it is saved on return, unless that failed."""
        began = time.perf_counter()
        self._drain()
        if self.saved != step:
            self._begin(step, overlap=False)
        self.stall_seconds += time.perf_counter() - began

    def figures(self, resumed: tuple[int, ...] = ()) -> Saved:
        """What saving took on this rank."""
        return Saved(
            self.count, self.failed, self.nbytes, self.stall_seconds, self.seconds, resumed
        )

    def _is_due(self, step: int) -> bool:
        # Asked of all ranks alike: one save at a time, and those that are due meanwhile become one.
        if self._parts is not None:
            return False
        if self._every.steps is not None:
            return step - self._begun >= self._every.steps
        assert self._every.seconds is not None
        now = self._clock()
        self._begun_at = min(self._begun_at, now)  # a clock that went back
        return now - self._begun_at >= self._every.seconds

    # ---- one save --------------------------------------------------------------------------------

    def _begin(self, step: int, *, overlap: bool) -> None:
        self._begun, self._begun_at = step, self._clock()
        self._cost, began = 0.0, time.perf_counter()
        model, optimizer = self._what
        self._parts = save_parts(
            self.folder,
            model,
            optimizer,
            step=step,
            extra=self._extra(),
            facts=self._facts,
            keep=self._section.keep,
            copied=overlap,
        )
        self._go_on()
        self._cost += time.perf_counter() - began
        # At the end of a run, or where a copy has no room, training waits for the files.
        if not overlap:
            self._drain()

    def _go_on(self) -> None:
        """The next part of the save that is under way (collective)."""
        assert self._parts is not None
        if self._work is not None:
            self._cost += self._work.seconds
        try:
            self._work = next(self._parts)
        except StopIteration:
            self._end()
            self.saved = self._begun
            self.count += 1
            self.seconds = max(self.seconds, self._cost)
            rank, _ = rank_and_size(self.comm)
            with contextlib.suppress(OSError):
                file = step_folder(self.folder, self.saved) / shard_name(rank)
                self.nbytes = file.stat().st_size
        # A full disk must not end a run of days: it is said, counted, and tried again at the next
        # save.
        except RunError as error:  # the same on every rank: none has saved, and all go on
            self._end()
            self.failed += 1
            self._say(str(error))
        else:
            # A daemon: a disk that hangs must not keep a process from ending.
            threading.Thread(target=self._work.run, name="save", daemon=True).start()

    def _end(self) -> None:
        self._parts = self._work = None

    def _drain(self) -> None:
        """Wait for the save that is under way."""
        while self._parts is not None:
            assert self._work is not None
            while self.agreed(self._begun)[1]:  # no rank waits long in one collective
                self._work.done.wait(_LOOK)
            self._go_on()

    def _stop(self, step: int, number: int) -> None:
        self.finish(step)
        name = {
            signal.SIGINT: "Ctrl-C",
            signal.SIGCHLD: "the end of a DataLoader's worker, which was killed,",
        }.get(signal.Signals(number), signal.Signals(number).name)
        text = f"stopped by {name} after step {step}"
        if self.saved == step:
            where = step_folder(self.folder, step)
            raise StoppedError(f"{text}, saved in {where}: the same command with --resume goes on.")
        there = complete_steps(self.folder)  # the folder may be gone
        newest = f"the newest is step {there[-1]}" if there else "there is no checkpoint"
        raise StoppedError(f"{text}, which could not be saved; {newest}.")

    def _warn(self, step_seconds: float) -> None:
        """Say once that a signal leaves too little time for a save."""
        needed, grace = self.seconds + step_seconds, self._section.grace
        if self.count and needed > grace and not self._warned:
            self._warned = True
            self._say(
                f"a step and a save take {needed:.0f} s, more than the {grace:.0f} s that are left "
                "after a signal (checkpoint.grace): a run would go on from the checkpoint before"
            )
