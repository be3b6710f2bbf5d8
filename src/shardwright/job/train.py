"""The run itself, and how its learning rates change: the ``[train]`` section of a job."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.errors import InputError, expected
from shardwright.core.optimizers import OptimizerName, TableUpdate
from shardwright.job.data import Count, Whole

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
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.decay == "none":
        return 1.0
    start, steps = _decays(train, schedule)
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
    if start < schedule.warmup_steps:
        wanted = f"{schedule.warmup_steps} or more, the end of the warm-up"
        raise InputError(expected(f"{key}.decay_start", wanted, repr(start)))
    if steps < 1:
        wanted = f"a start before the run's last step, {train.steps}"
        raise InputError(expected(f"{key}.decay", wanted, f"one after step {start}"))
