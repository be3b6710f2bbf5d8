"""An optimizer's flat tensors: stretches of units' shards, each the memory of many parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.core.errors import InputError, expected
from shardwright.runtime.torch_private import C_GRAD, local_of
from shardwright.runtime.units.cut import Cut
from shardwright.runtime.units.linked import (
    FlatReplica,
    Home,
    OfStrays,
    call_accumulated,
    call_gradient_hooks,
    trainable,
)
from shardwright.runtime.units.shard_tensor import OPERATORS, ShardTensor, as_parameter
from shardwright.runtime.units.unit import Unit
from shardwright.tracker.private import gradient_hooks


class Run(NamedTuple):
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
            self.unit.members[self.places[0]].parameter.requires_grad,
            id(comm.mesh),
            comm.size,
        )

    @property
    def memory(self) -> torch.Tensor:
        """Its elements on this rank, a view of the shard."""
        share = self.unit.buffers.segments[self.segment].share.detach()
        return share[self.begin : self.begin + self.length]


def runs_of(unit: Unit, group_of: Mapping[tuple[int, str], int]) -> Iterator[Run]:
    """The runs of a unit, cut where frozen tensors begin and end, and after those that are
    quantized; what no group has is in none. The same on every rank."""
    first = 0
    for index, views in enumerate(unit.buffers.segments):
        segment = views.segment
        groups = [group_of.get((id(unit), slot.tensor.fqn)) for slot in segment.slots]
        members = unit.members[first : first + len(groups)]
        large = segment.quantized
        kinds = [
            (group, member.parameter.requires_grad, place < large)
            for place, (group, member) in enumerate(zip(groups, members, strict=True))
        ]
        heads = [i for i, kind in enumerate(kinds) if not i or kind != kinds[i - 1]]
        ends = [*heads[1:], len(groups)]
        each = [segment.starts(heads, rank) for rank in range(unit.comm.size)]
        for number, (head, end) in enumerate(zip(heads, ends, strict=True)):
            group = groups[head]
            if group is not None:
                lengths = tuple(starts[number + 1] - starts[number] for starts in each)
                begin = each[unit.comm.rank][number]
                yield Run(unit, index, group, range(first + head, first + end), begin, lengths)
        first += len(groups)


class FlatTensor:
    """One parameter for an optimizer over ``runs`` that touch, and the gradient they share."""

    def __init__(self, runs: Sequence[Run], name: str) -> None:
        unit = runs[0].unit
        views = unit.buffers.segments[runs[0].segment]
        length = self.length = sum(run.length for run in runs)
        memory = torch.as_strided(
            views.share.detach(), (length,), (1,), views.share.storage_offset() + runs[0].begin
        )
        trains = any(
            unit.members[place].parameter.requires_grad
            for run in runs
            for unit, place in ((run.unit, place) for place in run.places)
        )
        self.block = runs[0].block
        self.cut: Cut | None = None
        if views.segment.cut == "replicated":
            self.parameter: nn.Parameter = FlatReplica(memory, requires_grad=trains)
        else:
            lengths = tuple(map(sum, zip(*(run.lengths for run in runs), strict=True)))
            self.cut = Cut.of_runs(name, lengths, unit.comm)
            own = Cut.of_runs(name, lengths, unit.comm)
            own.is_of_many = True
            self.parameter = as_parameter(ShardTensor(memory, own), trains)
        setattr(self.parameter, FLAT, weakref.ref(self))
        self.homes: list[FlatHome] = []
        self.cleared = 0  # homes whose gradient is nothing
        offset = 0
        for run in runs:
            self._take(run, offset)
            offset += run.length
        self.cleared = len(self.homes)

    def _take(self, run: Run, offset: int) -> None:
        unit = run.unit
        segment = unit.buffers.segments[run.segment].segment
        homes = []
        for place in run.places:
            member, piece = unit.members[place], unit.buffers.pieces[place]
            begin = segment.begin(piece) - run.begin + offset if piece.numel else offset
            cut = unit.sharded.cuts[place]
            where = f"{member.fqn} of unit '{unit.name}'"
            home = FlatHome(self, member.parameter, where, begin, piece.sizes, cut)
            if cut is not None and member.parameter.dtype.is_floating_point:
                home.follow_strays()
            homes.append(home)
        self.homes.extend(homes)
        unit.stretches.setdefault(run.segment, []).append(Stretch(self, run, offset, homes))

    @property
    def local_gradient(self) -> torch.Tensor | None:
        """This rank's part of the gradient."""
        found = C_GRAD.__get__(self.parameter)
        return None if found is None else local_of(found)

    def set_gradient(self, local: torch.Tensor | None) -> None:
        """Let ``local`` [length] be this rank's part of the gradient."""
        if local is not None and self.cut is not None:
            local = ShardTensor(local, self.cut)
        C_GRAD.__set__(self.parameter, local)

    def gradient_to_write(self) -> torch.Tensor:
        """This rank's part of the gradient, zero where nothing has been written."""
        found = self.local_gradient
        if found is None:
            found = torch.zeros_like(local_of(self.parameter))
            self.cleared = len(self.homes)
            for home in self.homes:
                home.is_cleared = True
            self.set_gradient(found)
        return found

    def check(self) -> None:
        """Before an optimizer's step: all of it has a gradient or nothing, for all of it moves."""
        if not self.cleared or self.local_gradient is None:
            return
        for home in self.homes:
            if home.is_cleared and home.parameter.requires_grad and home.parameter.numel():
                raise InputError(
                    expected(
                        home.where,
                        "a gradient, as others of its flat optimizer tensor have",
                        "none, and weight decay and momentum would move it",
                        "Give it a group of its own in optimizer_parameters, freeze it, or give "
                        "the optimizer model.parameters().",
                    )
                )

    def follow_freezing(self) -> None:
        """All of it trains or nothing, for an optimizer's step changes all of it."""
        trains = [home.parameter.requires_grad for home in self.homes]
        if any(trains) and not all(trains):
            odd = self.homes[trains.index(not trains[0])]
            raise InputError(
                expected(
                    odd.where,
                    "to be frozen or unfrozen with all of its flat optimizer tensor",
                    "a change of a part of it, which weight decay and momentum would move on",
                    "Give what is frozen later a group of its own in optimizer_parameters.",
                )
            )
        self.parameter.requires_grad_(any(trains))
        if not any(trains):
            C_GRAD.__set__(self.parameter, None)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own = vars(parameter)
            if TAKEN in own:
                name, unit = own[TAKEN]
                raise InputError(
                    expected(
                        f"an optimizer's {name} of unit '{unit}'",
                        "the sharded parameter",
                        "the one from before it was sharded, which nothing trains",
                        "Make the optimizer after sharding.",
                    )
                )
            flat = flat_tensor_of(parameter)
            if flat is not None:
                flat.check()


def flat_tensor_of(parameter: torch.Tensor) -> FlatTensor | None:
    """The flat tensor whose parameter this is."""
    own = vars(parameter)
    found: FlatTensor | None = own[FLAT]() if FLAT in own else None
    return found


TAKEN = "_taken_by"  # what an original parameter says once it is sharded: its name and unit
FLAT = "_flat_tensor"  # what a flat tensor's parameter says: whose it is


@cache
def follow_optimizers() -> None:
    """Look at every optimizer before its steps, from now on: that of a parameter which was sharded
    since cannot be known otherwise. A process in which nothing is sharded has no such hook."""
    register_optimizer_step_pre_hook(_before_step)


class Stretch(NamedTuple):
    """Where a flat tensor has a run: from ``offset``."""

    flat: FlatTensor
    run: Run
    offset: int
    homes: Sequence[FlatHome]

    def accept(self, share: torch.Tensor, present: Sequence[bool]) -> None:
        """Take the mean gradient of the run out of that of its segment, whose tensors have one
        where ``present``."""
        flat, run = self.flat, self.run
        first = run.places.start - run.unit.sharded.places[run.segment][0]
        here = present[first : first + len(run.places)]
        if not flat.parameter.requires_grad or not any(here):
            return
        length = run.length
        part = share[run.begin : run.begin + length]
        self._call_hooks(part)
        if length == flat.length and flat.local_gradient is None:
            flat.set_gradient(part)
        else:
            flat.gradient_to_write()[self.offset : self.offset + length].add_(part)
        if flat.cleared:  # else no home is
            for home, has_one in zip(self.homes, here, strict=True):
                home.is_cleared = home.is_cleared and not has_one
            flat.cleared = sum(home.is_cleared for home in flat.homes)
        call_accumulated(flat.parameter)

    def _call_hooks(self, part: torch.Tensor) -> None:
        """Those on the flat tensor's gradient, which see all of this one."""
        flat = self.flat
        if not gradient_hooks(flat.parameter):
            return
        if self.run.length != flat.length:
            raise InputError(
                expected(
                    f"a hook on {self.homes[0].where} and others",
                    "a flat tensor of one unit (per_unit=True)",
                    "one of several, whose gradient comes in parts",
                    "Register it on the model's parameters.",
                )
            )
        gradient = part if flat.cut is None else ShardTensor(part, flat.cut)
        call_gradient_hooks(flat.parameter, gradient)


class FlatHome(Home):
    """Where a parameter is in a flat tensor, so that its own gradient is a view of the flat one."""

    def __init__(
        self,
        flat: FlatTensor,
        parameter: nn.Parameter,
        where: str,
        offset: int,
        sizes: tuple[int, ...],
        cut: Cut | None,
    ) -> None:
        self.flat = flat
        self.parameter = parameter
        self.where = where
        self.offset = offset
        self.sizes = torch.Size(sizes)
        self.cut = cut
        self.is_cleared = True
        parameter.home = self  # type: ignore[attr-defined]

    def _part(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.offset + self.sizes.numel()].view(self.sizes)

    def gradient(self) -> torch.Tensor | None:
        """A view of the flat tensor's gradient, None where there is none."""
        found = self.flat.local_gradient
        if found is None or self.is_cleared:
            return None
        part = self._part(found)
        return part if self.cut is None else ShardTensor(part, self.cut)

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Let ``gradient`` be this part of the flat one; where all parts are nothing it is none."""
        if gradient is not None:
            if self.cut is not None:
                gradient = OPERATORS.as_part(gradient, self.cut)._local_tensor
            self._part(self.flat.gradient_to_write()).copy_(gradient)
            self._mark(cleared=False)
        elif not self.is_cleared and self.flat.local_gradient is not None:
            self._mark(cleared=True)
            if self.flat.cleared == len(self.flat.homes):
                self.flat.set_gradient(None)
            else:
                self._part(self.flat.gradient_to_write()).zero_()

    def _mark(self, *, cleared: bool) -> None:
        self.flat.cleared += int(cleared) - int(self.is_cleared)
        self.is_cleared = cleared

    def follow_strays(self) -> None:
        """Take what autograd adds to the parameter itself, which no unit computes with. A hook is
        kept where no garbage collector looks: it must not lead back to the parameter, or neither
        is ever freed."""
        with trainable(self.parameter):
            hook = OfStrays(_take_stray, weakref.ref(self))
            self.parameter.register_post_accumulate_grad_hook(hook)

    def take_stray(self, parameter: torch.Tensor) -> None:
        """What autograd added to the sharded parameter itself, as for a penalty on weights."""
        stray = C_GRAD.__get__(parameter)
        if stray is not None:
            C_GRAD.__set__(parameter, None)
            self._part(self.flat.gradient_to_write()).add_(local_of(stray))
            self._mark(cleared=False)

    def refusal(self) -> InputError:
        """Its memory is the flat tensor's."""
        return InputError(
            expected(
                self.where,
                "to keep its memory, which a flat optimizer tensor has",
                "other memory",
                "Copy values (p.copy_(value) under no_grad), or make the optimizer over "
                "model.parameters().",
            )
        )


def _take_stray(home: weakref.ref[FlatHome], parameter: torch.Tensor) -> None:
    found = home()
    if found is not None:
        found.take_stray(parameter)
