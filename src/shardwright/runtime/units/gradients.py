"""The gradient of a unit: autograd adds to it whole, the ranks sum it, this rank keeps its share.

Every whole parameter's ``.grad`` is a view of one zeroed buffer before the backward reaches it, so
what autograd computes is added where it is needed and freed at once, and parameters that no one
used need no care: their gradient is zero on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import nn

from shardwright.runtime.comm import Comm, Pending
from shardwright.runtime.units.buffers import Buffers, Elastic, SegmentViews
from shardwright.runtime.units.regroup import Regroup


class Sink(Protocol):
    """Who takes the reduced gradient of a unit: its own parameters, or an optimizer's flat ones."""

    def room(self, index: int) -> torch.Tensor | None:
        """Where the share of segment ``index`` may be written at once; None: nowhere yet."""
        ...

    def accept(self, index: int, share: torch.Tensor) -> None:
        """Take the mean gradient of segment ``index``, which may be what ``room`` gave."""
        ...


class Sum(NamedTuple):
    """A segment's gradient on its way: summed over ranks when ``pending`` is done."""

    gradient: SegmentGradient
    share: torch.Tensor
    pending: Pending | None


class SegmentGradient:
    """The unreduced gradient of a segment, in the dtype it computes in."""

    def __init__(self, index: int, views: SegmentViews, comm: Comm) -> None:
        self.index = index
        self.views = views
        self.comm = comm
        segment = views.segment
        self.numel = segment.share if segment.cut == "replicated" else segment.whole
        self.flat = torch.empty(0)
        self.held: torch.Tensor | None = None  # what earlier backwards left, in the reduce dtype
        self.scatter: Elastic | None = None
        payload = sum(slot.tensor.numel for slot in segment.slots)
        self.pads = payload != comm.size * segment.share  # whether zeros travel along
        self.regroup: Regroup | None = None

    def view_in(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Make ``flat`` this segment's gradient; its tensors, in their shapes."""
        self.flat = flat
        views = self.views
        parts = [views.slice_of(flat, slot) for slot in views.segment.slots]
        if views.segment.cut == "chunks":
            size = self.comm.size * views.segment.share * views.reduced.itemsize
            self.scatter = Elastic(size, flat.device)
            shares = self.scatter.tensor.view(views.reduced).view(self.comm.size, -1)
            self.regroup = Regroup(views.segment, parts, shares)
            self.scatter.give()
        return parts

    @property
    def summed_bytes(self) -> int:
        """Bytes of the buffer that is summed over ranks."""
        parts = self.comm.size if self.views.segment.cut != "replicated" else 1
        return self.views.segment.share * parts * self.views.reduced.itemsize

    def keep(self) -> None:
        """Add this backward's gradient to what is held, in the dtype it will be summed in."""
        if self.held is None:
            self.held = self.flat.to(self.views.reduced, copy=True)  # the buffer goes
            self.comm.probe.holds(self.held, "unreduced_gradient")
        else:
            self.held.add_(self.flat)

    def start(self, label: str, room: torch.Tensor | None) -> Sum:
        """Begin to sum over ranks (collective)."""
        views, comm = self.views, self.comm
        whole = self.flat
        if self.held is not None:
            whole, self.held = self.held.add_(self.flat), None
        if views.segment.cut == "replicated":
            self.flat = self.flat[:0].clone()  # the sum is handed on, not kept here
            whole = whole.to(views.reduced)
            return Sum(self, whole, comm.all_reduce(label, whole, wait=False))
        if self.scatter is not None:
            whole = self._scattered(whole)
        if whole.dtype is not views.reduced:
            whole = whole.to(views.reduced)
        if room is None or room.dtype != whole.dtype:
            room = whole.new_empty(views.segment.share)
        return Sum(self, room, comm.reduce_scatter(label, room, whole, wait=False))

    def _scattered(self, whole: torch.Tensor) -> torch.Tensor:
        """Every rank's chunks one after the other."""
        scatter, regroup, views = self.scatter, self.regroup, self.views
        assert scatter is not None
        assert regroup is not None
        scatter.take()
        if self.pads:
            scatter.tensor.zero_()
        if whole is not self.flat:
            parts = [views.slice_of(whole, slot) for slot in views.segment.slots]
            regroup = Regroup(views.segment, parts, regroup.shares)
        regroup.apart()
        return scatter.tensor.view(views.reduced)


class Gradients:
    """The unreduced gradient of a unit and its way to this rank's share."""

    def __init__(self, buffers: Buffers, parameters: list[nn.Parameter], comm: Comm) -> None:
        device = buffers.shard.device
        self.comm = comm
        self.divisor = float(comm.total)
        self.is_live = False
        self.parameters: list[nn.Parameter] = []
        self.views: list[torch.Tensor] = []
        self.cut: list[SegmentGradient] = []
        self.replicated: list[tuple[SegmentGradient, list[nn.Parameter]]] = []
        owners = iter(parameters)
        each = [[next(owners) for _ in views.segment.slots] for views in buffers.segments]
        room = 0
        for index, (views, owned) in enumerate(zip(buffers.segments, each, strict=True)):
            if not views.segment.trainable:
                continue
            gradient = SegmentGradient(index, views, comm)
            if views.segment.cut == "replicated":
                self.replicated.append((gradient, owned))
            else:
                self.cut.append(gradient)
                self.parameters.extend(owned)
                room += gradient.numel * views.computed.itemsize
        self.buffer = Elastic(room, device)
        begin = 0
        for gradient in self.cut:
            end = begin + gradient.numel * gradient.views.computed.itemsize
            flat = self.buffer.tensor[begin:end].view(gradient.views.computed)
            self.views.extend(gradient.view_in(flat))
            begin = end
        self.buffer.give()
        self.earlier: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]] = []
        self.under_way: list[Sum] = []

    @property
    def segments(self) -> list[SegmentGradient]:
        """Those of all trainable segments."""
        return [*self.cut, *(gradient for gradient, _ in self.replicated)]

    @property
    def rows(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Whole parameters of cut segments beside their places in the buffer."""
        return zip(self.parameters, self.views, strict=True)

    @property
    def waits(self) -> bool:
        """Whether a gradient is here that no reduce has taken."""
        return self.is_live or any(gradient.held is not None for gradient in self.segments)

    @property
    def was_cleared(self) -> bool:
        """Whether someone took away every gradient that autograd was to add to."""
        held = [parameter.grad for parameter in self.parameters]
        return self.is_live and bool(held) and all(gradient is None for gradient in held)

    def prepare(self) -> None:
        """Give every whole parameter a zeroed view to add to; nothing if they have one."""
        if self.is_live:
            return
        self.is_live = True
        self.buffer.take()
        self.buffer.tensor.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        for gradient, owned in self.replicated:  # its sum is kept as it is: fresh memory each time
            views = gradient.views
            flat = torch.zeros(gradient.numel, dtype=views.computed, device=views.share.device)
            self.comm.probe.holds(flat, "unreduced_gradient")
            for parameter, view in zip(owned, gradient.view_in(flat), strict=True):
                self.earlier.append((parameter, view, parameter.grad))
                parameter.grad = view

    def _settle(self) -> None:
        """See that the buffer has what autograd computed, and take it off the parameters."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            found = parameter.grad
            if found is not view:
                _put(found, view)
            parameter.grad = None
        for parameter, view, earlier in self.earlier:
            if parameter.grad is not view:
                _put(parameter.grad, view)
            parameter.grad = earlier
        self.earlier.clear()

    @torch.no_grad()
    def keep(self) -> None:
        """Hold this backward's gradient, unreduced, until one is reduced."""
        if not self.is_live:
            return
        if all(g.views.reduced == g.views.computed for g in self.cut) and not self.replicated:
            return  # autograd goes on adding to the buffer
        self._settle()
        for gradient in self.segments:
            gradient.keep()
        self.is_live = False
        self.buffer.give()

    @torch.no_grad()
    def start(self, label: str, sink: Sink) -> None:
        """Begin to sum over ranks (collective); ``finish`` before the next ``prepare``."""
        self._settle()
        self.is_live = False
        for gradient in self.segments:
            self.under_way.append(gradient.start(label, sink.room(gradient.index)))

    @torch.no_grad()
    def finish(self, sink: Sink) -> None:
        """Wait for the sums and hand their means to ``sink``."""
        for gradient, share, pending in self.under_way:
            if pending is not None:
                pending.wait()
            if self.divisor != 1.0:
                share.mul_(1.0 / self.divisor)
            dtype = gradient.views.dtype
            mean = share if share.dtype is dtype else share.to(dtype)
            self.comm.probe.holds(mean, "gradient")
            sink.accept(gradient.index, mean)
        self._give()

    def _give(self) -> None:
        """Let the memory of a reduce that is over go."""
        self.under_way.clear()
        self.buffer.give()
        for gradient in self.cut:
            if gradient.scatter is not None:
                gradient.scatter.give()

    def drop(self) -> None:
        """Forget a gradient that will not be reduced."""
        for _, _, pending in self.under_way:
            if pending is not None:
                pending.wait()
        if self.is_live:
            for parameter in self.parameters:
                parameter.grad = None
            for parameter, _, earlier in self.earlier:
                parameter.grad = earlier
            self.earlier.clear()
        self.is_live = False
        for gradient in self.segments:
            gradient.held = None
        self._give()


def _put(found: torch.Tensor | None, view: torch.Tensor) -> None:
    """Where autograd did not add in place, or someone cleared or replaced the gradient."""
    if found is None:
        view.zero_()
    else:
        view.copy_(found)
