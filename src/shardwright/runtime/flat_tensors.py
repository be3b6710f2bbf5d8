"""One parameter for an optimizer over neighbours in a unit's shard, and the gradient they share."""

# An optimizer's step costs per tensor, so ``optimizer_parameters`` gives it a few: each is the
# memory of many parameters that lie together, with one gradient. Users go on with their own
# parameters all the same, whose gradients are views of it (``FlatHome``), both ways: what is
# cleared, clipped or written there is here. What has one answer for the whole tensor, a gradient or
# none, frozen or not, has to be the same for all of its parameters: an optimizer would move those
# without a gradient by weight decay and momentum, which nobody would notice. So it is refused, and
# where: at the moment somebody reads the gradient, for torch tells nobody but its own hooks, which
# are of a process and not of a model, that an optimizer begins a step.

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.core.errors import InputError
from shardwright.runtime.comm import Comm
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
from shardwright.tracker.private import gradient_hooks


class FlatTensor(Home):
    """A parameter over ``memory`` [n] of a shard, of which the ranks of ``comm`` have ``lengths``
    elements; None: every rank has all of it. No cut divides ``block`` elements of it."""

    def __init__(
        self,
        memory: torch.Tensor,
        name: str,
        comm: Comm,
        lengths: tuple[int, ...] | None,
        *,
        block: int,
        trains: bool,
    ) -> None:
        self.length = memory.numel()
        self.block = block
        self.cut: Cut | None = None
        if lengths is None:
            self.parameter: nn.Parameter = FlatReplica(memory, requires_grad=trains)
        else:
            self.cut = Cut.of_runs(name, lengths, comm)
            # Two cuts that differ in one thing: norms over the parameter are refused, for an
            # optimizer that takes them would scale all of it by one number; norms over its gradient
            # are what clipping takes.
            own = Cut.of_runs(name, lengths, comm)
            own.is_of_many = True
            self.parameter = as_parameter(ShardTensor(memory, own), trains)
        self.parameter.home = self  # type: ignore[attr-defined]
        self.homes: list[FlatHome] = []
        self.cleared: set[FlatHome] = set()  # parameters whose gradient is nothing

    def add(self, homes: Sequence[FlatHome]) -> None:
        """Have parameters, whose gradients are nothing so far."""
        self.homes.extend(homes)
        self.cleared.update(homes)

    def gradient(self) -> torch.Tensor | None:
        """The gradient, to whoever asks the flat parameter for it. All of it has one or nothing;
        only who is about to clear it may ask for another."""
        found: torch.Tensor | None = C_GRAD.__get__(self.parameter)
        if self.cleared and found is not None:
            frame = inspect.currentframe()
            # zero_grad asks for the gradient before it clears it. To refuse there would leave no
            # way out.
            reader = frame.f_back and frame.f_back.f_back if frame else None  # past the property
            if reader is None or reader.f_code.co_name != "zero_grad":
                self.check()
        return found

    @property
    def local_gradient(self) -> torch.Tensor | None:
        """This rank's part of the gradient."""
        found = C_GRAD.__get__(self.parameter)
        return None if found is None else local_of(found)

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        # Whoever sets all of it speaks for all of its parameters.
        self.cleared = set() if gradient is not None else set(self.homes)
        C_GRAD.__set__(self.parameter, gradient)

    def _put(self, local: torch.Tensor) -> None:
        """Let ``local`` [length] be this rank's part of the gradient, whoever has one."""
        whole = local if self.cut is None else ShardTensor(local, self.cut)
        C_GRAD.__set__(self.parameter, whole)

    def gradient_to_write(self) -> torch.Tensor:
        """This rank's part of the gradient, zero where nothing has been written."""
        found = self.local_gradient
        if found is None:
            found = torch.zeros_like(local_of(self.parameter))
            self._put(found)
        return found

    def check(self) -> None:
        """Raise InputError where some of it has a gradient and another part of it has none."""
        for home in self.homes:
            if home in self.cleared and home.parameter.requires_grad and home.parameter.numel():
                raise InputError(
                    home.where,
                    "a gradient, as others of its flat optimizer tensor have",
                    "none, and weight decay and momentum would move it",
                    "Give it a group of its own in optimizer_parameters, freeze it, or give "
                    "the optimizer model.parameters().",
                )

    def follow_freezing(self) -> None:
        """All of it trains or nothing, for an optimizer's step changes all of it."""
        trains = [home.parameter.requires_grad for home in self.homes]
        if any(trains) and not all(trains):
            odd = self.homes[trains.index(not trains[0])]
            wanted = "to be frozen or unfrozen with all of its flat optimizer tensor"
            found = "a change of a part of it, which weight decay and momentum would move on"
            remedy = "Give what is frozen later a group of its own in optimizer_parameters."
            raise InputError(odd.where, wanted, found, remedy)
        self.parameter.requires_grad_(any(trains))
        if not any(trains):
            self.set_gradient(None)

    def refusal(self) -> InputError:
        """Its memory is the shard's."""
        wanted = "to keep its memory, which is that of the model's parameters"
        remedy = "Copy values (tensor.copy_(value) under no_grad)."
        return InputError("a flat optimizer tensor", wanted, "other memory", remedy)


class FlatPart(NamedTuple):
    """What a flat tensor has of a segment's share: ``length`` elements from ``begin``, where it
    has them itself from ``offset`` on. Its first tensor is at ``place`` of the segment's."""

    flat: FlatTensor
    offset: int
    begin: int
    length: int
    place: int
    homes: Sequence[FlatHome]

    def accept(self, share: torch.Tensor, present: Sequence[bool]) -> None:
        """Take its part of the mean gradient of the segment, whose tensors have one where
        ``present``."""
        flat, length = self.flat, self.length
        here = present[self.place : self.place + len(self.homes)]
        if not flat.parameter.requires_grad or not any(here):
            return
        part = share if length == len(share) else share[self.begin : self.begin + length]
        if gradient_hooks(flat.parameter):
            self._call_hooks(part)
        # All of the flat tensor in one piece: the share is its gradient as it is, with no copy.
        # Several pieces, or a second backward, are added.
        if length == flat.length and flat.local_gradient is None:
            flat._put(part)
        else:
            flat.gradient_to_write()[self.offset : self.offset + length].add_(part)
        # By what any rank has: a parameter with a gradient elsewhere gets the mean of it here, too.
        flat.cleared.difference_update(compress(self.homes, here))
        call_accumulated(flat.parameter)

    def _call_hooks(self, part: torch.Tensor) -> None:
        """Those on the flat tensor's gradient, which see all of this one."""
        flat = self.flat
        if self.length != flat.length:
            where = f"a hook on {self.homes[0].where} and others"
            wanted = "a flat tensor of one unit (per_unit=True)"
            found = "one of several, whose gradient comes in parts"
            raise InputError(where, wanted, found, "Register it on the model's parameters.")
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
        parameter.home = self  # type: ignore[attr-defined]

    def _part(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.offset + self.sizes.numel()].view(self.sizes)

    def gradient(self) -> torch.Tensor | None:
        """A view of the flat tensor's gradient, None where there is none."""
        found = self.flat.local_gradient
        # Zeros would do for a sum and not for optimizers: None is what tells them to leave it
        # alone.
        if found is None or self in self.flat.cleared:
            return None
        part = self._part(found)
        return part if self.cut is None else ShardTensor(part, self.cut)

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Let ``gradient`` be this part of the flat one; where all parts are nothing it is none."""
        if gradient is not None:
            if self.cut is not None:
                gradient = OPERATORS.as_part(gradient, self.cut)._local_tensor
            self._part(self.flat.gradient_to_write()).copy_(gradient)
            self.flat.cleared.discard(self)
        elif self not in self.flat.cleared and self.flat.local_gradient is not None:
            # The flat gradient has one memory for all. This part of it becomes zeros, and the set
            # remembers that it is none.
            self.flat.cleared.add(self)
            if len(self.flat.cleared) == len(self.flat.homes):
                self.flat.set_gradient(None)
            else:
                self._part(self.flat.gradient_to_write()).zero_()

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
            # Taken off, for autograd would add the next one to it, and both would be added here.
            C_GRAD.__set__(parameter, None)
            self._part(self.flat.gradient_to_write()).add_(local_of(stray))
            self.flat.cleared.discard(self)

    def refusal(self) -> InputError:
        return InputError(
            self.where,
            "to keep its memory, which a flat optimizer tensor has",
            "other memory",
            "Copy values (p.copy_(value) under no_grad), or make the optimizer over "
            "model.parameters().",
        )


def _take_stray(home: weakref.ref[FlatHome], parameter: torch.Tensor) -> None:
    found = home()
    if found is not None:
        found.take_stray(parameter)


TAKEN = "_taken_by"  # what an original parameter says once it is sharded: its name and unit


def take(parameter: nn.Parameter, fqn: str, unit: str) -> None:
    """Let an original parameter, which nothing trains once it is sharded, say so to optimizers and
    whoever else asks for its gradient, and to units that would have it too."""
    setattr(parameter, TAKEN, (fqn, unit))
    # By its class, as optimizers that were made before hold this very object.
    parameter.__class__ = _taken(type(parameter))


@cache
def _taken(kind: type[Any]) -> type[Any]:
    """``kind`` of parameters that have no gradient any more. Pickles and copies are plain ones."""
    return type(kind.__name__, (kind,), {"grad": property(_refuse_gradient, C_GRAD.__set__)})


def _refuse_gradient(parameter: Any) -> torch.Tensor | None:
    taken = vars(parameter).get(TAKEN)
    if taken is None:  # a copy
        return C_GRAD.__get__(parameter)
    raise InputError(
        f"an optimizer's {taken[0]} of unit '{taken[1]}'",
        "the sharded parameter",
        "the one from before it was sharded, which nothing trains",
        "Make the optimizer after sharding.",
    )


def flat_tensor_of(parameter: torch.Tensor) -> FlatTensor | None:
    """The flat tensor whose parameter this is."""
    home = getattr(parameter, "home", None)
    return home if isinstance(home, FlatTensor) else None
