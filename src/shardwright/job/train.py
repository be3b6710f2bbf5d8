"""A run: the sections ``[data]``, what it reads, ``[train]``, how learning rates change, and
``[checkpoint]``, when and where it is saved.
"""

# What a run reads stands in sections that a plan embeds, so a key that changes no plan still
# changes its fingerprint, and a run of another learning rate is another plan. Keys that came later
# are UNSET by default, for plans and checkpoints of before must stay valid.

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.errors import InputError, expected
from shardwright.core.model import Zipf
from shardwright.core.optimizers import OptimizerName, TableUpdate

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Days = Annotated[int, msgspec.Meta(ge=2, le=1000)]
Dropped = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Drift = Annotated[float, msgspec.Meta(ge=0, le=1)]


class DataSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Click logs: a Criteo file, one of named ``columns``, whose ids are rows or taken modulo their
    number, or synthetic rows, for which no path is named. Or text: any file,
    whose bytes are the tokens; a made-up one where none is named. What is made up goes into the run
    folder. Or ``python``: a function that gives batches; without one those of the model's own
    function.

    Of ``days`` of a log, or of a folder of days, the last one is held out. Of rows without a click
    the share ``drop_negatives`` is left out. ``cache`` is a folder for rows in binary.
    ``zipf`` is the exponent of the popularity of ids. A rank gets ``test_batch`` held-out rows at a
    time.
    """

    kind: Literal["criteo", "columns", "synthetic", "text", "python"] = "criteo"
    python: str | UnsetType = UNSET
    label: str | UnsetType = UNSET
    dense: tuple[str, ...] | UnsetType = UNSET
    ids: Literal["exact", "modulo"] | UnsetType = UNSET
    path: str = ""
    test_path: str = ""
    skip_bad_rows: bool = False
    rows: Count = 100_000
    test_rows: Whole = 20_000
    seed: Whole = 0
    days: Days | UnsetType = UNSET
    drop_negatives: Dropped | UnsetType = UNSET
    cache: Annotated[str, msgspec.Meta(min_length=1)] | UnsetType = UNSET
    zipf: Zipf | UnsetType = UNSET
    drift: Drift | UnsetType = UNSET
    test_batch: Count | UnsetType = UNSET


# What travels while a rank computes: rows and their gradients, and ids of the next batch.
Overlap = Literal["none", "rows", "ids_and_rows"]
# A rank is a process, or a thread of one process.
Forward = Literal["distributed", "parallel"]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Factor = Annotated[float, msgspec.Meta(ge=0, le=1)]
Power = Annotated[float, msgspec.Meta(gt=0, le=100)]


class ScheduleSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the learning rates of units and of tables are multiplied with: ``[train.schedule]``.

    It rises in a line to 1 over ``warmup_steps``, and falls to ``end_factor`` over ``decay_steps``
    after step ``decay_start``: by a ``polynomial`` of ``power``, 1 is a line, or by a ``cosine``.
    Decay starts after the warm-up and ends with the run where the job does not say otherwise.
    """

    warmup_steps: Whole = 0
    decay: Literal["none", "polynomial", "cosine"] = "none"
    decay_start: Whole | UnsetType = UNSET  # step
    decay_steps: Count | UnsetType = UNSET
    power: Power | UnsetType = UNSET
    end_factor: Factor | UnsetType = UNSET


class TrainSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run. ``timeout`` is how long a rank may keep the others waiting, in seconds;
    ``not_finite`` what becomes of a step with gradients that are not finite; ``log`` where
    its progress goes beside the terminal and the run folder.

    ``optimizer`` is that of dense parameters, AdamW by default for a llama and the user's own.
    Tables are updated by ``table_optimizer``, SGD beside SGD, where they do not name one
    themselves, and learn at ``table_learning_rate``, or like the units where it is not given. Those
    on disk lie in ``table_folder``, while a run lasts; in the run folder by default. ``overlap`` is
    what of their exchange travels while a rank computes, by default nothing. ``forward`` is whether
    every rank is a process with one device, or all are threads of one process with several.
    """

    steps: Count = 100
    optimizer: OptimizerName = "sgd"
    learning_rate: Rate = 0.1
    table_learning_rate: Rate | None = None
    table_optimizer: TableUpdate | UnsetType = UNSET
    seed: Whole = 0
    out: Annotated[str, msgspec.Meta(min_length=1)] = "runs/latest"
    timeout: Seconds = 60.0
    not_finite: Literal["stop", "skip"] | UnsetType = UNSET
    log: tuple[Literal["tensorboard", "wandb"], ...] | UnsetType = UNSET
    table_folder: str | UnsetType = UNSET
    metrics_every: Count | UnsetType = UNSET  # steps
    overlap: Overlap | UnsetType = UNSET
    schedule: ScheduleSection | UnsetType = UNSET
    forward: Forward | UnsetType = UNSET

    @property
    def in_one_process(self) -> bool:
        """Whether all ranks are threads of one process."""
        return self.forward == "parallel"


def rate_factor(train: TrainSection, step: int) -> float:
    """What learning rates are multiplied with in ``step``, counted from 1."""
    if train.schedule is UNSET:
        return 1.0
    schedule = train.schedule
    # From 1 and not from 0: a first step at rate 0 would update nothing, and count in every
    # optimizer that corrects its bias by the number of steps.
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.decay == "none":
        return 1.0
    start, steps = _decays(train, schedule)
    # Clamped at both ends: between warm-up and decay the rate stays at 1, and a run that is resumed
    # with more steps stays at the end.
    done = min(max(step - start, 0) / steps, 1.0)
    end = 0.0 if schedule.end_factor is UNSET else schedule.end_factor
    if schedule.decay == "cosine":
        left = (1 + math.cos(math.pi * done)) / 2
    else:
        left = (1 - done) ** (1.0 if schedule.power is UNSET else schedule.power)
    return float(end + (1 - end) * left)


def _decays(train: TrainSection, schedule: ScheduleSection) -> tuple[int, int]:
    """The step after which the rates fall, and over how many steps."""
    start = schedule.warmup_steps if schedule.decay_start is UNSET else schedule.decay_start
    steps = train.steps - start if schedule.decay_steps is UNSET else schedule.decay_steps
    return start, steps


def check_schedule(train: TrainSection, where: str) -> None:
    """InputError for rates that fall before they rise, or after the run."""
    if train.schedule is UNSET:
        return
    schedule, key = train.schedule, f"{where}: train.schedule"
    if schedule.decay == "none":
        return
    start, steps = _decays(train, schedule)
    # The warm-up has its value first, so a decay that begins within it would be a jump at its end.
    if start < schedule.warmup_steps:
        wanted = f"{schedule.warmup_steps} or more, the end of the warm-up"
        raise InputError(expected(f"{key}.decay_start", wanted, repr(start)))
    if steps < 1:
        wanted = f"a start before the run's last step, {train.steps}"
        raise InputError(expected(f"{key}.decay", wanted, f"one after step {start}"))


_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_EVERY = re.compile(r"([1-9][0-9]{0,8}) (step|s|min|h)s?")
GRACE = 30.0  # seconds that torchrun gives its workers after a signal


class Every(NamedTuple):
    """So many steps or seconds between two checkpoints: one of the two is None."""

    steps: int | None
    seconds: float | None


def every(text: str | int, where: str = "checkpoint.every") -> Every:
    """``20 steps``, or 20, ``30 s``, ``10 min`` or ``2 h``; InputError for anything else."""
    # A bare number means steps: seconds have always to be said with their unit.
    if isinstance(text, int):
        return Every(text, None)
    found = _EVERY.fullmatch(text)
    if not found:
        wanted = "a time between checkpoints such as '20 steps', '30 s', '10 min' or '2 h'"
        raise InputError(expected(where, wanted, f"'{text}'"))
    count, unit = int(found[1]), found[2]
    return Every(count, None) if unit == "step" else Every(None, count * _UNITS[unit])


class CheckpointSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run with this section is saved ``every`` so many steps or minutes, at its end, and where a
    signal ends it.

    ``folder`` is in the run folder by default. With ``overlap`` ranks train on while files are
    written, from a copy in host memory. ``grace`` are the seconds a run has to save and end after a
    signal; ``restarts`` is how often ``train`` goes on by itself after a failure.
    """

    every: str | Annotated[int, msgspec.Meta(ge=1, le=10**9)] = "10 min"
    keep: Annotated[int, msgspec.Meta(ge=1, le=10**6)] = 2
    folder: str = ""
    overlap: bool = True
    grace: Annotated[float, msgspec.Meta(gt=0, le=GRACE)] = GRACE
    restarts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
