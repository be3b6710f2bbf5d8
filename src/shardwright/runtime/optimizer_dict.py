"""Optimizer state as ``torch.distributed.checkpoint`` has it: by name, in DTensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.core.amount import ceil_div
from shardwright.core.errors import InputError, MismatchError, ShardwrightError
from shardwright.runtime.checkpoint.agreement import rank_and_size, reason, together, total
from shardwright.runtime.checkpoint.region import blocks_of
from shardwright.runtime.comm import Comm
from shardwright.runtime.model_parts import ModelPart, comm_of, parts_of, settle
from shardwright.runtime.optimizer_state import (
    ONCE,
    Incoming,
    Uses,
    as_optimizers,
    fresh_state,
    named_state,
    per_block,
    present,
    uses_of,
)
from shardwright.runtime.torch_private import local_of
from shardwright.runtime.units.cut import Cut
from shardwright.runtime.units.shard_tensor import OPERATORS, ShardTensor

# How a step is carried out, which belongs to the run and not to what it has learned
EXECUTION = ("capturable", "differentiable", "foreach", "fused", "param_names", "params")

RANGES = {  # of settings as torch's constructors have them: from, below
    "betas": (0.0, 1.0),
    **dict.fromkeys(("eps", "lr", "momentum", "weight_decay"), (0.0, math.inf)),
}

Group = dict[str, Any]


def groups_of(optimizers: Sequence[Optimizer], uses: Sequence[Uses]) -> list[Group]:
    """Every group as torch describes it, with this rank's names in the place of parameters.

    Frozen parameters and those without elements are left out: flat tensors do not have them.
    """
    found = []
    for optimizer, own in zip(optimizers, uses, strict=True):
        for group in optimizer.param_groups:
            parts = [use.part for p in group["params"] for use in own[p] if p.requires_grad]
            # Once each: a parameter may have several parts in one flat tensor.
            names = dict.fromkeys(p.fqn for p in parts if math.prod(p.held.shape))
            rest = {key: value for key, value in group.items() if key != "params"}
            found.append({**rest, "params": list(names)})
    return found


def as_scalars(groups: Sequence[Group]) -> list[Group]:
    """The groups as JSON has them, without what only says how a step is carried out."""
    return [{"params": group["params"], **_settings(group)} for group in groups]


def joined(groups: Sequence[Sequence[Group]]) -> list[Group]:
    """Groups that several ranks describe, each with the names that any of them has in it."""
    found = [{**group, "params": list(group["params"])} for group in groups[0]]
    for others in groups[1:]:
        for group, other in zip(found, others, strict=True):
            group["params"] = list(dict.fromkeys([*group["params"], *other["params"]]))
    return found


def settings_for(own: Sequence[Group], saved: Sequence[Group]) -> list[Group]:
    """What each of ``own`` groups, with the names of all ranks, is to be set to.

    A group takes the settings of the saved groups that had its parameters. Raises MismatchError
    where those differ, and for parameters that none had.
    """
    # By name and not by number: groups may be cut differently now, as long as each is of one
    # setting.
    home = {name: index for index, group in enumerate(saved) for name in group["params"]}
    found = []
    for number, group in enumerate(own):
        where = f"optimizer.param_groups[{number}]"
        if missing := [name for name in group["params"] if name not in home]:
            wanted = "parameters that the saved optimizer had"
            raise MismatchError(where, wanted, f"{missing[0]}, which it had not")
        sources = sorted({home[name] for name in group["params"]})
        # A group without parameters, as of frozen ones: only its number says which it was.
        if not sources and len(own) == len(saved):
            sources = [number]
        settings = [_settings(saved[index]) for index in sources]
        for index, other in zip(sources[1:], settings[1:], strict=True):
            _refuse_difference(where, settings[0], other, sources[0], index)
        found.append(settings[0] if settings else {})
        # Before any group is set, for what is read may have been written by anybody.
        for key, value in found[-1].items():
            _check_setting(f"{where}['{key}']", key, group.get(key, value), value)
    return found


def _check_setting(where: str, key: str, own: Any, saved: Any) -> None:
    """MismatchError unless ``saved`` can be in the place of ``own``: of its kind, finite, and where
    torch's own optimizers have a range in that."""
    # Nothing is known of what the optimizer would take, as of an option that is off.
    if own is None:
        return
    wanted = f"{type(own).__name__} as {own!r}"
    if isinstance(own, list | tuple):
        fits = isinstance(saved, list | tuple) and len(saved) == len(own)
        wanted = f"{len(own)} numbers as {own!r}"
        for inner, value in zip(own, saved, strict=True) if fits else ():
            _check_setting(where, key, inner, value)
    # Before numbers, for True is one in Python.
    elif isinstance(own, bool | str) or isinstance(saved, bool):
        fits = type(saved) is type(own)
    elif isinstance(own, int | float):
        least, below = RANGES.get(key, (-math.inf, math.inf))
        fits = isinstance(saved, int | float) and math.isfinite(saved) and least <= saved < below
        wanted = f"a finite number from {least:g} to {below:g}"
    else:
        fits = True
    if not fits:
        remedy = "Another checkpoint has what this optimizer can be set to."
        raise MismatchError(where, wanted, repr(saved), remedy)


def _refuse_difference(where: str, first: Group, other: Group, one: int, two: int) -> None:
    for key in first.keys() | other.keys():
        if first.get(key) != other.get(key):
            raise MismatchError(
                where,
                "parameters of one saved group",
                f"some of group {one} with {key} {first.get(key)} and of group {two} with "
                f"{other.get(key)}",
                "Make the groups as they were saved.",
            )


def set_groups(optimizers: Sequence[Optimizer], settings: Sequence[Group]) -> None:
    """Set every group, keeping tensors and tuples what they are."""
    given = iter(settings)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, value in next(given).items():
                group[key] = _kept_kind(group.get(key), value)


def _kept_kind(present: Any, value: Any) -> Any:
    if isinstance(present, torch.Tensor) and isinstance(value, int | float):
        # In place: captured and compiled steps read this very tensor.
        return present.fill_(value)
    if isinstance(present, tuple):
        return tuple(_kept_kind(p, v) for p, v in zip(present, value, strict=True))
    return value


def _settings(group: Mapping[str, Any]) -> Group:
    return {key: _plain(value) for key, value in group.items() if key not in EXECUTION}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def everyones(comm: Comm | None, label: str, value: Any) -> list[Any]:
    """What every rank says, as JSON, in rank order (collective).

    On a mesh of replicas x shards the ranks of one row, which say the same in every row.
    """
    if comm is None or comm.size == 1:
        return [json.loads(json.dumps(value))]
    rank, size = rank_and_size(comm)
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    first = rank // comm.size * comm.size
    # Texts differ in length from rank to rank, and a gather has to know by how much.
    lengths = total(comm, f"length of {label}", {first + comm.rank: raw.numel()}, size).tolist()
    own = lengths[first : first + comm.size]
    text = comm.gather_uneven(label, raw.to(comm.mesh.device_type), own)
    return list(_decoded(bytes(text.cpu().tolist()), own))


def _decoded(text: bytes, lengths: Sequence[int]) -> Iterator[Any]:
    begin = 0
    for length in lengths:
        yield json.loads(text[begin : begin + length])
        begin += length


Optimizers = Optimizer | Sequence[Optimizer]
Named = dict[tuple[str, str], torch.Tensor]  # by fqn and the state's name
# By the same: the dtype, the number if it is one, and for how many elements there is a value.
Known = dict[str, dict[str, tuple[str, Any, int]]]


def optimizer_state_dict(
    model: nn.Module, optimizer: Optimizers, *, mesh: DeviceMesh | None = None
) -> dict[str, Any]:
    """State and groups by parameter name, as torch's ``get_optimizer_state_dict`` has them:
    ``{"state": {fqn: {name: tensor}}, "param_groups": [{"params": fqns, ...}]}`` (collective).

    Tensors are sharded where the model's are and share the optimizer's memory, numbers are scalar
    tensors; both are what ``torch.distributed.checkpoint`` saves and loads. An optimizer that has
    taken no step is shown with the zeros it would begin with, so that a checkpoint can be loaded
    into them. Row sums of tables are not among it. ``mesh`` is for models whose units do not know
    it, as for ``save_checkpoint``.
    """
    comm = comm_of(model, mesh)
    settle(model)
    optimizers = as_optimizers(optimizer)

    def look() -> tuple[list[ModelPart], Named, Known, list[Group]]:
        parts = parts_of(model)
        uses = [uses_of(parts, each) for each in optimizers]
        tensors: Named = {}
        known: Known = {}
        for own, each in zip(uses, optimizers, strict=True):
            trained = [p for p in own if p.requires_grad]
            # A reader fills what is shown. Shown with nothing, a new optimizer would load nothing,
            # without an error.
            states: Mapping[Any, Any] = each.state or fresh_state(each, trained)
            for use, name, value, elements in named_state(own, states, per_block(each)):
                fqn, number = use.part.fqn, elements == ONCE
                scalar = (_dtype_name(value), value if number else None, elements)
                if number and isinstance(value, torch.Tensor):
                    scalar = (scalar[0], value.item(), elements)
                if not number:
                    tensors[fqn, name] = use.cut(value, elements)
                if use.part.numel or use.part.unit is None:
                    known.setdefault(fqn, {})[name] = scalar
        return parts, tensors, known, groups_of(optimizers, uses)

    parts, tensors, own_known, groups = together(comm, "optimizer state", look, _failure)
    names = [{"params": group["params"]} for group in groups]
    # A rank that has nothing of a parameter shows its state all the same, with no elements:
    # torch.distributed.checkpoint wants one set of names on all ranks.
    said = everyones(comm, "optimizer state", [own_known, names])
    known: Known = {}
    for theirs, _ in said:
        for fqn, found in theirs.items():
            known.setdefault(fqn, {}).update(found)
    merged = joined([theirs for _, theirs in said])
    return {
        "state": _shown(parts, tensors, known),
        "param_groups": [{**g, **m} for g, m in zip(groups, merged, strict=True)],
    }


def load_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizers,
    state: Mapping[str, Any],
    *,
    mesh: DeviceMesh | None = None,
) -> None:
    """Take back what :func:`optimizer_state_dict` or torch's ``get_optimizer_state_dict`` gave,
    under any world size, strategy and grouping (collective).

    Tensors may be whole, or DTensors of any mesh. Raises InputError or MismatchError naming the
    parameter, before anything changes, where names or shapes are not the optimizer's.
    """
    comm = comm_of(model, mesh)
    settle(model)
    optimizers = as_optimizers(optimizer)

    def look() -> tuple[list[ModelPart], list[Group]]:
        parts = parts_of(model)
        return parts, groups_of(optimizers, [uses_of(parts, each) for each in optimizers])

    blocks = {name: size for each in optimizers for name, size in per_block(each).items()}
    parts, own = together(comm, "optimizer to load", look, _failure)
    # With flat tensors a rank knows of a group only the parameters that it has some of.
    names = [{"params": group["params"]} for group in own]
    groups = joined(everyones(comm, "groups of the optimizer", names))

    def prepare() -> tuple[dict[str, dict[str, Any]], list[Incoming], list[Group]]:
        given = _given(state, parts, blocks)
        incoming = [Incoming(uses_of(parts, each), each, given) for each in optimizers]
        for each in incoming:
            # Into room of its own: nothing of the optimizer is changed before all ranks have found
            # all of it right.
            _take_numbers(each, given)
        return given, incoming, settings_for(groups, state["param_groups"])

    given, incoming, settings = together(comm, "optimizer to load", prepare, _failure)
    rooms: Named = {
        (use.part.fqn, name): use.cut(value, elements)
        for i in incoming
        for use, name, value, elements in i.tensors
    }
    for part in parts:
        # In one order on all ranks, whether or not this one has room: a DTensor is gathered by all
        # of them.
        for name, tensor in sorted(given.get(part.fqn, {}).items()):
            elements = blocks.get(name, 1)
            if isinstance(tensor, torch.Tensor) and tensor.shape == _shape(part, elements):
                _copy(tensor, _cut(part, elements), rooms.get((part.fqn, name)))
    for each in incoming:
        # Only now, when everything was checked and copied: until here the optimizer has its old
        # state.
        each.install()
    set_groups(optimizers, settings)


def _failure(error: Exception) -> ShardwrightError:
    return InputError("optimizer state", "state of parameters by name", f"'{reason(error)}'")


# ---- giving --------------------------------------------------------------------------------------


def _dtype_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    return "float64" if isinstance(value, float) else "int64"


def _shown(parts: Sequence[ModelPart], tensors: Named, known: Known) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, (kind, number, elements) in sorted(known.get(part.fqn, {}).items()):
            dtype = getattr(torch, kind)
            if number is not None:
                found = torch.tensor(number, dtype=dtype)
            else:
                found = _wrapped(part, tensors.get((part.fqn, name)), dtype, elements)
            state.setdefault(part.fqn, {})[name] = found
    return state


def _wrapped(
    part: ModelPart, local: torch.Tensor | None, dtype: torch.dtype, elements: int
) -> torch.Tensor:
    """This rank's part of a state as its parameter is shown."""
    cut, sizes = _cut(part, elements), part.held.sizes
    # States of one number for a block are shorter than the parameter.
    if elements > 1:
        _, (_, sizes) = blocks_of(part.held.shape, part.held.offsets, sizes, elements)
    if local is None:
        local = torch.empty(sizes, dtype=dtype, device=part.held.tensor.device)
    if part.unit is None:
        return local
    return local.view(sizes) if cut is None else ShardTensor(local.view(sizes), cut)


def _cut(part: ModelPart, elements: int) -> Cut | None:
    """How a state is cut that has one value for so many elements of a parameter."""
    cut = None if part.unit is None else part.unit.sharded.cuts[part.slot]
    return cut if cut is None or elements == 1 else cut.of_blocks(elements)


# ---- taking --------------------------------------------------------------------------------------


def _shape(part: ModelPart, elements: int) -> torch.Size:
    """Of a whole state that has one value for so many elements of a parameter."""
    shape = torch.Size(part.held.shape)
    return shape if elements == 1 else torch.Size([ceil_div(shape.numel(), elements)])


def _given(
    state: Mapping[str, Any], parts: Sequence[ModelPart], blocks: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """The states by fqn; refuses names and shapes that the model has not."""
    if not {"state", "param_groups"} <= state.keys():
        wanted = "the keys 'state' and 'param_groups'"
        raise InputError("optimizer state", wanted, ", ".join(map(str, state)) or "none")
    known = {part.fqn: part for part in parts}
    given = {fqn: present(states) for fqn, states in state["state"].items()}
    for fqn, states in given.items():
        if fqn not in known:
            wanted = "the name of a parameter of the model"
            raise InputError("optimizer state", wanted, f"'{fqn}'")
        for name, value in states.items():
            shape = _shape(known[fqn], blocks.get(name, 1))
            if isinstance(value, torch.Tensor) and value.shape not in (shape, ()):
                wanted = f"a number or shape {tuple(shape)}, the whole tensor's"
                raise InputError(f"state '{name}' of {fqn}", wanted, f"{tuple(value.shape)}")
    return given


def _take_numbers(incoming: Incoming, given: Mapping[str, Mapping[str, Any]]) -> None:
    for number in incoming.numbers:
        value = given[number.fqn][number.name]
        if isinstance(value, torch.Tensor) and value.dim():
            found = f"shape {tuple(value.shape)}"
            raise InputError(f"state '{number.name}' of {number.fqn}", "a number", found)
        number.value.copy_(local_of(torch.as_tensor(value)))
    for use, name, _, elements in incoming.tensors:
        value, shape = given[use.part.fqn][name], _shape(use.part, elements)
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            where = f"state '{name}' of {use.part.fqn}"
            raise InputError(where, f"shape {tuple(shape)}", "a number")
    incoming.check()


def _copy(given: torch.Tensor, cut: Cut | None, room: torch.Tensor | None) -> None:
    """Keep this rank's part of a tensor; every rank takes part where it is a DTensor."""
    if cut is not None:
        own = OPERATORS.as_part(given.detach(), cut)._local_tensor
    else:
        # Called also where nothing is kept of it: a DTensor of another mesh is gathered by all.
        own = given.full_tensor() if isinstance(given, DTensor) else given.detach()
    if room is not None and room.numel():
        room.view(own.shape).copy_(own)
