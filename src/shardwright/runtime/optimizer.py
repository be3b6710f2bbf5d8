"""The fast path for dense optimizers: few flat tensors instead of many small ones."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, overload

import torch
from torch import nn
from torch.optim.sgd import sgd

from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.optimizers import MADE, Implementation, OptimizerName, optimizer_named
from shardwright.runtime.flat_tensors import FlatHome, FlatPart, FlatTensor
from shardwright.runtime.model_parts import tables_in
from shardwright.runtime.torch_private import storage_of
from shardwright.runtime.units.buffers import shard_room
from shardwright.runtime.units.dstorage import units_in
from shardwright.runtime.units.parameter import plain_name
from shardwright.runtime.units.rebind import absorb, rebase
from shardwright.runtime.units.unit import Unit

PROBED = 64  # values: more than a vector of any machine has
Groups = Sequence[Mapping[str, Any]]
GroupOf = Callable[[str, nn.Parameter], Mapping[str, Any] | None]


@overload
def optimizer_parameters(
    model: nn.Module, groups: None = None, *, per_unit: bool = True
) -> list[nn.Parameter]: ...


@overload
def optimizer_parameters(
    model: nn.Module, groups: Groups | GroupOf, *, per_unit: bool = True
) -> list[dict[str, Any]]: ...


def optimizer_parameters(
    model: nn.Module, groups: Groups | GroupOf | None = None, *, per_unit: bool = True
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """The shards of all units of ``model`` as few flat parameters, for a fused optimizer.

    Without ``groups``: one for each unit and dtype. With ``groups`` every group gets its own, one
    for each stretch of a unit's memory that belongs to it; matrices lie before vectors in every
    unit, so groups by dimension make two a unit. ``groups`` are torch's
    (``{"params": [...], "weight_decay": 0.0}``, with parameters of the model, their names, or
    patterns such as ``"*.bias"``), or a function of name and parameter that gives the options of
    its group, ``lambda name, p: {"weight_decay": 0.1 if p.ndim > 1 else 0.0}``, or None to leave it
    out. What no group has is not optimized: another call, or ``model.parameters()``, may have it.

    ``per_unit`` False joins units that touch to one tensor for each dtype and group. An optimizer's
    step is one kernel then, but its gradient is there whole from the first reduce of a backward on.

    Gradients of ``model.parameters()`` are views of the flat ones from then on: clipping and
    clearing either does both. The flat tensors are sharded tensors: norms over them are those of
    the whole. A parameter is frozen or unfrozen with all of its flat tensor. Tables are not among
    them: they are updated inside their backward, or when a guard is settled; of a model of tables
    alone there is one empty group.

    Raises InputError for parameters that other flat tensors have; the same call again gives the
    same tensors.
    """
    units = list(units_in(model))
    if not units and any(True for _ in tables_in(model)):
        return [{"params": []}]  # no optimizer takes a list without any
    if not units:
        raise InputError(
            "model", "units made by apply or fully_shard_flat", "none", "Shard it first."
        )
    for unit in units:
        if unit.joints:
            wanted = "units that nothing else has cut"
            found = f"tensor parallelism in unit '{unit.name}'"
            remedy = "Give the optimizer model.parameters()."
            raise UnsupportedError("optimizer_parameters", wanted, found, remedy)
        # Sharded parameters have to be shown, over the memory that the flat tensors will be views
        # of. After this the unit refuses other memory.
        unit.free()
        absorb(unit)
    options, group_of = _grouping(model, groups, units)
    # Before any flat tensor is made: units get other memory here. Where there are some, they have
    # been joined already, or never will be.
    if not per_unit and not any(unit.flat_parts for unit in units):
        # Memory of the host and of an accelerator cannot be one tensor.
        for offloaded in (False, True):
            _share_one_store([unit for unit in units if unit.offloaded is offloaded])
    made: list[list[nn.Parameter]] = [[] for _ in options]
    for runs in _joined([r for u in units for r in _runs_of(u, group_of)], per_unit=per_unit):
        made[runs[0].group].append(_flat(runs))
    if groups is None:
        return made[0]
    return [{**given, "params": flat} for given, flat in zip(options, made, strict=True)]


class GroupRun(NamedTuple):
    """Tensors of a unit's segment that follow each other and belong to one group.

    ``places`` are theirs in the unit's layout. Of this rank's share they are ``lengths[rank]``
    elements from ``begin``, padding after them included; on another rank they may be none.
    """

    unit: Unit
    segment: int
    group: int
    places: range
    begin: int
    lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        """Elements on this rank."""
        return self.lengths[self.unit.comm.rank]

    @property
    def block(self) -> int:
        """Elements that are cut together; 1 of tensors that may be cut anywhere."""
        segment = self.unit.buffers.segments[self.segment].segment
        first = self.unit.sharded.places[self.segment][0]
        return segment.block if self.places[0] - first < segment.quantized else 1

    @property
    def kind(self) -> tuple[object, ...]:
        """Runs of one kind can be one tensor, if they touch."""
        views = self.unit.buffers.segments[self.segment]
        comm, segment = self.unit.comm, views.segment
        return (
            self.group,
            self.block,
            views.dtype,
            segment.cut == "replicated",
            segment.trainable,
            self.trains,
            id(comm.mesh),
            comm.size,
        )

    @property
    def trains(self) -> bool:
        """Whether its tensors do, which are all frozen or none."""
        return self.unit.members[self.places[0]].parameter.requires_grad


def _runs_of(unit: Unit, group_of: Mapping[tuple[int, str], int]) -> Iterator[GroupRun]:
    """The runs of a unit, cut where frozen tensors begin and end, and after those that are
    quantized; what no group has is in none. The same on every rank."""
    first = 0
    for index, views in enumerate(unit.buffers.segments):
        segment = views.segment
        groups = [group_of.get((id(unit), slot.tensor.fqn)) for slot in segment.slots]
        members = unit.members[first : first + len(groups)]
        large = segment.quantized
        # What an optimizer treats alike: a group's options, whether it trains, and whether its
        # states may be in blocks.
        kinds = [
            (group, member.parameter.requires_grad, place < large)
            for place, (group, member) in enumerate(zip(groups, members, strict=True))
        ]
        heads = [i for i, kind in enumerate(kinds) if not i or kind != kinds[i - 1]]
        ends = [*heads[1:], len(groups)]
        # On every rank, as sharded tensors know how much others hold; nothing is exchanged for it.
        each = [segment.starts(heads, rank) for rank in range(unit.comm.size)]
        for number, (head, end) in enumerate(zip(heads, ends, strict=True)):
            group = groups[head]
            if group is not None:
                lengths = tuple(starts[number + 1] - starts[number] for starts in each)
                begin = each[unit.comm.rank][number]
                yield GroupRun(unit, index, group, range(first + head, first + end), begin, lengths)
        first += len(groups)


def _joined(runs: Sequence[GroupRun], *, per_unit: bool) -> Iterator[list[GroupRun]]:
    """Runs that touch and can be one tensor."""
    group: list[GroupRun] = []
    for run in runs:
        if group and not (
            # Alike and without a gap: a flat tensor is one stretch of memory.
            run.kind == group[-1].kind
            and _end(group[-1]) == _begin(run)
            and (run.unit is group[-1].unit or not per_unit)
        ):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _begin(run: GroupRun) -> tuple[int, int]:
    """The storage that a run is in, and where it begins there, in elements."""
    share = run.unit.buffers.segments[run.segment].share
    return storage_of(share), share.storage_offset() + run.begin


def _end(run: GroupRun) -> tuple[int, int]:
    storage, begin = _begin(run)
    return storage, begin + run.length


def _flat(runs: list[GroupRun]) -> nn.Parameter:
    """The flat parameter over ``runs``, the one that exists already if there is one."""
    members = [run.unit.members[place] for run in runs for place in run.places]
    homes = [getattr(member.parameter, "home", None) for member in members]
    flats = {id(home.flat): home.flat for home in homes if home is not None}
    if flats:
        (flat,) = flats.values() if len(flats) == 1 else (None,)
        # The same call again: a second flat tensor over this memory would take each gradient twice.
        if flat is not None and flat.homes == homes:
            return flat.parameter
        taken = next(m for m, home in zip(members, homes, strict=True) if home is not None)
        raise InputError(
            f"{taken.fqn} of unit '{runs[0].unit.name}'",
            "a parameter that no other flat tensor has",
            "one of an earlier optimizer_parameters with other groups",
            "Name each parameter in one call only.",
        )
    # Gradients may be here, of a backward before the optimizer was made. They are put where they
    # will be looked for.
    earlier = [(member.parameter, member.parameter.grad) for member in members]
    for parameter, _ in earlier:
        parameter.grad = None
    flat = _made(runs)
    for parameter, gradient in earlier:
        if gradient is not None:
            parameter.grad = gradient
    return flat.parameter


def _made(runs: list[GroupRun]) -> FlatTensor:
    """A flat tensor over ``runs``, whose units know of it from then on."""
    unit, length = runs[0].unit, sum(run.length for run in runs)
    views = unit.buffers.segments[runs[0].segment]
    begin = views.share.storage_offset() + runs[0].begin
    lengths = None
    if views.segment.cut != "replicated":
        lengths = tuple(map(sum, zip(*(run.lengths for run in runs), strict=True)))
    flat = FlatTensor(
        # Across shares of several segments or units, which lie side by side in one storage, and
        # with the padding between them, whose gradient is zero.
        torch.as_strided(views.share.detach(), (length,), (1,), begin),
        f"{unit.name} optimizer tensor",
        unit.comm,
        lengths,
        block=runs[0].block,
        trains=any(run.trains for run in runs),
    )
    offset = 0
    for run in runs:
        homes = list(_homes(run, flat, offset))
        # From here on their gradients are views of the flat one.
        flat.add(homes)
        first = run.unit.sharded.places[run.segment][0]
        part = FlatPart(flat, offset, run.begin, run.length, run.places[0] - first, homes)
        run.unit.flat_parts.setdefault(run.segment, []).append(part)
        offset += run.length
    return flat


def _homes(run: GroupRun, flat: FlatTensor, offset: int) -> Iterator[FlatHome]:
    """Where the parameters of a run are in ``flat``, which has the run from ``offset`` on."""
    unit = run.unit
    segment = unit.buffers.segments[run.segment].segment
    for place in run.places:
        member = unit.members[place]
        piece = unit.buffers.pieces[place]
        cut = unit.sharded.cuts[place]
        begin = segment.begin(piece) - run.begin + offset if piece.numel else offset
        where = f"{member.fqn} of unit '{unit.name}'"
        home = FlatHome(flat, member.parameter, where, begin, piece.sizes, cut)
        # A parameter that every rank has whole takes such gradients itself (``Replica``).
        if cut is not None and member.parameter.dtype.is_floating_point:
            home.follow_strays()
        yield home


def _share_one_store(units: Sequence[Unit]) -> None:
    """Let the shards of all units, which are in the same memory, be slices of one tensor."""
    if len(units) < 2:
        return
    total = sum(unit.buffers.shard.numel() for unit in units)
    buffers = units[0].buffers
    store = shard_room(total, buffers.device, offloaded=buffers.offloaded)
    begin = 0
    for unit in units:
        end = begin + unit.buffers.shard.numel()
        rebase(unit, store[begin:end])
        begin = end


# ---- groups --------------------------------------------------------------------------------------

GroupOfPlace = dict[tuple[int, str], int]  # by unit and fqn


def _grouping(
    model: nn.Module, groups: Groups | GroupOf | None, units: Sequence[Unit]
) -> tuple[list[dict[str, Any]], GroupOfPlace]:
    """The options of every group, and the number of the group of every member."""
    # By object, as a group may give parameters and not names; and by unit, for names may come
    # twice.
    places = {id(m.parameter): (id(unit), m.fqn) for unit in units for m in unit.members}
    if groups is None:
        return [{}], dict.fromkeys(places.values(), 0)
    named = {plain_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    if callable(groups):
        groups = _by_function(groups, {n: p for n, p in named.items() if id(p) in places})
    found: GroupOfPlace = {}
    for number, group in enumerate(groups):
        for given in group["params"]:
            matches, several = _matching(given, named)
            for parameter in matches:
                place = places.get(id(parameter))
                if place is None:
                    raise _unknown(number, given)
                # A pattern may meet what another one has put into this group already.
                if place in found and (found[place] != number or not several):
                    raise InputError(f"groups[{number}]", "each parameter in one group", place[1])
                found[place] = number
            if not matches:
                raise _unknown(number, given)
    return [dict(group) for group in groups], found


def _matching(given: Any, named: Mapping[str, nn.Parameter]) -> tuple[list[Any], bool]:
    """The parameters that someone means, and whether it was a pattern."""
    if not isinstance(given, str):
        return [given], False
    given = plain_name(given)
    if given in named:
        return [named[given]], False
    return [named[name] for name in named if fnmatch.fnmatchcase(name, given)], True


def _unknown(number: int, given: Any) -> InputError:
    wanted = "sharded parameters of the model, or their names"
    remedy = "Optimize parameters that no unit has with an optimizer of their own."
    return InputError(f"groups[{number}]", wanted, repr(given)[:60], remedy)


def _by_function(choose: GroupOf, named: Mapping[str, nn.Parameter]) -> Groups:
    """Parameters of equal options together, in the order in which they come."""
    groups: list[dict[str, Any]] = []
    seen: set[int] = set()
    for name, parameter in named.items():
        options = None if id(parameter) in seen else choose(name, parameter)
        seen.add(id(parameter))
        if options is None:
            continue
        group = next((g for g in groups if {**g, "params": ()} == {**options, "params": ()}), None)
        if group is None:
            groups.append({**options, "params": [parameter]})
        else:
            group["params"].append(parameter)
    return groups


def make_optimizer(
    name: OptimizerName,
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    implementation: Implementation | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of a name over those of ``parameters`` that train, for Adagrad makes states of
    all that it is given; fused where it can be if nothing is said, and torch's kernel is right.

    Raises InputError for a name that is unknown or that no single class stands for.
    """
    row = optimizer_named(name, implementation, among=MADE)
    # A group is a mapping and has no such attribute.
    trained = [part for part in parameters if getattr(part, "requires_grad", True)]
    how = implementation or row.runs
    fused_sgd = not implementation and how == "fused" and row.make == "torch.optim:SGD"
    # Tried and not looked up by version: a torch in which it is mended is used as it is.
    if fused_sgd and not all(map(_fused_sgd_works, _on_cpu(trained))):
        how = "for_loop"
    options = dict(row.settings)
    if len(row.steps) > 1:  # else it has no choice to be given
        options |= {each: each == how for each in row.steps if each != "for_loop"}
    module, _, kind = row.make.partition(":")
    made: torch.optim.Optimizer
    made = getattr(importlib.import_module(module), kind)(trained, lr=learning_rate, **options)
    return made


def _on_cpu(trained: Iterable[Any]) -> set[torch.dtype]:
    """The dtypes of parameters, or groups of them, in host memory."""
    parts = [part["params"] if isinstance(part, Mapping) else [part] for part in trained]
    return {p.dtype for part in parts for p in part if p.device.type == "cpu"}


@cache
def _fused_sgd_works(dtype: torch.dtype) -> bool:
    """Whether fused SGD changes every value on a CPU: torch up to 2.13 leaves fp16 and bf16 as they
    are, but for what is over of whole vectors (pytorch/pytorch issue 191763)."""
    weight, gradient = torch.ones(PROBED, dtype=dtype), torch.ones(PROBED, dtype=dtype)
    rules = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "lr": 0.5}
    sgd([weight], [gradient], [None], fused=True, nesterov=False, maximize=False, **rules)
    return bool((weight != 1).all())
