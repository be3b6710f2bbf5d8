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
Spread = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
Drift = Annotated[float, msgspec.Meta(ge=0, le=1)]


class DataSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run reads: click logs, text, or batches of a function of the user's own. What is
    made up goes into the run folder.

    Attributes:
        kind (``"criteo"``; ``"text"`` for a transformer or a llama; ``"python"`` for a model of
            your own): ``"criteo"``: a click log; ``"columns"``: [one of your own](#click-logs);
            ``"synthetic"``: one is generated into ``train.out``; ``"text"``: any file;
            ``"python"``: batches of a function of your own
        python (the inputs of ``model.python``): of kind ``"python"``: the function as
            ``"package.module:function"``, [which yields batches](own-model.md#batches)
        zipf (1.2 of made-up rows, else 0: all ids are alike): the exponent of the popularity of
            ids, of kind ``"synthetic"`` also the one that rows are made up with; the smaller, the
            heavier the tail
        label, dense, ids (``"label"``, ``["I1", ...]``, ``"exact"``): of kind ``"columns"``: the
            columns of the label and the dense features; whether ids are rows (``"exact"``), whole
            numbers that are taken modulo the table's rows (``"modulo"``), or text, too, of which
            [a hash](#ids-that-are-text) is (``"hash"``)
        logarithm, scale (none): of kind ``"columns"``: dense columns of which log(x + 1) is taken,
            0 of negative ones; and ``{ age = [34.0, 12.5] }``: what is taken off then, and what the
            rest is divided by. A field without a number is 0 after both
        missing (only empty fields): of kind ``"columns"``: words that stand for nothing in dense
            fields and bags, such as ``["NULL", "nan"]``
        header (the first line): of kind ``"columns"``: names of the columns of text whose first
            line is a row
        path, test_path: the log, and held-out rows; both are read, never written, and refused
            beside ``"synthetic"``. Of kind ``"criteo"`` or ``"columns"`` ``path`` may be [a folder
            of days](#days), and what it names is [text, packed or not, Parquet or
            arrays](#click-logs). Of a text the last tenth is held out; one is made up, into
            ``train.out``, if ``path`` names none
        test_batch (``batch.size``, at least 1024): of a log: held-out rows that a rank scores at a
            time
        skip_bad_rows: leave bad rows out and count them instead of stopping at the first;
            ``inspect`` says how many of which file
        days (none): of a log: so many days are in it, of which [the last is held out](#days)
        drop_negatives (0): of kinds ``"criteo"`` and ``"columns"``: share of rows without a click
            that is left out, everywhere; drawn from ``seed``, the same rows in every pass
        cache (none): of a log: a folder for [its rows in binary](#a-cache-of-rows), written once
        drift (0): of the generator with ``days``: by how much what an id is worth changes from one
            day to the next, from 0, not at all, to 1, into something else altogether
        rows, test_rows, seed: of the generator (with ``days`` only ``rows``); of text, ``seed``
            also orders what is read; of a module of your own the inputs of a rank are drawn from
            ``seed`` plus its number
    """

    kind: Literal["criteo", "columns", "synthetic", "text", "python"] = "criteo"
    python: str | UnsetType = UNSET
    label: str | UnsetType = UNSET
    dense: tuple[str, ...] | UnsetType = UNSET
    ids: Literal["exact", "modulo", "hash"] | UnsetType = UNSET
    logarithm: tuple[str, ...] | UnsetType = UNSET
    scale: dict[str, tuple[float, Spread]] | UnsetType = UNSET
    missing: tuple[str, ...] | UnsetType = UNSET
    header: tuple[str, ...] | UnsetType = UNSET
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

    Attributes:
        warmup_steps: steps over which it rises in a line to 1
        decay: how it falls then: ``"polynomial"`` of ``power``, ``"cosine"``, or ``"none"``: it
            stays
        decay_start (the end of the warm-up): the step after which it falls
        decay_steps (the rest of the run): steps over which it falls
        power (1): of ``"polynomial"``: 1 is a line
        end_factor (0): what it falls to
    """

    warmup_steps: Whole = 0
    decay: Literal["none", "polynomial", "cosine"] = "none"
    decay_start: Whole | UnsetType = UNSET  # step
    decay_steps: Count | UnsetType = UNSET
    power: Power | UnsetType = UNSET
    end_factor: Factor | UnsetType = UNSET


class TrainSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run: how long, how it learns, where its files lie.

    Attributes:
        steps: memory is followed on steps 3 to 5, time on later ones
        optimizer (``"sgd"``; of a llama and of ``python`` ``"adamw"``): of the dense parameters:
            ``"sgd"``, ``"sgd_momentum"``, ``"adam"``, ``"adamw"``, ``"adamw_8bit"``
            ([``sw.AdamW8bit``](runtime.md#adamw-in-8-bits)), ``"adagrad"``; tables then use sgd or
            row-wise Adagrad. An estimate of memory (not a plan) takes ``"adamw_bf16"``,
            ``"adamw_8bit_torchao"`` (what ``"adamw_8bit"`` is beside other runtimes than ours),
            ``"adamw_8bit_bitsandbytes"``, ``"muon"`` and ``"adafactor"`` too
        learning_rate, table_learning_rate (0.1, the same): of dense parameters, of tables
        schedule (none): what both learning rates are multiplied with, such as ``{ warmup_steps =
            100, decay = "polynomial", power = 2 }``
        table_optimizer (``"sgd"`` beside ``"sgd"``, else ``"rowwise_adagrad"``; of ``python``
            none): of tables that name none themselves: ``"sgd"``, ``"rowwise_adagrad"``. In a
            module of your own it makes tables of [embeddings](own-model.md#embeddings)
        metrics_every (none): of a dlrm: every so many steps, what all ranks trained on since is
            [scored](#scores-while-training)
        seed: of the starting weights
        out: the run folder: new, empty of a run's file names, or of an earlier run, whose results
            are replaced
        timeout: seconds a rank may keep the others waiting
        table_folder (``tables`` in the run folder): where [tables on
            disk](planner.md#tables-on-disk) lie while a run lasts
        overlap (``"none"``): ``"rows"``: rows of tables travel while what comes before their use
            computes, and their gradients until the backward is over; ``"ids_and_rows"``: ids of the
            next batch, too, while this one is computed
            ([how](runtime.md#what-travels-while-a-rank-computes))
        forward (``"distributed"``): of a dlrm, both of the original's: ``"distributed"``: every
            rank is a process with one device; ``"parallel"``: all ranks are threads of [one
            process](runtime.md#all-ranks-in-one-process) with as many devices, logical ones of a
            CPU
        not_finite (``"stop"``): a gradient or loss that is not finite updates nothing: ``"stop"``
            ends the run with step, name and ranks, ``"skip"`` leaves the step out and counts it
        log (none): who is told of the progress beside the terminal and ``progress.jsonl``:
            ``["tensorboard"]``, ``["wandb"]`` or both
            ([how](runtime.md#who-is-told-of-a-runs-progress))
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
    """A run with this section is saved ``every`` so many steps or minutes, at its end, and where
    a signal ends it.

    Attributes:
        every: between two checkpoints: ``"20 steps"`` or ``20``, ``"30 s"``, ``"10 min"``, ``"2
            h"``
        keep: the newest so many stay
        folder (``checkpoints`` in the run folder): where they are
        overlap: train on while files are written, from a copy in host memory; ``false``: wait for
            them, as with [tables on disk](planner.md#tables-on-disk)
        grace: seconds that a run has to save and end after a signal; 30 at most, torchrun gives no
            more
        restarts: how often ``train`` goes on by itself, from the newest checkpoint, where a run
            failed (exit code 5)
    """

    every: str | Annotated[int, msgspec.Meta(ge=1, le=10**9)] = "10 min"
    keep: Annotated[int, msgspec.Meta(ge=1, le=10**6)] = 2
    folder: str = ""
    overlap: bool = True
    grace: Annotated[float, msgspec.Meta(gt=0, le=GRACE)] = GRACE
    restarts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
