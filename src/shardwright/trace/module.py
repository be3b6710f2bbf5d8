"""A module's step as a recording: run once on fake tensors, cut where units begin and end."""

# Why a step is cut where units begin and end: there a runtime gathers, frees and reduces, so that
# memory under any runtime is these pieces with that in between. The trace itself knows no runtime.
#
# What must stay true: nothing is held here for longer than a training loop holds it, so results and
# losses are let go where they are last needed, and the user's module is left as it was.

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from msgspec import UNSET
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwright.core.errors import ShardwrightError
from shardwright.core.recording import RecordedUnit, Recording, Series
from shardwright.core.tensor import TensorSpec
from shardwright.trace.checks import Untraceable
from shardwright.trace.recorder import Recorder, watching
from shardwright.tracker.private import key_of
from shardwright.tracker.tensors import NAMES


@dataclass(frozen=True, slots=True)
class TracedModule:
    """What is traced: ``module`` called with ``inputs``, then ``loss`` of its result.

    ``units`` are the modules that share a unit, by the unit's name, in the order of their forward;
    one named ``""`` is the whole module and has the parameters of no other. Without a ``loss`` the
    result's own gradient is made up, as a pipeline's stage receives it. ``freezes``: parameters
    that get no gradient count as frozen. ``call`` runs a stage of the module instead of all of it.
    """

    module: nn.Module
    inputs: Sequence[Any]
    units: Mapping[str, Sequence[nn.Module]]
    loss: Callable[[Any], torch.Tensor] | None = None
    series: tuple[Series, ...] = ()
    cast: torch.dtype | None = None
    extra: Sequence[torch.Tensor] = ()  # inputs of the loss
    keywords: Mapping[str, Any] = field(default_factory=dict)  # further inputs of the module
    around: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    apart: Sequence[str] = ()  # units that are one only if nobody else uses their parameters
    freezes: bool = False
    checkpointed: Mapping[nn.Module, str] = field(default_factory=dict)  # and each one's policy
    call: Callable[[TracedModule, Recorder], Any] | None = None


class NoUnitsError(Exception):
    """Units whose parameters are used outside of their forward, by name."""

    def __init__(self, units: Iterable[str]) -> None:
        super().__init__(", ".join(sorted(units)))
        self.units = frozenset(units)


def record(subject: TracedModule) -> Recording:
    """Run one step of ``subject`` and cut it in pieces.

    Call under the fake mode that the module and its inputs were made in.
    """
    recorder, module = Recorder(), subject.module
    # A unit beside the parts that repeat is only one if its parameters are read inside its own
    # forward: another module that reads them (tied weights, say) would find them not gathered. The
    # recorder watches their storages and says which units that is so of.
    for unit in subject.apart:
        for part in subject.units[unit]:
            for parameter in part.parameters():
                recorder.homes[key_of(parameter.untyped_storage())] = unit
    given = tree_leaves([list(subject.inputs), dict(subject.keywords), list(subject.extra)])
    before = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    # Torch's kernels for tensors without data import this at their first call. Amid a step it would
    # leave cycles around what is alive there: a first recording in a process kept 400 MB of logits.
    import_module("torch._dynamo")
    # Everything that is there before has to be adopted, or it would be taken for something that the
    # step made where an operation first meets it.
    held = list(held_tensors(module))
    for tensor in (*held, *before):
        recorder.adopt(tensor)
    written = _written(subject.checkpointed)
    try:
        watched = watching(recorder, module, subject.units, subject.cast)
        with _garbage_stays(), watched, recorder, subject.around():
            returned = _step(recorder, subject)
        # what a forward writes, as BatchNorm its statistics, would be written again in the backward
        checkpointed = subject.checkpointed if written == _written(subject.checkpointed) else {}
        pieces, given_bytes = recorder.finished(), recorder.given
        trained = None if not subject.freezes else _with_gradient(module)
    except ShardwrightError:
        raise
    except Exception as error:  # modules fail in as many ways as they are written
        raise Untraceable(recorder.place_of(error), error) from error
    finally:
        # Whatever happened: gradients and followed storages would stay alive with the module, which
        # is the caller's and runs again.
        recorder.storages.release()
        for parameter in module.parameters():
            parameter.grad = None
    entered = {piece.unit for piece in pieces if piece.point == "enter"}
    if strange := recorder.astray | (set(subject.apart) - entered):
        raise NoUnitsError(strange)
    return Recording(
        pieces=pieces,
        units=tuple(recorded_units(module, subject.units, subject.series, trained, checkpointed)),
        series=subject.series,
        buffers=storage_bytes(t for t in held if not isinstance(t, nn.Parameter)),
        inputs=storage_bytes(before) + given_bytes,
        result=returned,
        operators=tuple(sorted(recorder.operators)),
    )


@contextmanager
def _garbage_stays() -> Iterator[None]:
    """No collection inside: what cycles hold would be freed at random."""
    # A model with a cycle (a hook that knows its module) frees its activations when Python
    # collects, which in a trace is at another moment in every run. Off, they stay in every run
    # alike.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _step(recorder: Recorder, subject: TracedModule) -> int:
    """One forward and backward; the bytes of a result that a stage sends on."""
    if subject.call is not None:
        result = subject.call(subject, recorder)
    else:
        result = subject.module(*subject.inputs, **subject.keywords)
    returned = 0
    recorder.mark("", "finish")
    if subject.loss is None:
        target = _trained(result)
        del result
        returned = target.untyped_storage().nbytes()
        gradient = torch.empty_like(target)
        # The gradient comes from the next stage into a buffer that the pipeline holds and counts
        # (`RankStep.receives`).
        recorder.forget(gradient)
        recorder.mark("", "backward")
        target.backward(gradient)
    else:
        recorder.mark("", "loss")
        loss = subject.loss(result)
        # Whether a training loop still names it is counted apart (`Chunk.named`): here only what
        # autograd keeps of it counts.
        del result
        recorder.mark("", "backward")
        loss.backward()
    return returned


def held_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors that a module has as attributes or in lists of them."""
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                leaves = tree_leaves(value) if isinstance(value, (list, tuple, dict)) else [value]
                yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({key_of(storage): storage.nbytes() for storage in storages}.values())


def _written(parts: Iterable[nn.Module]) -> list[tuple[int, int]]:
    """What is another list after a buffer of ``parts`` was written or replaced."""
    return [(id(buffer), buffer._version) for part in parts for buffer in part.buffers()]


def _trained(result: Any) -> torch.Tensor:
    """The tensor of a stage's result that the next stage sends a gradient for."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return next(leaf for leaf in leaves if leaf.requires_grad)


def _with_gradient(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in module.parameters() if parameter.grad is not None}


def recorded_units(
    module: nn.Module,
    units: Mapping[str, Sequence[nn.Module]],
    series: Sequence[Series] = (),
    trained: Collection[nn.Parameter] | None = None,
    checkpointed: Mapping[nn.Module, str] = MappingProxyType({}),
) -> list[RecordedUnit]:
    """The parameters of every unit, frozen ones too: they are gathered with the others.

    A parameter that several units share belongs to the first that has it. ``trained`` are those
    that are not frozen, by default all that require a gradient.
    """
    if trained is None:
        trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
    # The first name of a parameter that stands in two places, as `named_parameters` of torch has
    # it: with both a tied weight would count twice.
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters():
        names.setdefault(parameter, name)
    places = {part: path for path, part in module.named_modules()}
    of_series = {block: s.name for s in series for block in s.recorded}
    taken: set[nn.Parameter] = set()
    found = {}
    # The root last: it has what no other unit has.
    for unit in sorted(units, key=lambda name: name == ""):
        mine = dict.fromkeys(p for part in units[unit] for p in part.parameters())
        left = [p for p in mine if p not in taken]
        taken.update(left)
        tensors = tuple(_spec(names[p], p) for p in left)
        paths = tuple(places[part] for part in units[unit])
        frozen = tuple(names[p] for p in left if p not in trained)
        policy = checkpointed.get(units[unit][0], UNSET)
        found[unit] = RecordedUnit(unit, tensors, of_series.get(unit, ""), paths, frozen, policy)
    missing = [names[p] for p in names if p not in taken]
    assert not missing, f"in no unit: {missing}"
    return [found[unit] for unit in units]


def _spec(name: str, parameter: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(parameter.shape), NAMES[parameter.dtype])
