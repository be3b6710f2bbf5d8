"""A module of the user's own, on batches of a function's own or on the inputs that came with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._pytree import tree_flatten

from shardwright.core.errors import InputError, ShardwrightError, expected
from shardwright.data.reading import DealtRows
from shardwright.estimate.own_model import (
    Built,
    Call,
    as_call,
    as_tensors,
    check_call,
    importable,
    make,
    python_function,
    returned_by,
    shown_call,
    with_names_of,
)
from shardwright.estimate.task import Batch, Task
from shardwright.job.job import Job
from shardwright.trace.checks import first_line
from shardwright.train.resuming import skip
from shardwright.train.tasks.later import Later, later, seed_all


def python_task(job: Job) -> Task:
    """The task of a job's own module, or the one that its function returns."""
    call = Call.of(job)
    with importable():
        function = python_function(call.name, call.where)
    try:
        return Given(job, later(call, function, job.train.seed))
    except (Exception, SystemExit) as error:  # the function itself will say what is wrong
        reason = first_line(error)
    made = really(call, function, job.train.seed)
    if not isinstance(made, Built):
        return made
    print(f"{call.where}: built whole on every rank, for {reason}", file=sys.stderr)
    return Given(job, made)


def really(call: Call, function: Callable[..., Any], seed: int) -> Built | Task:
    """What the function gives, with its numbers."""
    with importable():
        seed_all(seed)
        return make(call, function)


class Given:
    """What the function of a job gives: ``(module, inputs, loss, targets)`` or less.

    A batch is (arguments, keywords, targets). Nothing is held out.
    """

    bad_rows = 0

    def __init__(self, job: Job, made: Built | Later) -> None:
        self.job = job
        self.call = Call.of(job)
        self.is_empty = isinstance(made, Later)  # parameters are on the meta device
        self.later = made if isinstance(made, Later) else None
        self.built = made.built if isinstance(made, Later) else made

    def model(self, device: torch.device) -> nn.Module:
        """The module, the same on every rank, for its numbers are drawn from ``train.seed``."""
        check_call(self.built)
        if not self.is_empty:
            return self.built.module.to(device)
        for part in self.built.module.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(device)
        return self.built.module

    def batches(
        self, rank: int, world_size: int, dealt: Sequence[DealtRows] = ()
    ) -> Iterator[Batch]:
        """Of the data's own function, or the same inputs in every step, others on every rank.

        A function with a parameter ``start`` begins after so many samples of all ranks; of another
        the same ranks leave out what they have had.
        """
        name, seed = self.job.data.python, self.job.data.seed + rank
        noted, self.later = self.later, None  # which may be large
        if noted is not None:
            drawn = noted.drawn(seed)
        elif not isinstance(name, str):
            drawn = self._built_again(seed)
        if isinstance(name, str):
            return self._given(name, rank, world_size, dealt)
        return repeat((drawn.inputs, drawn.keywords, drawn.targets))

    def _built_again(self, seed: int) -> Built:
        """What the function gives from another seed, for its inputs."""
        with importable():
            function = python_function(self.call.name, self.call.where)
        drawn = really(self.call, function, seed)
        assert isinstance(drawn, Built)
        self.built = self.built._replace(loss=drawn.loss)  # which may have targets of its own
        return drawn

    def inputs(self, batch: Batch) -> tuple[Any, Any]:
        """What the module is called with."""
        arguments, keywords, _ = batch
        return arguments, keywords

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Of the module's result, and of the batch's targets where there are any."""
        arguments, keywords, targets = batch
        return self.built.loss_of(model(*arguments, **keywords), targets)

    def held_out(self, rank: int, world_size: int) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """Nothing."""
        return iter(())

    def scores(
        self, model: nn.Module, batch: Batch, numbers: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """No rows."""
        return np.empty((0, 3))

    def _given(
        self, name: str, rank: int, world_size: int, dealt: Sequence[DealtRows]
    ) -> Iterator[Batch]:
        """What the data's function gives, checked."""
        where = f"data.python '{name}'"
        sizes = {"batch": self.call.batch, "sequence": self.call.sequence}
        known = {**sizes, "rank": rank, "world_size": world_size, "seed": self.job.data.seed}
        known["start"] = sum(sum(each.taken) for each in dealt)
        with importable():
            function = python_function(name, where)
            seed_all(self.job.data.seed + rank)
            given = with_names_of(function, known)
            returned = returned_by(function, given, where, RETURNS)
            batches = enumerate(_each(_iterator(returned, where), where, self.job.train.steps), 1)
        checked = (self._checked(batch, f"{where}, batch {number}") for number, batch in batches)
        if "start" not in given:
            skip(checked, dealt, rank, world_size, where, "start")
        return checked

    def _checked(self, batch: Any, where: str) -> Batch:
        """A batch as the model is called; InputError unless it is made as the model's inputs."""
        built = self.built
        inputs, targets = batch, None
        if built.targets is not None:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise InputError(expected(where, "(inputs, targets)", _kind(batch)))
            inputs, targets = batch
        arguments, keywords = as_tensors(as_call(inputs))
        targets = as_tensors(targets)
        if _form((arguments, keywords)) != _form(as_tensors((built.inputs, built.keywords))):
            found = shown_call(arguments, keywords)
            raise InputError(expected(where, f"inputs like {built.called}", found))
        if _form(targets) != _form(as_tensors(built.targets)):
            wanted = f"targets like {shown_call((built.targets,), {})}"
            raise InputError(expected(where, wanted, shown_call((targets,), {})))
        return arguments, keywords, targets


RETURNS = "batches, such as a generator"


def _iterator(returned: Any, where: str) -> Iterator[Any]:
    try:
        return iter(returned)
    except TypeError:
        raise InputError(
            expected(where, f"a function that returns {RETURNS}", type(returned).__name__)
        ) from None


def _each(batches: Iterator[Any], where: str, steps: int) -> Iterator[Any]:
    """The batches of a user's own iterator; InputError where it ends or raises."""
    for number in range(steps):
        try:
            batch = next(batches)
        except StopIteration:
            remedy = "Let it go on, or lower train.steps."
            wanted = f"batches for {steps} steps"
            raise InputError(expected(where, wanted, f"{number}", remedy)) from None
        except ShardwrightError:
            raise
        except (Exception, SystemExit) as error:  # it runs whatever it likes
            wanted = f"batch {number + 1}"
            raise InputError(expected(where, wanted, first_line(error))) from error
        yield batch


def _form(value: Any) -> tuple[Any, list[Any]]:
    """How a nest of tensors is made: its structure, and dtypes and dimensions of the tensors."""
    leaves, structure = tree_flatten(value)
    return structure, [
        (leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in leaves
    ]


def _kind(value: Any) -> str:
    several = isinstance(value, (tuple, list))
    return f"{type(value).__name__} of {len(value)}" if several else type(value).__name__
