"""What a user holds of a unit while it is sharded: one parameter each, made once, that optimizers
work on and that gets the unit's gradient. All share the unit's shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from shardwright.runtime.comm import Comm
from shardwright.runtime.torch_private import set_local
from shardwright.runtime.units.buffers import Buffers
from shardwright.runtime.units.cut import Cut
from shardwright.runtime.units.linked import Replica, call_accumulated, call_gradient_hooks
from shardwright.runtime.units.shard_tensor import ShardTensor, as_parameter


class ShardedParameters:
    """The parameters of a unit in SHARDED state, in layout order.

    A tensor that is cut is a ShardTensor. One that every rank has whole is a Replica, and its cut
    is None.
    """

    def __init__(self, buffers: Buffers, comm: Comm) -> None:
        self.buffers = buffers
        segments = [views.segment for views in buffers.segments]
        self.cuts: list[Cut | None] = [
            None if segment.cut == "replicated" else Cut.of_slot(segment, slot, comm)
            for segment in segments
            for slot in segment.slots
        ]
        self.trainable = [segment.trainable for segment in segments for _ in segment.slots]
        self.all: list[nn.Parameter] = []
        places = itertools.count()
        self.places = [[next(places) for _ in segment.slots] for segment in segments]

    def make(self) -> list[nn.Parameter]:
        """New parameters over the shard."""
        rows = zip(self.buffers.locals, self.cuts, self.trainable, strict=True)
        self.all = [
            Replica.over(local, trains)
            if cut is None
            else as_parameter(ShardTensor(local, cut), trains)
            for local, cut, trains in rows
        ]
        return self.all

    def adopt(self, parameters: Sequence[nn.Parameter]) -> None:
        """Go on with ``parameters`` that exist, over the present shard."""
        self.all = list(parameters)
        for parameter, local, cut in zip(self.all, self.buffers.locals, self.cuts, strict=True):
            set_local(parameter, local)
            if isinstance(parameter, ShardTensor) and cut is not None:
                parameter.cut, parameter._spec = cut, cut.spec(local.dtype)

    def follow_freezing(self, wholes: Sequence[nn.Parameter]) -> bool:
        """Whoever changed since both were alike, the sharded or the whole parameter, is followed by
        the other; whether any did."""
        shown = [sharded.requires_grad for sharded in self.all]
        hidden = [whole.requires_grad for whole in wholes]
        if shown == hidden:
            self.trainable = shown
            return False
        for place, (sharded, whole) in enumerate(zip(self.all, wholes, strict=True)):
            if shown[place] is not hidden[place]:
                was = self.trainable[place]
                one, other = (sharded, whole) if whole.requires_grad is was else (whole, sharded)
                other.requires_grad_(one.requires_grad)
            self.trainable[place] = sharded.requires_grad
        return True

    def rename(self, path: str) -> None:
        """Parameters are called by their path from the root, of which the unit is at ``path``."""
        slots = (slot for views in self.buffers.segments for slot in views.segment.slots)
        for cut, slot in zip(self.cuts, slots, strict=True):
            if cut is not None:
                cut.fqn = f"{path}.{slot.tensor.fqn}"

    def wrap(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """``local`` [cut.sizes] as part of something cut like the parameter at ``index``."""
        cut = self.cuts[index]
        return local if cut is None else ShardTensor(local, cut)

    def hooked(self, index: int, share: torch.Tensor, present: Sequence[bool]) -> None:
        """Let the hooks on the parameters of a segment change their parts of its mean gradient."""
        if not any(self.all[place]._backward_hooks for place in self.places[index]):
            return
        for place in self._with_gradient(index, present):
            call_gradient_hooks(self.all[place], self._part(place, share))

    def accept(self, index: int, share: torch.Tensor, present: Sequence[bool]) -> None:
        """Take a segment's share of the mean gradient: set or add to ``.grad`` of every parameter
        that requires it, unless an optimizer's flat tensor has it, and call the hooks that wait
        for it."""
        for place in self._with_gradient(index, present):
            parameter = self.all[place]
            if getattr(parameter, "home", None) is None:
                held = parameter.grad
                if held is None:
                    parameter.grad = self._part(place, share)
                else:
                    held.add_(self._part(place, share))
            call_accumulated(parameter)

    def _with_gradient(self, index: int, present: Sequence[bool]) -> list[int]:
        """The places of a segment's parameters that get a gradient."""
        places = self.places[index]
        return [
            p for p, here in zip(places, present, strict=True) if here and self.all[p].requires_grad
        ]

    def _part(self, place: int, share: torch.Tensor) -> torch.Tensor:
        """A parameter's part of a share of its segment."""
        begin, end, sizes = self.buffers.spans[place]
        return self.wrap(place, share[begin:end].view(sizes))
