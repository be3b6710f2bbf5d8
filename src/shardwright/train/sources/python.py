"""A module of the user's own, on batches of a function's own or on the inputs that came with it.

The function is first run without numbers, so that a rank makes only what it keeps; where that
cannot be, on every rank with all of them.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import CellType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map

from shardwright.core.errors import InputError, ShardwrightError, expected
from shardwright.core.measurement import Quality
from shardwright.data.reading import DealtRows
from shardwright.estimate.own_model import (
    Batch,
    Built,
    FunctionCall,
    Task,
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
from shardwright.job.job import Job
from shardwright.runtime.deferred_init import Deferred, NotDeferredError
from shardwright.runtime.noted import NotedPlace
from shardwright.runtime.sharded_module import move_buffers
from shardwright.trace.checks import first_line
from shardwright.train.resuming import skip


class OwnModule:
    """What the functions of a job's ``[model]`` and ``[data]`` give: nothing is prepared."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def check(self) -> None:
        """Raise InputError unless the functions of model and data can be imported."""
        job, data = self.job, self.job.data
        if data.kind != "python":
            wanted = "'python' for a model of that kind"
            raise InputError(expected("data.kind", wanted, f"'{data.kind}'"))
        for name in ("path", "test_path"):
            if named := getattr(data, name):
                wanted = "none for data.kind 'python', whose function reads what it likes"
                raise InputError(expected(f"data.{name}", wanted, f"'{named}'"))
        for function, where in ((job.model.python, "model"), (data.python, "data")):
            if isinstance(function, str):
                with importable():
                    python_function(function, f"{where}.python '{function}'")

    def prepare(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Nothing: the data's function makes or reads its batches itself."""

    def samples(self) -> None:
        """Not known: the data's function may never end."""

    def quality(self, scores: NDArray[np.float64], part: str = "test") -> Quality | None:
        """The mean loss of rows (number, weight, weight times loss)."""
        _, weights, losses = scores.T
        total = math.fsum(weights)
        if not total:
            return None
        return Quality(rows=len(weights), auc=None, log_loss=math.fsum(losses) / total)

    def task(self) -> Task:
        """The module with its batches, or the task that the job's function returns."""
        job, call = self.job, FunctionCall.of(self.job)
        with importable():
            function = python_function(call.name, call.where)
        try:
            return OwnTask(job, later(call, function, job.train.seed))
        # Any error, for the user's code runs on tensors without numbers here and may ask for one;
        # run really, it either works or says itself what is wrong.
        except (Exception, SystemExit) as error:  # the function itself will say what is wrong
            reason = first_line(error)
        made = really(call, function, job.train.seed)
        if not isinstance(made, Built):
            return made
        print(f"{call.where}: built whole on every rank, for {reason}", file=sys.stderr)
        return OwnTask(job, made)


def really(call: FunctionCall, function: Callable[..., Any], seed: int) -> Built | Task:
    """What the function gives, with its numbers."""
    with importable():
        seed_all(seed)
        return make(call, function)


class OwnTask:
    """What the function of a job gives: ``(module, inputs, loss, targets)`` or less.

    A batch is (arguments, keywords, targets). Nothing is held out.
    """

    bad_rows = 0

    def __init__(self, job: Job, made: Built | Later) -> None:
        self.job = job
        self.call = FunctionCall.of(job)
        self.is_empty = isinstance(made, Later)  # parameters are on the meta device
        self.later = made if isinstance(made, Later) else None
        self.built = made.built if isinstance(made, Later) else made

    def model(self, device: torch.device) -> nn.Module:
        """The module, the same on every rank, for its numbers are drawn from ``train.seed``."""
        check_call(self.built)
        if not self.is_empty:
            return self.built.module.to(device)
        move_buffers(self.built.module, device)
        return self.built.module

    def batches(
        self, rank: int, world_size: int, dealt: Sequence[DealtRows] = ()
    ) -> Iterator[Batch]:
        """Of the data's own function, or the same inputs in every step, others on every rank.

        A function with a parameter ``start`` begins after so many samples of all ranks; of another
        the same ranks leave out what they have had.
        """
        name, seed = self.job.data.python, self.job.data.seed + rank
        # Inputs are drawn once and then dropped with what they were noted in.
        noted, self.later = self.later, None  # which may be large
        if noted is not None:
            # Seeded by rank: a module's own inputs would otherwise be the same batch on all ranks,
            # and data parallelism one rank's training several times.
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


@dataclass(frozen=True, slots=True)
class Later:
    """What a function built without numbers: inputs and targets are on the meta device.

    ``given`` are the places of inputs, keywords, targets and of what the loss has in ``cells``.
    """

    built: Built
    deferred: Deferred
    given: tuple[Any, Any, Any, Any]
    cells: tuple[CellType, ...]

    def drawn(self, seed: int) -> Built:
        """What was built, with inputs and targets drawn from ``seed``, and the loss's with them."""
        seed_all(seed)
        inputs, keywords, targets, contents = self.deferred.drawn(self.given)
        for cell, content in zip(self.cells, contents, strict=True):
            cell.cell_contents = content
        return self.built._replace(inputs=inputs, keywords=keywords, targets=targets)


def later(call: FunctionCall, function: Callable[..., Any], seed: int) -> Later:
    """Run the function without numbers; any error says that it has to be run itself."""
    deferred = Deferred()
    with importable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fake tensors, which the user has not made
        seed_all(seed)
        with deferred:
            made = make(call, function)
    if not isinstance(made, Built):
        raise NotDeferredError("a task of its own")
    # A loss often has its targets in a closure: they are inputs too, and are drawn with the others.
    cells = tuple(c for c in getattr(made.loss, "__closure__", None) or () if c != CellType())
    contents = [cell.cell_contents for cell in cells]
    given = tree_map(
        lambda v: deferred.place(v) if isinstance(v, FakeTensor) else v,
        (made.inputs, made.keywords, made.targets, contents),
    )
    del contents
    for cell, places in zip(cells, given[3], strict=True):
        cell.cell_contents = places
    deferred.settle(made.module)
    inputs, keywords, targets = tree_map(_without_numbers, given[:3])
    made = made._replace(inputs=inputs, keywords=keywords, targets=targets)
    deferred.check_left()
    return Later(made, deferred, given, cells)


def seed_all(seed: int) -> None:
    """Let everything that draws numbers begin at ``seed``."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _without_numbers(value: Any) -> Any:
    if not isinstance(value, NotedPlace):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
