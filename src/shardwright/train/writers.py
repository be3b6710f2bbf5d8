"""Where a run's progress goes: its folder, a terminal, TensorBoard, Weights & Biases.

All are a :class:`~shardwright.launcher.progress.Writer`; the last two need a package of their own,
which is imported where a job or a loop names it in ``log``.
"""

# A writer's package is looked for before a run starts (check_log) and imported when it is made: a
# name that cannot be imported must not end a run after its first step. Writers get entries and not
# calls of their own API, so that a new one is a class with two methods.

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from shardwright.core.errors import InputError, did_you_mean, expected
from shardwright.launcher.progress import ProgressLog, Writer, writer_for

WRITERS: Final = ("tensorboard", "wandb")  # names in `log`, and of the packages they need
PROGRESS_SECONDS: Final = 0.2  # between two entries about steps
_SERIES: Final = ("loss", "seconds_per_step")


def check_log(log: Iterable[str], where: str = "train.log") -> None:
    """InputError unless every name is of a writer whose package is installed."""
    for name in log:
        if name not in WRITERS:
            wanted, near = f"some of {', '.join(WRITERS)}", did_you_mean(name, WRITERS)
            raise InputError(expected(where, wanted, repr(name), near))
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            remedy = f"pip install {name}, or leave it out: progress.jsonl has the same."
            raise InputError(expected(where, f"{name} to be installed", "no such package", remedy))


def writers(
    folder: Path, log: Iterable[str] = (), *, step: int = 0, shown: bool = False
) -> list[Writer]:
    """Those of a run in ``folder`` that begins after ``step``; ``shown``: on stderr, too."""
    found: list[Writer] = [ProgressLog(folder)]
    if shown:
        found.append(writer_for(sys.stderr))
    made = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return [*found, *(made[name](folder, step) for name in log)]


class Progress:
    """What is told of a run to its ``writers``; without any, to nobody."""

    def __init__(self, found: Iterable[Writer] = ()) -> None:
        self._writers = list(found)
        self._told = 0.0

    def say(self, text: str) -> None:
        """A line for people."""
        self.write({"said": text})

    def write(self, entry: Mapping[str, Any]) -> None:
        """An entry, to all."""
        for writer in self._writers:
            writer.update(entry)

    def due(self, *, anyway: bool) -> float | None:
        """Seconds since the last entry about a step, where another one is due now or asked for;
        else None, for nobody reads one a millisecond."""
        now = time.monotonic()
        if not self._writers or (now - self._told < PROGRESS_SECONDS and not anyway):
            return None
        took, self._told = now - self._told, now
        return took

    def close(self) -> None:
        """No entry comes any more."""
        for writer in self._writers:
            writer.close()


class TensorBoard:
    """Event files in ``tensorboard/`` of the run folder, by torch's own writer."""

    def __init__(self, folder: Path, step: int) -> None:
        board = importlib.import_module("torch.utils.tensorboard")
        purge = step + 1 if step else None  # what a run wrote after the checkpoint did not happen
        self._board = board.SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self._step = step

    def update(self, entry: Mapping[str, Any]) -> None:
        self._step = entry.get("step", self._step)
        for name in _SERIES:
            if name in entry:
                self._board.add_scalar(name, entry[name], self._step)
        if "said" in entry:
            self._board.add_text("said", str(entry["said"]), self._step)

    def close(self) -> None:
        self._board.close()


class WeightsAndBiases:
    """A run of Weights & Biases, named as the run folder; its settings are the package's own."""

    def __init__(self, folder: Path, step: int) -> None:
        package = importlib.import_module("wandb")
        self._run = package.init(project="shardwright", name=folder.name, dir=str(folder))
        self._step = step

    def update(self, entry: Mapping[str, Any]) -> None:
        self._step = entry.get("step", self._step)
        series = {name: entry[name] for name in _SERIES if name in entry}
        if series:
            self._run.log(series, step=self._step)

    def close(self) -> None:
        self._run.finish()
