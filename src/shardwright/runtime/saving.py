"""Saving a model and its optimizers, and loading them under any world size, cut and grouping."""

# What is saved goes by names in the unsharded model, never by units or ranks: that alone lets a
# checkpoint be loaded under another world size, cut or grouping. Everything is looked up and
# checked before a tensor changes; the exception, which the docstring names, is state of parameters
# that share a flat tensor.

from __future__ import annotations

import base64
import contextlib
import logging
import random
import weakref
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwright import __version__
from shardwright.core.document import decode_json
from shardwright.core.errors import InputError, MismatchError, ShardwrightError
from shardwright.runtime.checkpoint import TensorPart, read_checkpoint
from shardwright.runtime.checkpoint.agreement import rank_and_size, reason, together
from shardwright.runtime.checkpoint.files import list_name
from shardwright.runtime.checkpoint.folders import Newest
from shardwright.runtime.checkpoint.read import Stored
from shardwright.runtime.checkpoint.write import SaveWork, run_through, save_in_parts
from shardwright.runtime.model_parts import (
    STATE,
    comm_of,
    holdings,
    parts_of,
    settle,
    table_states,
    tables_filled,
)
from shardwright.runtime.optimizer_dict import (
    Group,
    as_scalars,
    everyones,
    groups_of,
    joined,
    set_groups,
    settings_for,
)
from shardwright.runtime.optimizer_state import Incoming, as_optimizers, held_state, uses_of

Optimizers = Optimizer | Sequence[Optimizer] | None

# What a model was last saved as or filled from, as long as it lives.
_NEWEST: weakref.WeakKeyDictionary[nn.Module, Newest] = weakref.WeakKeyDictionary()


class Resumed(NamedTuple):
    """What a checkpoint says besides tensors.

    ``extra`` is what this rank gave when saving, or rank ``rank % world_size`` where there were
    fewer, ``extras`` what every rank gave; ``world_size`` is that of the run that saved.
    ``random_state`` says whether that was restored.
    """

    step: int
    extra: Any
    facts: dict[str, str]
    world_size: int
    random_state: bool
    extras: tuple[Any, ...]


def save_checkpoint(
    folder: Path | str,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int,
    extra: Any = None,
    facts: Mapping[str, str] | None = None,
    keep: int | None = None,
    mesh: DeviceMesh | None = None,
) -> Path:
    """Save model and optimizers as ``folder/step-N`` and return that path (collective).

    Every tensor goes in under its name in the unsharded model, each part written by one rank:
    parameters, tables, persistent buffers, the state of one or several optimizers, and the settings
    of their groups. Of buffers and of parameters outside of units, rank 0's are saved. Units are
    resharded first.

    Args:
        extra: this rank's plain values (JSON): a position in the data, a scheduler's state.
        facts: texts that are the same on every rank, such as a plan's fingerprint.
        keep: remove all but the newest so many checkpoints of ``folder`` afterwards, and but those
            that other processes saved or loaded last.
        mesh: all ranks that save, for a model whose units do not know; see ``comm_of``.

    Raises:
        InputError: for a step that exists, or something that cannot be stored.
        RunError: naming the rank that could not write, and why. Then nothing was saved, earlier
            checkpoints are whole, and training can go on.
    """
    options = {"step": step, "extra": extra, "facts": facts, "keep": keep, "mesh": mesh}
    return run_through(save_parts(folder, model, optimizer, **options))


def save_parts(
    folder: Path | str,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int,
    extra: Any = None,
    facts: Mapping[str, str] | None = None,
    keep: int | None = None,
    mesh: DeviceMesh | None = None,
    copied: bool = False,
) -> Generator[SaveWork, None, Path]:
    """``save_checkpoint`` in parts, see ``save_in_parts``; what is saved is looked up at once."""
    comm = comm_of(model, mesh)
    leads = rank_and_size(comm)[0] == 0
    optimizers = as_optimizers(optimizer)
    settle(model)

    def hold() -> tuple[list[TensorPart], dict[str, Any]]:
        parts = parts_of(model)
        held = holdings(model, parts, leads=leads)
        uses = [uses_of(parts, each) for each in optimizers]
        for own, each in zip(uses, optimizers, strict=True):
            held.extend(held_state(own, each, leads=leads))
        scalars: dict[str, Any] = {"extra": extra, "random": random_states()}
        if optimizers:
            scalars["optimizer"] = as_scalars(groups_of(optimizers, uses))
        return held, scalars

    held, scalars = together(comm, "hold", hold, _failure("the model to save"))
    # For whoever reads the checkpoint in years; nothing here depends on them.
    versions = {"torch": str(torch.__version__), "shardwright": __version__}
    return save_in_parts(
        folder,
        step,
        held,
        comm,
        facts={**versions, **(facts or {})},
        scalars=scalars,
        keep=keep,
        newest=_NEWEST.setdefault(model, Newest()),
        copied=copied,
    )


def load_checkpoint(
    folder: Path | str,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    allow_smaller_dtype: bool = False,
    random_state: bool = False,
    mesh: DeviceMesh | None = None,
) -> Resumed:
    """Fill model and optimizers from ``step`` of ``folder``, by default the newest (collective).

    World size, strategy, units, groups, and whether the optimizer has flat parameters or the
    model's, may differ from the run that saved. All is filled in place; an optimizer that has taken
    no step gets its state made. Settings of groups (learning rates and the like) are restored by
    the names of their parameters. Without ``optimizer`` its state in the checkpoint is skipped; the
    states of rows of tables belong to the model.

    Args:
        allow_smaller_dtype: round where the model has a smaller floating-point dtype.
        random_state: go on with this rank's random numbers (torch's, CPU and the mesh's device,
            Python's and NumPy's), if there are as many ranks as when saving.

    Raises:
        MismatchError: for a file that was changed, or a model or optimizer that is not what was
            saved, naming the tensor. Then nothing has changed, but where parameters that share a
            flat tensor were saved at different steps.
        InputError: for a folder without a checkpoint, or one that cannot be read.
    """
    comm = comm_of(model, mesh)
    optimizers = as_optimizers(optimizer)
    settle(model)

    def look() -> list[Group]:
        return as_scalars(groups_of(optimizers, [uses_of(parts, each) for each in optimizers]))

    parts = together(comm, "hold", lambda: parts_of(model), _failure("the model to load"))
    own = together(comm, "groups", look, _failure("the optimizer to load"))
    groups = joined(everyones(comm, "groups of the optimizer", own)) if optimizers else []
    incoming: list[Incoming] = []
    settings: list[Group] = []

    # Asked once the documents are verified: which states there are to load is the checkpoint's to
    # say, and an optimizer that has taken no step has none of its own to go by.
    def wanted(stored: Stored) -> list[TensorPart]:
        if random_state:
            check_random_states(stored)
        held = holdings(model, parts, leads=True)
        if not optimizers:
            return held
        settings.extend(settings_for(groups, _saved_groups(stored)))
        names = _state_names(stored, table_states(model))
        for each in optimizers:
            incoming.append(Incoming(uses_of(parts, each), each, names))
            held.extend(incoming[-1].held())
        return held

    # A model alone is loaded without its optimizer's states; that a checkpoint has more is then no
    # error.
    skip = () if optimizers else (STATE,)
    found = read_checkpoint(
        folder, wanted, comm, step=step, allow_smaller_dtype=allow_smaller_dtype, skip=skip
    )

    def install() -> None:
        tables_filled(model)
        # All are looked at before one is changed: a mismatch of the second would leave the first
        # loaded.
        for each in incoming:
            each.check()
        for each in incoming:
            each.install()
        set_groups(optimizers, settings)

    together(comm, "install", install, _failure("the optimizer to load"))
    if rank_and_size(comm)[0] == 0:
        file = found.folder / list_name(0)
        with contextlib.suppress(OSError), _NEWEST.setdefault(model, Newest()).becomes(file):
            pass  # what a run goes on from is its newest until it saves
    return _resumed(found, *rank_and_size(comm), random_state=random_state)


def _resumed(found: Stored, rank: int, size: int, *, random_state: bool) -> Resumed:
    """What a checkpoint says to ``rank`` of so many, whose random numbers may go on."""
    saved = found.manifest
    scalars = found.lists[rank % saved.world_size].scalars
    restored = random_state and restore(scalars, saved.world_size, size)
    extras = tuple(each.scalars.get("extra") for each in found.lists)
    own = scalars.get("extra")
    return Resumed(saved.step, own, saved.facts, saved.world_size, restored, extras)


def _failure(what: str) -> Any:
    def failure(error: Exception) -> ShardwrightError:
        return InputError(what, "what can be stored by name", f"'{reason(error)}'")

    return failure


def _saved_groups(stored: Stored) -> list[Group]:
    lists = [found.scalars.get("optimizer") for found in stored.lists]
    if any(groups is None for groups in lists):
        remedy = "Save with the optimizer, or load without it."
        raise MismatchError(str(stored.folder), "the state of an optimizer", "none", remedy)
    return joined([groups for groups in lists if groups is not None])


def _state_names(stored: Stored, sums: set[str]) -> dict[str, set[str]]:
    """The states of every parameter that the checkpoint has."""
    names: dict[str, set[str]] = defaultdict(set)
    for name in stored.tensors:
        if name.startswith(STATE) and name not in sums:
            fqn, _, state = name.removeprefix(STATE).rpartition("/")
            names[fqn].add(state)
    return names


States = dict[str, str]

log = logging.getLogger(__name__)


def random_states() -> States:
    """Of torch's generators by device type, of Python's and of NumPy's."""
    states = {"cpu": _tensor_text(torch.get_rng_state())}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        of_device = torch.get_device_module(accelerator.type).get_rng_state()
        states[accelerator.type] = _tensor_text(of_device)
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = [name, keys.tolist(), *rest]
    for kind, state in (("python", random.getstate()), ("numpy", numpy_state)):
        states[kind] = msgspec.json.encode(state).decode()
    return states


def set_random_states(states: Mapping[str, str]) -> None:
    """Go on from ``states``; those of a device that is not here are left out."""
    for kind, text in states.items():
        if kind == "python":
            random.setstate(_python_state(text))
        elif kind == "numpy":
            np.random.set_state(_numpy_state(text))
        elif kind == "cpu":
            torch.set_rng_state(_tensor(text))
        elif torch.accelerator.is_available():
            torch.get_device_module(kind).set_rng_state(_tensor(text))


def restore(scalars: Mapping[str, Any], saved: int, world_size: int) -> bool:
    """Go on as one of ``saved`` ranks left off; False, which is logged, where there are others."""
    if saved != world_size or "random" not in scalars:
        log.warning("random numbers begin anew: the checkpoint is of %d ranks", saved)
        return False
    set_random_states(scalars["random"])
    return True


def check_random_states(stored: Stored) -> None:
    """Raise InputError unless generators take what a checkpoint says of them."""
    for rank, found in enumerate(stored.lists):
        states = found.scalars.get("random", {})
        for kind, take in _TRIED.items():
            try:
                if kind in states:
                    take(states[kind])
            except Exception as error:  # of any kind: a text can be anything
                where = f"{stored.folder}: random.{kind} of rank {rank}"
                found_text = f"one that is refused: {type(error).__name__}"
                raise InputError(where, "a generator's state", found_text) from None


def _tensor_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _python_state(text: str) -> Any:
    version, keys, gauss = decode_json(text, tuple[int, tuple[int, ...], float | None])
    return version, keys, gauss


def _numpy_state(text: str) -> Any:
    return decode_json(text, tuple[str, list[int], int, int, float])


# What takes a state on trial.
_TRIED = {
    "cpu": lambda text: torch.Generator().set_state(_tensor(text)),
    "python": lambda text: random.Random().setstate(_python_state(text)),
    "numpy": lambda text: np.random.RandomState().set_state(_numpy_state(text)),
}
