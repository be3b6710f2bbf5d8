"""Groups of an optimizer by the names of the parameters in them, on all ranks together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.core.errors import MismatchError
from shardwright.runtime.checkpoint.agreement import rank_and_size, total
from shardwright.runtime.comm import Comm
from shardwright.runtime.optimizer_state import Uses

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
