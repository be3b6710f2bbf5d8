"""What a function of the user's own gives: a module, what it is called with, and its loss.

A job names it as ``package.module:function``. It gets the job's ``arguments``, and ``batch`` and
``sequence`` where it takes them. Whoever estimates and whoever trains reads it here.
"""

# The estimate and the run must read a function alike, or a plan would be made for another model
# than the one that is trained: so both call it here, by the same arguments. A user's code may raise
# whatever it likes, SystemExit included, and print: what it raises is one line that names the
# function, what it prints goes to stderr, for stdout is a command's data. Of a task the call of its
# model is found by running its loss with a stand-in that raises when it is called.

from __future__ import annotations

import importlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.core.errors import InputError, ShardwrightError, expected, there_are
from shardwright.job.job import Job
from shardwright.launcher.exhausted import out_of_memory
from shardwright.launcher.worker import from_a_peer
from shardwright.runtime.embeddings.bags import bad_id
from shardwright.trace.checks import first_line, named, no_gradient, place_of, wrong_id

if TYPE_CHECKING:  # a run records nothing, and needs no heap
    from shardwright.trace.composed import Shortened

Batch = Any  # tensors or arrays, alone or in tuples, lists and dictionaries
InputsOf = Callable[[Batch], tuple[Any, Any]]
RETURNS = (
    "a module, (module, inputs), (module, inputs, loss), (module, inputs, loss, targets) or a task"
)


@runtime_checkable
class Task(Protocol):
    """A model, its batches, and its loss; rows of scores for what is held out. One that holds rows
    out for validation too has ``validation``, called as ``held_out``; one whose ids may travel
    ahead has ``inputs``: the (arguments, keywords) of a batch with which ``loss`` calls the model.

    Every rank has a task of its own. A batch is made of tensors or arrays, alone or in tuples,
    lists and dictionaries; ``loss`` and ``scores`` get it as tensors on the model's device. The
    function that a job names as ``[model] python`` may return one.
    """

    def model(self, device: torch.device) -> nn.Module:
        """The model, the same on every rank, with its buffers on ``device``; parameters may be on
        the meta device where the model has ``initial_block``, as ``apply`` asks."""
        ...

    def batches(self, rank: int, world_size: int) -> Iterator[Batch]:
        """The batches of a rank, without end.

        With a parameter ``dealt`` they go on after what was (``data.reading``); without one the
        same ranks leave out what they have had, and others are refused.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss of a batch, a scalar."""
        ...

    def held_out(self, rank: int, world_size: int) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """A rank's batches of what is held out, with row numbers; as many on every rank."""
        ...

    def scores(
        self, model: nn.Module, batch: Batch, numbers: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Three columns for each held-out row, its number first: of a task that a user wrote then
        its weight (tokens, say), and its loss times that."""
        ...

    @property
    def bad_rows(self) -> int:
        """Rows that were left out so far."""
        ...


class FunctionCall(msgspec.Struct, frozen=True):
    """How the function that a job names is called; ``arguments`` are JSON."""

    name: str
    arguments: str
    batch: int
    sequence: int

    @classmethod
    def of(cls, job: Job, batch: int | None = None) -> FunctionCall:
        """The call for the job's own batch, or for one of ``batch`` samples."""
        model = job.model
        assert isinstance(model.python, str)
        arguments = {} if isinstance(model.arguments, msgspec.UnsetType) else model.arguments
        text = json.dumps(arguments, sort_keys=True, default=str)
        return cls(model.python, text, batch or job.batch.size, job.batch.sequence)

    @property
    def where(self) -> str:
        """How errors name the function, or the module of a program."""
        return f"model.python '{self.name}'" if ":" in self.name else self.name


class Built(NamedTuple):
    """What the function made: a module, what it is called with, and the loss of what it returns.

    ``loss`` is a function of the result, or where there are ``targets`` of both; None: the mean of
    the result. A model of ours names parts that are units: some ``apart`` from those that repeat,
    or all its ``units``, and is not shortened then.
    """

    where: str
    module: nn.Module
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    loss: Callable[..., Any] | None = None
    targets: Any = None
    notes: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    units: Shortened | None = None

    @property
    def called(self) -> str:
        """With what the module is called, in words."""
        return shown_call(self.inputs, self.keywords)

    def loss_of(self, result: Any, targets: Any = None) -> torch.Tensor:
        """The loss of a result, one number; InputError where that cannot be trained on."""
        where = f"{self.where}: its loss"
        if self.loss is None:
            found = _mean(result)
        else:
            found = self.loss(result) if self.targets is None else self.loss(result, targets)
        if not isinstance(found, torch.Tensor) or not found.requires_grad:
            raise no_gradient(result if self.loss is None else found, where)
        if found.numel() != 1:
            raise InputError(expected(where, "one number", f"a tensor {list(found.shape)}"))
        return found


@contextmanager
def importable() -> Iterator[None]:
    """The working directory's modules can be imported inside, and what is printed goes to stderr,
    for stdout is for data."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path.remove(here)


_STDLIB = Path(sysconfig.get_path("stdlib"))


def python_function(name: str, where: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names."""
    path, _, rest = name.partition(":")
    try:
        found: Any = importlib.import_module(path)
    except (Exception, SystemExit) as error:  # a module runs whatever it likes
        raise InputError(
            expected(
                where,
                f"an importable module '{path}'",
                first_line(error),
                "Run from the folder that holds it, or install it.",
            )
        ) from error
    module = found
    for part in rest.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        own = [n for n, v in vars(module).items() if callable(v) and v.__module__ == path]
        raise InputError(
            expected(
                where,
                f"a function '{rest}' in {path}",
                "nothing of that name" if found is None else type(found).__name__,
                there_are(rest, own),
            )
        )
    if _is_pythons(found):
        raise InputError(
            expected(where, "a function of your own", f"'{rest}' of Python's standard library")
        )
    return found  # type: ignore[no-any-return]


def _is_pythons(found: Any) -> bool:
    """Whether a function or class, by whatever name it was found, is of the standard library."""
    if not inspect.isroutine(found) and not inspect.isclass(found):
        return False
    owner = getattr(found, "__module__", None) or ""
    if owner.partition(".")[0] not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(owner), "__file__", None)
    return file is None or _STDLIB in Path(file).parents  # else a module of that name of one's own


def make(call: FunctionCall, function: Callable[..., Any], remedy: str = "") -> Built | Task:
    """Call the function and read what it returns; ``remedy`` is for where it fails.

    InputError, in one line, where it cannot be called or returns something else.
    """
    sizes = {"batch": call.batch, "sequence": call.sequence}
    asked = with_names_of(function, sizes)
    keywords = {**asked, **json.loads(call.arguments)}
    returned = returned_by(function, keywords, call.where, RETURNS, remedy)
    return returned if isinstance(returned, Task) else _parts(returned, call, not asked)


def with_names_of(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``given`` that a function has parameters for."""
    names = _parameters(function)
    return {name: value for name, value in given.items() if name in names}


def returned_by(
    function: Callable[..., Any],
    keywords: Mapping[str, Any],
    where: str,
    returns: str,
    remedy: str = "",
) -> Any:
    """What a function of the user's own returns; InputError where it does not, in one line."""
    try:
        inspect.signature(function).bind(**keywords)
    except TypeError as error:
        taken = ", ".join(_parameters(function))
        found = str(error).removeprefix("got ")
        raise InputError(expected(where, f"arguments that it takes ({taken})", found)) from error
    except ValueError:
        pass  # a builtin that does not tell
    try:
        return function(**keywords)
    except ShardwrightError:
        raise
    except (Exception, SystemExit) as error:  # a function does whatever it likes
        found = first_line(error)
        if "UninitializedParameter" in found:
            found = "lazy modules, whose sizes a first batch would decide"
            remedy = "Give its modules their sizes."
        raise InputError(
            expected(where, f"a function that returns {returns}", found, remedy)
        ) from error


@contextmanager
def naming_errors(where: str) -> Iterator[None]:
    """What the user's own code raises inside becomes an InputError that names its place; an error
    of ours, of a peer, or of memory goes on as it is."""
    try:
        yield
    except ShardwrightError:
        raise
    except Exception as error:
        place = place_of(error)
        # A rank that lost its peers, or ran out of memory, has nothing wrong with the user's code:
        # to name its line would send the user to the wrong place.
        if place is None or from_a_peer(error) or out_of_memory(error):
            raise
        where += place
        remedy = "The log of this rank in the run's folder has the traceback."
        text = expected(where, "a step that runs", first_line(error), remedy)
        wrong = wrong_id(error)
        if wrong is not None:
            text = bad_id(f"{where}: ids of {wrong.of}, position {wrong.place}", *wrong.found)
        raise InputError(text) from error


def _parameters(function: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []


def _parts(returned: Any, call: FunctionCall, unasked: bool) -> Built:
    parts = returned if isinstance(returned, (tuple, list)) else (returned,)
    if not parts or len(parts) > 4 or not isinstance(parts[0], nn.Module):
        found = ", ".join(type(part).__name__ for part in parts) or "nothing"
        found = f"({found})" if isinstance(returned, (tuple, list)) else found
        raise InputError(expected(call.where, RETURNS, found))
    module, inputs, loss, targets = (*parts, None, None, None)[:4]
    if loss is None and targets is not None:
        wanted = "a function of the result and the targets as loss"
        raise InputError(expected(call.where, wanted, "targets alone"))
    if loss is not None and not callable(loss):
        wanted = "a function of the result as loss"
        raise InputError(expected(call.where, wanted, type(loss).__name__))
    notes = []
    if inputs is None:
        shape = f"[{call.batch}, {call.sequence}]"
        inputs = torch.zeros(call.batch, call.sequence, dtype=torch.int64)
        notes.append(f"'{call.name}' gives no inputs: its module is called with tokens {shape}")
    elif unasked:
        notes.append(f"'{call.name}' makes its own inputs: batch and sequence do not matter")
    if loss is None:
        notes.append(f"'{call.name}' gives no loss: the mean of the result stands for it")
    return Built(call.where, module, *as_call(inputs), loss, targets, tuple(notes))


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as the arguments and keywords that a module is called with."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def as_tensors(batch: Any) -> Any:
    """A batch with tensors where it has arrays."""
    return tree_map(lambda v: torch.from_numpy(v) if isinstance(v, np.ndarray) else v, batch)


def check_call(built: Built) -> None:
    """InputError where the module's forward does not take its inputs."""
    try:
        inspect.signature(built.module.forward).bind(*built.inputs, **built.keywords)
    except TypeError as error:
        raise InputError(
            expected(
                f"{built.where}: {named(built.module, '')}",
                f"a forward that takes {built.called}",
                str(error),
                "Give what it takes: a job's function returns (module, inputs).",
            )
        ) from error
    except ValueError:
        pass


def shown_call(inputs: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """Arguments and keywords of a call, by dtype and shape."""
    values = [_shown(value) for value in inputs]
    values += [f"{name}={_shown(value)}" for name, value in keywords.items()]
    return f"({', '.join(values)})"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _mean(result: Any) -> torch.Tensor | None:
    """The first tensor of a result that gradients come back through, as one number."""
    values = list(result.values()) if isinstance(result, Mapping) else result
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf if leaf.dim() == 0 else leaf.mean()
    return None


# ---- a task of the user's own --------------------------------------------------------------------


class _AskedError(Exception):
    """The loss of a task has called its model."""


class _Asks:
    """Stands for a model, and tells what it is called with."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        raise _AskedError(inputs, keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class _Answers(_Asks):
    """Stands for a model that has given ``result``."""

    def __init__(self, module: nn.Module, result: Any) -> None:
        super().__init__(module)
        self.result = result

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.result


def built_of(made: Built | Task, where: str) -> Built:
    """What was built; of a task the module, and the call that its loss makes with the first batch
    of rank 0."""
    if isinstance(made, Built):
        return made
    task = made
    module = task.model(torch.device("cpu"))
    batch = as_tensors(next(task.batches(0, 1)))
    try:
        task.loss(_Asks(module), batch)  # type: ignore[arg-type]
    except _AskedError as asked:
        inputs, keywords = asked.args
    else:
        wanted = "a loss that calls the model it is given"
        raise InputError(expected(f"{where}: its task", wanted, "none")) from None

    def loss(result: Any, batch: Any) -> torch.Tensor:
        return task.loss(_Answers(module, result), batch)  # type: ignore[arg-type]

    return Built(where, module, inputs, keywords, loss, batch)


def inputs_of(task: Task, job: Job) -> InputsOf:
    """How a task calls its model; InputError where it does not say, for ids are to travel ahead."""
    found: InputsOf | None = getattr(task, "inputs", None)
    if found is None:
        wanted = "'rows' or 'none' for a task without a function inputs"
        remedy = (
            "Let inputs(batch) return the (arguments, keywords) that loss calls the model with."
        )
        raise InputError(expected("train.overlap", wanted, f"'{job.train.overlap}'", remedy))
    return found
