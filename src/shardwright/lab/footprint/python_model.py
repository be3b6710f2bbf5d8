"""Recordings of a module of the user's own: what a function returns, run once on fake tensors.

The function gets its keywords, and ``batch`` and ``sequence`` where it takes them. It returns a
module, or the module and its inputs, or both and a loss. Without inputs the module is called with
token ids; without a loss with the mean of what it returns, or that itself if it is one number.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.core.errors import InputError, ShardwrightError, expected
from shardwright.core.job import Job, memory_of
from shardwright.core.recording import Recording
from shardwright.trace.checkpointing import policy
from shardwright.trace.checks import (
    Untraceable,
    check_module,
    explained,
    first_line,
    named,
    no_gradient,
    without_pointers,
)
from shardwright.trace.composed import Composer, Shortened
from shardwright.trace.module import DTYPE_NAMES, Subject, held_tensors, record, storage_bytes
from shardwright.trace.treatment import Treatment

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BATCH_KEYWORDS = ("batch", "sequence")
POINTER = "Accessing the data pointer of FakeTensor"  # torch's words, 2.11 to 2.13
RETURNS = "a module, (module, inputs) or (module, inputs, loss)"


class Request(msgspec.Struct, frozen=True):
    """All that a recording of a function's module depends on."""

    name: str
    arguments: str  # as JSON
    batch: int
    sequence: int
    dtype: str
    treatment: Treatment
    full: bool = False

    @property
    def where(self) -> str:
        """How errors name the function."""
        return f"model.python '{self.name}'"


class Built(NamedTuple):
    """What a function made: the module, what it is called with, and the loss of what it returns."""

    module: nn.Module
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    loss: Callable[[Any], Any] | None
    notes: tuple[str, ...]


def python_recording(
    job: Job, treatment: Treatment, batch: int, *, full: bool = False
) -> tuple[Recording, int]:
    """The recording of a job's own module for ``batch`` samples, and its number of parameters.

    Parameters compute in ``memory.param_dtype``; the units tell the dtypes they were made in. With
    ``full`` every part is recorded, not a few of each kind.
    InputError where the function or its module cannot be used, in one line that says why.
    """
    model = job.model
    assert isinstance(model.python, str)
    arguments = {} if isinstance(model.arguments, msgspec.UnsetType) else model.arguments
    request = Request(
        model.python,
        json.dumps(arguments, sort_keys=True, default=str),
        batch,
        job.batch.sequence,
        memory_of(job).param_dtype,
        treatment,
        full,
    )
    with redirect_stdout(sys.stderr), _importable():
        return _recorded(request, python_function(request.name, request.where))


@contextmanager
def _importable() -> Iterator[None]:
    """The working directory's modules can be imported inside."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


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
    for part in rest.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise InputError(
            expected(
                where,
                f"a function '{rest}' in {path}",
                "nothing of that name" if found is None else type(found).__name__,
            )
        )
    return found  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _recorded(request: Request, function: Callable[..., Any]) -> tuple[Recording, int]:
    # a module may have kept real tensors that it made when it was imported
    mode, default = FakeTensorMode(allow_non_fake_inputs=True), torch.get_default_dtype()
    try:
        with mode, warnings.catch_warnings():
            warnings.filterwarnings("ignore", POINTER)  # copies of modules ask for it
            built = _built(request, function)
            with without_pointers():
                return _traced(request, built, mode)
    finally:
        torch.set_default_dtype(default)


def _traced(request: Request, built: Built, mode: FakeTensorMode) -> tuple[Recording, int]:
    module, where = built.module, request.where
    check_module(module, where)
    made = {
        name: DTYPE_NAMES[p.dtype] for name, p in module.named_parameters(remove_duplicate=False)
    }
    settle(module, mode, TORCH_DTYPES[request.dtype])
    inputs, keywords = (tree_map(lambda leaf: _fake(leaf, mode), v) for v in built[1:3])
    called = _check_call(module, inputs, keywords, where)
    whole = [tensor for tensor in held_tensors(module) if not isinstance(tensor, nn.Parameter)]
    subject = Subject(module, inputs, {}, loss=_loss(built.loss, where), keywords=keywords)
    every = policy(request.treatment.checkpointing).every
    composer = Composer(module, _run(request, subject), every, request.full)
    try:
        found = composer.recording()
    except Untraceable as error:
        raise explained(error, module, where, called) from error
    notes = (*built.notes, *composer.notes, *_about_units(composer, request), *found.notes)
    units = tuple(
        msgspec.structs.replace(
            unit,
            tensors=tuple(
                msgspec.structs.replace(t, dtype=made.get(t.fqn, t.dtype)) for t in unit.tensors
            ),
        )
        for unit in found.units
    )
    found = msgspec.structs.replace(
        found, units=units, buffers=storage_bytes(whole), notes=tuple(dict.fromkeys(notes))
    )
    return found, sum(parameter.numel() for parameter in module.parameters())


def _run(request: Request, subject: Subject) -> Callable[[Shortened], Recording]:
    """Records the module with the parts that it has just then."""
    treatment, dtype = request.treatment, TORCH_DTYPES[request.dtype]
    every = policy(treatment.checkpointing).every

    def run(shortened: Shortened) -> Recording:
        treated = [k for k, place in enumerate(shortened.places) if (place + 1) % every == 0]
        with treatment.applied(subject.module, shortened.blocks, treated) as applied:
            here = replace(
                subject,
                units=shortened.units,
                series=shortened.series,
                cast=dtype,
                around=applied.around,
            )
            found = record(here)
        return msgspec.structs.replace(found, notes=tuple(applied.notes))

    return run


def _about_units(composer: Composer, request: Request) -> Iterator[str]:
    if any(container.units for container in composer.containers):
        return
    yield "no part of the module repeats: all of its parameters are one unit"
    if request.treatment.checkpointing != "none":
        yield f"checkpointing '{request.treatment.checkpointing}' has no repeated parts to work on"


# ---- what the function returns -------------------------------------------------------------------


def _built(request: Request, function: Callable[..., Any]) -> Built:
    where, keywords = request.where, json.loads(request.arguments)
    taken = _parameters(function)
    sizes = {"batch": request.batch, "sequence": request.sequence}
    asked = {name: sizes[name] for name in BATCH_KEYWORDS if name in taken}
    keywords = {**asked, **keywords}
    try:
        inspect.signature(function).bind(**keywords)
    except TypeError as error:
        raise InputError(
            expected(where, f"arguments that it takes ({', '.join(taken)})", str(error))
        ) from error
    except ValueError:
        pass  # a builtin that does not tell
    try:
        returned = function(**keywords)
    except ShardwrightError:
        raise
    except (Exception, SystemExit) as error:  # a function does whatever it likes
        found, remedy = first_line(error), "It runs on fake CPU tensors."
        if "UninitializedParameter" in found:
            found = "lazy modules, whose sizes a first batch would decide"
            remedy = "Give its modules their sizes."
        raise InputError(
            expected(where, f"a function that returns {RETURNS}", found, remedy)
        ) from error
    return _parts(returned, request, not asked)


def _parameters(function: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []


def _parts(returned: Any, request: Request, unasked: bool) -> Built:
    parts = returned if isinstance(returned, (tuple, list)) else (returned,)
    if not parts or len(parts) > 3 or not isinstance(parts[0], nn.Module):
        found = ", ".join(type(part).__name__ for part in parts) or "nothing"
        found = f"({found})" if isinstance(returned, (tuple, list)) else found
        raise InputError(expected(request.where, RETURNS, found))
    module, inputs, loss = (*parts, None, None)[:3]
    if loss is not None and not callable(loss):
        raise InputError(
            expected(request.where, "a function of the result as loss", type(loss).__name__)
        )
    notes = []
    if inputs is None:
        shape = f"[{request.batch}, {request.sequence}]"
        inputs = torch.zeros(request.batch, request.sequence, dtype=torch.int64)
        notes.append(f"'{request.name}' gives no inputs: its module is called with tokens {shape}")
    elif unasked:
        notes.append(f"'{request.name}' makes its own inputs: batch and sequence do not matter")
    if loss is None:
        notes.append(f"'{request.name}' gives no loss: the mean of the result stands for it")
    if isinstance(inputs, Mapping):
        return Built(module, (), dict(inputs), loss, tuple(notes))
    several = isinstance(inputs, (tuple, list))
    return Built(module, tuple(inputs) if several else (inputs,), {}, loss, tuple(notes))


def _check_call(module: nn.Module, inputs: Any, keywords: Any, where: str) -> str:
    """With what the module is called, in words; InputError where its forward takes something
    else."""
    shown = [_shown(value) for value in inputs]
    shown += [f"{name}={_shown(value)}" for name, value in keywords.items()]
    called = f"({', '.join(shown)})"
    try:
        inspect.signature(module.forward).bind(*inputs, **keywords)
    except TypeError as error:
        raise InputError(
            expected(
                f"{where}: {named(module, '')}",
                f"a forward that takes {called}",
                str(error),
                "Return (module, inputs) from the function.",
            )
        ) from error
    except ValueError:
        pass
    return called


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _loss(given: Callable[[Any], Any] | None, where: str) -> Callable[[Any], torch.Tensor]:
    def loss(result: Any) -> torch.Tensor:
        found = _mean(result) if given is None else given(result)
        if not isinstance(found, torch.Tensor) or not found.requires_grad:
            raise no_gradient(result if given is None else found, f"{where}: its loss")
        if found.numel() != 1:
            shape = f"a tensor {list(found.shape)}"
            raise InputError(expected(f"{where}: its loss", "one number", shape))
        return found

    return loss


def _mean(result: Any) -> torch.Tensor | None:
    """The first tensor of a result that gradients come back through, as one number."""
    values = list(result.values()) if isinstance(result, Mapping) else result
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf if leaf.dim() == 0 else leaf.mean()
    return None


# ---- tensors of one fake mode --------------------------------------------------------------------


def settle(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> None:
    """Every tensor of the module becomes one of the mode, on the CPU; parameters compute in
    ``dtype``."""
    done: dict[int, torch.Tensor] = {}

    def once(tensor: Any, make: Callable[..., Any], *how: Any) -> Any:
        if id(tensor) not in done:
            done[id(tensor)] = make(tensor, mode, *how)
        return done[id(tensor)]

    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and once(parameter, _parameter, dtype) is not parameter:
                setattr(part, name, once(parameter, _parameter, dtype))
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = once(buffer, _fake)
        for name, value in list(vars(part).items()):
            if _has_strange(value, mode):
                vars(part)[name] = tree_map(lambda leaf: once(leaf, _fake), value)


def _has_strange(value: Any, mode: FakeTensorMode) -> bool:
    if not isinstance(value, (torch.Tensor, list, tuple)):
        return False
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return any(not _is_ours(tensor, mode) for tensor in tensors)


def _parameter(parameter: nn.Parameter, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Parameter:
    wanted = dtype if parameter.is_floating_point() else parameter.dtype
    own = _is_ours(parameter, mode)
    if own and parameter.dtype == wanted:
        return parameter
    cast = torch.empty_strided(parameter.shape, parameter.stride(), dtype=wanted, device="cpu")
    if own:
        parameter.data = cast
        return parameter
    fresh = nn.Parameter(cast, requires_grad=parameter.requires_grad)
    if not isinstance(parameter, FakeTensor):  # which keeps its mode among its attributes
        vars(fresh).update(vars(parameter))
    return fresh


def _is_ours(leaf: torch.Tensor, mode: FakeTensorMode) -> bool:
    return isinstance(leaf, FakeTensor) and leaf.fake_mode is mode and leaf.device.type == "cpu"


def _fake(leaf: Any, mode: FakeTensorMode) -> Any:
    """A tensor of the mode on the CPU, itself where it is one."""
    if not isinstance(leaf, torch.Tensor) or _is_ours(leaf, mode):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    return made.requires_grad_(leaf.requires_grad) if leaf.is_floating_point() else made
