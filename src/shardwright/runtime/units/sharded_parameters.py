"""What a user holds of a unit while it is sharded: one parameter each, made once, that optimizers
work on and that gets the unit's gradient. All share the unit's shard."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from shardwright.core.errors import InputError
from shardwright.runtime.comm import Comm
from shardwright.runtime.torch_private import no_subclass_functions, set_local, set_version
from shardwright.runtime.units.buffers import Buffers
from shardwright.runtime.units.cut import Cut, Joint, part_of
from shardwright.runtime.units.linked import (
    OfStrays,
    Replica,
    call_accumulated,
    call_gradient_hooks,
)
from shardwright.runtime.units.parameter import Member
from shardwright.runtime.units.shard_tensor import ShardTensor, as_parameter
from shardwright.tracker.private import any_accumulated_hooks, any_gradient_hooks

_trains = operator.attrgetter("requires_grad")


class ShardedParameters:
    """The parameters of a unit in SHARDED state, in layout order.

    A tensor that is cut is a ShardTensor. One that every rank has whole is a Replica, and its cut
    is None.
    """

    def __init__(self, buffers: Buffers, comm: Comm, joints: Mapping[str, Joint]) -> None:
        self.buffers = buffers
        segments = [views.segment for views in buffers.segments]
        self.cuts: list[Cut | None] = [
            None
            if segment.cut == "replicated"
            else Cut.of_slot(segment, slot, comm, joints.get(slot.tensor.fqn))
            for segment in segments
            for slot in segment.slots
        ]
        self.trainable = [segment.trainable for segment in segments for _ in segment.slots]
        self.all: list[nn.Parameter] = []
        self.segments: list[list[nn.Parameter]] = []  # the same, segment by segment
        places = itertools.count()
        self.places = [[next(places) for _ in segment.slots] for segment in segments]

    def _hold(self, parameters: list[nn.Parameter]) -> None:
        self.all = parameters
        self.segments = [[parameters[p] for p in places] for places in self.places]

    def make(self) -> list[nn.Parameter]:
        """New parameters over the shard."""
        rows = zip(self.buffers.locals, self.cuts, self.trainable, strict=True)
        self._hold(
            [
                Replica.over(local, trains)
                if cut is None
                else as_parameter(ShardTensor(local, cut), trains)
                for local, cut, trains in rows
            ]
        )
        return self.all

    def adopt(self, parameters: Sequence[nn.Parameter]) -> None:
        """Go on with ``parameters`` that exist, over the present shard."""
        self._hold(list(parameters))
        for parameter, local, cut in zip(self.all, self.buffers.locals, self.cuts, strict=True):
            # The objects stay, as users and optimizers hold them; only what they show is other
            # memory.
            set_local(parameter, local)
            if isinstance(parameter, ShardTensor) and cut is not None:
                parameter.cut, parameter._spec = cut, cut.spec(local.dtype)

    def follow_freezing(self, wholes: Sequence[nn.Parameter]) -> bool:
        """Whoever changed since both were alike, the sharded or the whole parameter, is followed by
        the other; whether any did."""
        with no_subclass_functions():  # which torch looks for at every attribute otherwise
            shown, hidden = [*map(_trains, self.all)], [*map(_trains, wholes)]
        if shown == hidden:
            self.trainable = shown
            return False
        for place, (sharded, whole) in enumerate(zip(self.all, wholes, strict=True)):
            if shown[place] is not hidden[place]:
                # Whoever still has the flag of last time was not touched, so the other one is
                # right.
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
        with no_subclass_functions():
            if not any_gradient_hooks(self.segments[index]):
                return
        for place in self._with_gradient(index, present):
            call_gradient_hooks(self.all[place], self._part(place, share))

    def accept(self, index: int, share: torch.Tensor, present: Sequence[bool], taken: int) -> None:
        """Take a segment's share of the mean gradient: set or add to ``.grad`` of every parameter
        that requires it, unless it is one of those that optimizers' flat tensors have ``taken``,
        and call the hooks that wait for it."""
        with no_subclass_functions():
            has_hooks = any_accumulated_hooks(self.segments[index], OfStrays)
        if taken == len(self.places[index]) and not has_hooks:
            return
        for place in self._with_gradient(index, present):
            parameter = self.all[place]
            if getattr(parameter, "home", None) is None:
                held = parameter.grad
                if held is None:
                    # A view: the gradients of a segment are one tensor, which goes when the last of
                    # them is cleared.
                    parameter.grad = self._part(place, share)
                else:
                    held.add_(self._part(place, share))
            if has_hooks:
                call_accumulated(parameter)

    def _with_gradient(self, index: int, present: Sequence[bool]) -> list[int]:
        """The places of a segment's parameters that get a gradient."""
        rows = zip(self.places[index], present, strict=True)
        with no_subclass_functions():
            return [place for place, here in rows if here and self.all[place].requires_grad]

    def _part(self, place: int, share: torch.Tensor) -> torch.Tensor:
        """A parameter's part of a share of its segment."""
        begin, end, sizes = self.buffers.spans[place]
        return self.wrap(place, share[begin:end].view(sizes))


class Showing:
    """What modules show of a unit: the sharded parameters, or the whole ones while they compute.

    ``expected`` are the sharded ones by member, module and name, with this rank's part of each:
    what is found in another place or over other memory was put there by someone else.
    """

    def __init__(self, members: Sequence[Member], buffers: Buffers) -> None:
        rows = list(zip(members, buffers.parameters, buffers.locals, strict=True))
        self._places = [(*place, m.parameter, whole) for m, whole, _ in rows for place in m.places]
        self._parallel = [
            (*place, m.parallel, whole)
            for m, whole, _ in rows
            for place in m.places
            if m.parallel is not None
        ]
        self._setters = [(*each, m.parameter, whole) for m, whole, _ in rows for each in m.setters]
        self.expected = [
            (index, *place, member.parameter, local)
            for index, (member, _, local) in enumerate(rows)
            for place in member.places
        ]

    def show(self, *, whole: bool) -> None:
        """Let every module have its whole parameters, or the sharded ones."""
        # Into the modules' own dictionaries: ``setattr`` would look for hooks and types each time.
        if whole:
            for shown, name, _, full in self._places:
                shown[name] = full
            # Made anew in each forward, for a DTensor over the whole part belongs to one graph.
            if self._parallel:
                self.show_parallel()
        else:
            for shown, name, sharded, _ in self._places:
                shown[name] = sharded
        for reference, name, sharded, full in self._setters:  # recurrent layers keep lists of them
            module = reference()
            if module is not None:
                setattr(module, name, full if whole else sharded)

    def show_parallel(self) -> None:
        """Let modules have DTensors of what tensor parallelism has cut, in the graph to come."""
        for shown, name, parallel, full in self._parallel:
            shown[name] = parallel.shown(full)


Versions = tuple[int, int]  # of the whole parameters, and of those that are where the shard is


# Torch's optimizers, users and loads write parameters in place, and no hook tells of it. Version
# counters do, and cost nothing: of the shard, of the whole parameters, and of an alias of the shard
# where it is computed with directly. Every way in which both kinds of parameters could be written
# between a gather and its release ends in one of: kept, refused, or gathered again; never in one
# copy that silently wins.
class Writes:
    """Versions of a unit's memory, which say who wrote what since it was gathered.

    Autograd saves the whole unit's with a graph: a gather of shards that are what they were at the
    last one must leave them as they are, or a backward is refused.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.watched: Versions | None = None  # while a forward is under way
        self._gathered = -1  # of the shard
        self._is_in_shard = not all(buffers.apart)  # where some of it is computed with
        self._whole = self._replica = 0

    def watch(self) -> None:
        """The forward of a module begins, which only reads parameters."""
        self.watched = self.buffers.whole.tensor._version, self.buffers.replica._version

    @property
    def is_changed(self) -> bool:
        """Whether the shards were changed since they were gathered."""
        return self.buffers.shard._version != self._gathered

    @property
    def whole_is_written(self) -> bool:
        """Whether someone wrote a whole parameter since it was gathered."""
        buffers = self.buffers
        return (
            buffers.whole.tensor._version != self._whole
            or buffers.replica._version != self._replica
        )

    def gather(self) -> None:
        """The shards are gathered, and are others than last time."""
        self._gathered = self.buffers.shard._version
        # Graphs that saved the unit with other weights are refused by autograd from now on.
        increment_version(self.buffers.whole.tensor)
        self._whole = self.buffers.whole.tensor._version
        if self._is_in_shard:
            increment_version(self.buffers.replica)

    def forget(self) -> None:
        """Let what was written to whole parameters go with them."""
        # ``free`` counted a version, by which graphs were refused while there was no memory. With
        # the same values here again, what they saved is valid again.
        set_version(self.buffers.whole.tensor, self._whole)
        self._replica = self.buffers.replica._version

    def free(self) -> None:
        """Whatever a graph has saved of the unit is refused by autograd until the unit is there
        again: reading it would end the process."""
        self._whole = self.buffers.whole.tensor._version
        increment_version(self.buffers.whole.tensor)

    @torch.no_grad()
    def keep(self, unit: str) -> None:
        """Keep this rank's part of the whole parameters as they are now.

        Where they compute in another dtype, elements that nobody changed keep their precision.
        """
        if self.is_changed:
            where = f"parameters of unit '{unit}'"
            wanted = "either the sharded or the gathered ones to be written"
            remedy = "Write under torch.no_grad() before the forward or after the backward."
            raise InputError(where, wanted, "both, since they were gathered", remedy)
        buffers = self.buffers
        rows = zip(buffers.locals, buffers.pieces, buffers.parameters, strict=True)
        # What this rank keeps of others' parts, too, or the next gather would bring the old values.
        for local, piece, whole in itertools.chain(rows, buffers.beside):
            now = part_of(whole.detach(), piece.offsets, piece.sizes)
            if now.dtype is not local.dtype:
                now = torch.where(now == local.to(now.dtype), local, now.to(local.dtype))
            local.copy_(now)
        self._whole, self._replica = buffers.whole.tensor._version, buffers.replica._version
        self._gathered = buffers.shard._version

    def refusal(self, unit: str) -> InputError | None:
        """The forward is over: what to say if it wrote a parameter, for the write goes with the
        gathered copy, or is another on each replica."""
        was, self.watched = self.watched, None
        now = self.buffers.whole.tensor._version, self.buffers.replica._version
        if was is None or now == was:
            return None
        written = self._written(shard=now[1] != was[1])
        self.forget()
        return InputError(
            f"forward of unit '{unit}'",
            "one that only reads its parameters",
            f"one that writes {', '.join(written) or 'one'} in place",
            "Keep what a forward changes in a buffer, leave the parameter out "
            "(ignored_params), or write inside storage.unsharded(write=True).",
        )

    def _written(self, *, shard: bool) -> list[str]:
        """What was written, as far as this rank's part shows it; of replicas, all that may be."""
        buffers = self.buffers
        rows = zip(buffers.pieces, buffers.parameters, buffers.locals, buffers.apart, strict=True)
        return [
            piece.tensor.fqn
            for piece, whole, local, apart in rows
            if (
                not part_of(whole.detach(), piece.offsets, piece.sizes).equal(local.to(whole.dtype))
                if apart
                else shard
            )
        ]
