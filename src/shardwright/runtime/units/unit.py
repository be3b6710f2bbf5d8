"""One sharded unit: its buffers, its states, and the steps between them.

States are the bytes they own:

* ``SHARDED``: this rank's shard and, after a backward, its reduced gradient. The modules show
  sharded parameters, views of the shard.
* ``UNSHARDED``: in addition the whole parameters, which the modules show. During a backward also
  what autograd left of their gradients.

The shard of a replicated unit is the whole: it gathers nothing, and sums its gradient instead of
scattering it. Under ZeRO-1 and 2 the whole parameters stay in either state: they are gathered when
the shards have changed. An offloaded unit has its shard and its reduced gradient in host memory.
"""

# Memory of whole parameters comes and goes while tensors over it live on: in graphs that autograd
# saved, in modules, in what users hold. Two things keep that from being a wrong number or a crash.
# Versions (``Writes``) say who wrote what since the last gather: a backward whose forward had other
# weights is refused, and what was written to gathered parameters, or to sharded ones, is kept or
# refused and never lost. And whatever leads from here to a module, a flow or an optimizer is weak
# or goes one way only, so that a deleted model frees its memory at once.
#
# A gather has three ways, which ``start_gather`` chooses: nothing travels where whole parameters
# stay and are those of the shards (ZeRO-1 and 2, replicas), few ranks share what all had in the
# forward (``reshard_after_forward`` of a number), or all ranks give their shares.

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from shardwright.core.errors import InputError
from shardwright.core.layout import UnitLayout, unit_layout
from shardwright.core.timeline import Kind
from shardwright.runtime.comm import Comm
from shardwright.runtime.flat_tensors import FlatPart
from shardwright.runtime.guard import Guard
from shardwright.runtime.torch_private import local_of, storage_of
from shardwright.runtime.units import replicas
from shardwright.runtime.units.buffers import Awaited, Buffers
from shardwright.runtime.units.cut import joints, part_of
from shardwright.runtime.units.cutting import Cutting, UnitNames
from shardwright.runtime.units.gradients import Gradients
from shardwright.runtime.units.linked import (
    AtShard,
    Replica,
    follow_accumulation,
    follow_gradients,
    hooked_twice,
    inherit,
    on_meta,
)
from shardwright.runtime.units.parameter import DTYPES, Member, Structure, infos_of
from shardwright.runtime.units.sharded_parameters import ShardedParameters, Showing, Writes
from shardwright.tracker.private import accumulated_hooks, gradient_hooks

Ahead = dict[str, "list[weakref.ref[Unit]] | None"]  # what a user wants gathered meanwhile
Initial = Callable[[str], torch.Tensor]


class State(enum.Enum):
    """Which bytes a unit owns; see the module's text."""

    SHARDED = "sharded"
    UNSHARDED = "unsharded"


SHARDED, UNSHARDED = State.SHARDED, State.UNSHARDED


class Driver(Protocol):
    """Who gathers, frees and reduces the units of a model: their flow, as they need it."""

    @property
    def guard(self) -> Guard | None:
        """Looks at every gradient before it is summed."""
        ...

    def arrive(self, unit: Unit) -> None:
        """A gradient comes to ``unit`` that none of its outputs announced."""
        ...

    def tell_of_buffers(self) -> None:
        """A forward begins: say which buffers have no values."""
        ...

    def copied(self, unit: Unit, memo: dict[int, Any]) -> Unit:
        """``unit`` of modules that are being copied."""
        ...


class Unit:
    """One unit's buffers on this rank; ``DStorage`` is what users see of it. A flow drives it,
    which knows it by ``key``."""

    flow: Driver
    key: str

    def __init__(
        self,
        members: Sequence[Member],
        comm: Comm,
        cutting: Cutting,
        names: UnitNames,
        reshard_after_forward: bool | int | None = None,
        initial: Initial | None = None,
    ) -> None:
        self._names = names
        self.name = names.full
        self.comm = comm
        self.mesh = comm.mesh
        self.cutting = cutting
        self.precision, self.offloaded = cutting.precision, cutting.offloaded
        self.driven_by_hand = True  # until a module's hooks do it
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.synchronise = True
        self.over_replicas = True  # sums of gradients, where there are replicas of shards
        self.divisor: float | None = None  # of summed gradients; None: the number of ranks
        self.ahead: Ahead = {"forward": None, "backward": None}
        self.state = State.SHARDED
        self.is_present = False  # the whole unit, or it is on its way
        self.members = list(members)
        # What optimizers' flat tensors have of each segment's shares, besides the parameters
        self.flat_parts: dict[int, list[FlatPart]] = {}
        self.structure = Structure()
        self.frozen = [m.fqn for m in members if not m.parameter.requires_grad]  # when sharded
        self.laid_out = 0  # how often memory and views were made
        self._is_alike = False  # whether replicas were seen to be equal since they got values
        self._gathering: list[Awaited] | None = None  # what is on its way; None: nobody asked
        self._narrow: torch.Tensor | None = None  # what this rank has between forward and backward
        self.joints = joints({m.fqn: m.parallel for m in members if m.parallel}, comm)
        sources = {member.fqn: _own(member) for member in members}
        meta = initial is None and any(p.is_meta for p in sources.values())
        home = "meta" if meta else "cpu" if self.offloaded else comm.mesh.device_type
        self.lay_out(torch.device(home))
        self.fill(initial or sources.__getitem__)
        self.show_new()
        comm.prepare(self.layout.nbytes)

    @property
    def module_names(self) -> tuple[str, ...]:
        """Of its modules, in the order in which they run."""
        return self._names.modules

    @property
    def is_bucket(self) -> bool:
        """Whether it is one of several units of the same modules."""
        return bool(self._names.bucket)

    def rename(self, paths: Sequence[str]) -> None:
        """Be called by the paths of the unit's modules."""
        self._names = self._names.by_paths(paths)
        self.name = self._names.full
        if len(paths) == 1:
            self.sharded.rename(paths[0])

    def forget_users(self) -> None:
        """Of a unit that was just copied: modules, optimizers and passes are the other one's."""
        self.ahead = {"forward": None, "backward": None}
        self.flat_parts, self.structure, self.laid_out = {}, Structure(), 0
        self._gathering = self._narrow = None

    # ---- what is set -----------------------------------------------------------------------------

    def follow(self, flow: Driver, key: str) -> None:
        """Be driven by ``flow`` from now on, which knows the unit by ``key``."""
        self.flow, self.key = flow, key

    def take_settings(self, synchronise: bool | None = None, divisor: float | None = None) -> None:
        """Reduce gradients after backwards or hold them, and divide their sums; None: as before."""
        if synchronise is not None:
            self.synchronise = synchronise
        if divisor is not None:
            self.divisor = divisor

    def set_ahead(self, direction: str, units: Sequence[Unit]) -> None:
        """Gather ``units`` while this one computes, instead of those that came next last time."""
        self.ahead[direction] = [weakref.ref(unit) for unit in units]

    # ---- construction ---------------------------------------------------------------------------

    def lay_out(self, home: torch.device, shard: torch.Tensor | None = None) -> None:
        """Buffers, the shard in the memory of ``home``, and views for the members as they are now;
        nothing is shown yet."""
        specs = [member.spec for member in self.members]
        computed = self.precision.computed
        cast = {s.dtype for s in specs if self.offloaded or computed(t := DTYPES[s.dtype]) != t}
        how = self.cutting
        self.layout: UnitLayout = unit_layout(
            specs,
            how.placements,
            self.comm.size,
            self.frozen,
            zero=how.zero,
            kept=self.comm.kept,
            cast=cast,
            block=how.block_size,
        )
        order = {slot.tensor.fqn: index for index, slot in enumerate(self.layout.slots)}
        self.members.sort(key=lambda member: order[member.fqn])
        self.laid_out += 1
        self.buffers = Buffers(
            self.layout, self.comm, self.near(home), self.precision, shard, offloaded=self.offloaded
        )
        self.writes = Writes(self.buffers)
        self.is_replicated = not self.buffers.whole.nbytes and all(
            views.segment.cut == "replicated" for views in self.buffers.segments
        )
        self.keeps_whole = self.cutting.zero < 3 or self.is_replicated
        self.sharded = ShardedParameters(self.buffers, self.comm, self.joints)
        self.param_infos = {i.fqn: i for i in infos_of(self.layout, self.comm.rank)}

    def near(self, home: torch.device) -> torch.device:
        """Where whole parameters are whose shards are in the memory of ``home``."""
        stays = not self.offloaded or home.type == "meta"
        return home if stays else torch.device(self.comm.mesh.device_type)

    def lasting(self) -> Iterator[tuple[torch.Tensor, Kind]]:
        """The buffers, whose storages may be empty now, and what they are for."""
        yield self.buffers.shard, "weight"
        yield self.buffers.whole.tensor, "gathered_weight"
        yield self.buffers.stage.tensor, "all_gather"
        for gradient in self.gradients.segments:
            yield gradient.send.tensor, "reduce_scatter"

    def fill(self, value_of: Initial) -> None:
        """Keep this rank's piece of every whole value, one after the other."""
        for local, piece in zip(self.buffers.locals, self.buffers.pieces, strict=True):
            if piece.numel:
                value = value_of(piece.tensor.fqn)
                if not value.is_meta:
                    local.copy_(part_of(value.detach(), piece.offsets, piece.sizes))

    def show_new(self) -> None:
        """Parameters for users, and whole ones for computing, over the present buffers."""
        for member, parameter in zip(self.members, self.sharded.make(), strict=True):
            inherit(parameter, member.parameter)
            member.parameter = parameter
        self.finish_views()

    def finish_views(self) -> None:
        """Everything that is made of the buffers and the parameters, and their SHARDED state."""
        self._is_alike = False
        self.gradients = Gradients(self.buffers, self.comm)
        for tensor, kind in self.lasting():
            self.comm.probe.holds(tensor, kind)
        buffers = self.buffers
        rows = list(zip(self.members, buffers.parameters, strict=True))
        for place, ((member, whole), apart) in enumerate(zip(rows, buffers.apart, strict=True)):
            memory = buffers.whole.storage if apart else None
            where = f"{member.fqn} of unit '{self.name}'"
            whole.home = AtShard(member.parameter, where, memory)
            follow_gradients(whole, weakref.ref(self))
            if self.is_bucket:
                follow_accumulation(whole, place, weakref.ref(self))
            if isinstance(member.parameter, Replica):
                member.parameter.unit, member.parameter.place = weakref.ref(self), place
        self.showing = Showing(self.members, buffers)
        self._show(SHARDED)

    def _show(self, state: State) -> None:
        """Let every module have the parameters of ``state``."""
        self.state = state
        self.is_present = whole = state is UNSHARDED
        self.showing.show(whole=whole)

    def follow_freezing(self) -> None:
        """Full parameters train as the sharded ones do; users freeze whichever is shown."""
        if self.sharded.follow_freezing(self.buffers.parameters):
            for part in self.all_flat_parts:
                part.flat.follow_freezing()

    def show_sharded(self) -> None:
        """Let every module have its sharded parameters, whatever the state."""
        self.showing.show(whole=False)

    def show_again(self) -> None:
        """After ``show_sharded``: the parameters of the state."""
        self.showing.show(whole=self.state is UNSHARDED)

    # ---- what the flow calls --------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether the whole parameters are kept and those of the shards as they are now, so that
        nothing has to travel."""
        return self.is_replicated or (self.keeps_whole and not self.writes.is_changed)

    @property
    def is_coming(self) -> bool:
        """Whether something of the whole unit travels."""
        return bool(self._gathering)

    def start_gather(self) -> None:
        """Begin to gather (collective), or only to show what is current."""
        if self.buffers.shard.is_meta:
            raise self.on_meta()
        if self.keeps_whole and self.is_current and not self.is_replicated:
            self._gathering, self.is_present = [], True
            return
        label = f"{self.name} gather"
        if not self.is_replicated:
            self.comm.remember(label)
        changed = self.writes.is_changed
        if changed:
            self._narrow = None
            self.writes.gather()
        if self._narrow is not None:
            self._gathering = self._gather_narrow(label)
        else:
            self._gathering = self.buffers.start_gather(label, changed=changed)
        self.is_present = True

    def finish_gather(self) -> None:
        """Wait until the whole unit is there and show it."""
        pending, self._gathering = self._gathering, None
        if pending is None:
            return
        self.is_present = False  # if a wait raises
        if self._narrow is not None:
            for work in pending:
                work.wait()
            self._narrow = None
        elif pending:
            self.buffers.finish_gather(pending)
        self.writes.forget()
        self._show(UNSHARDED)

    def _gather_narrow(self, label: str) -> list[Awaited]:
        """Gather from the few ranks that share the whole unit since its forward."""
        assert self._narrow is not None
        whole = self.buffers.whole
        whole.take()
        near = self.comm.narrow(self._ranks_after_forward)
        pending = near.all_gather(label, whole.alias, self._narrow, wait=False)
        return [] if pending is None else [pending]

    @property
    def _ranks_after_forward(self) -> int:
        """How many ranks share the whole unit between its forward and its backward."""
        kind = self.reshard_after_forward
        every = kind is None or isinstance(kind, bool) or self.keeps_whole
        return self.comm.shards.size if every else int(kind)

    def free(self, *, after_forward: bool = False) -> None:
        """Free the full parameters and show the sharded ones."""
        if not self.is_present:
            return
        if self._gathering is not None:
            self.finish_gather()
        if self.writes.whole_is_written:
            self.writes.keep(self.name)
        if not after_forward:
            self.follow_freezing()
        if after_forward and self._ranks_after_forward != self.comm.shards.size:
            near = self.comm.narrow(self._ranks_after_forward)
            self._narrow = self.buffers.whole.tensor.view(near.size, -1)[near.rank].clone()
            self.comm.probe.holds(self._narrow, "gathered_weight")
        if not self.keeps_whole:
            self.buffers.whole.give()
            self.writes.free()
        self._show(SHARDED)

    @property
    def _sums_all(self) -> bool:
        """Whether sums are over replicas, too; those over shards are kept where they can wait."""
        return self.over_replicas or self.is_replicated or not self.comm.sums_in_two

    @property
    def holds(self) -> bool:
        """Whether backwards leave whole gradients to a later one."""
        if self.over_replicas or not self.synchronise:
            return not self.synchronise
        several = self.is_replicated or self.comm.total > self.comm.shards.size
        return self._sums_all and several

    def start_reduce(self) -> None:
        """Begin to sum the gradient over ranks (collective)."""
        if self.gradients.under_way:  # in the memory that this one takes
            self.finish_reduce()
        with self.comm.probe.phase("reduce"):
            guard, all_ranks = self.flow.guard, self._sums_all
            self.gradients.start(self.name, self.divisor, guard, over_replicas=all_ranks)

    def finish_reduce(self) -> None:
        """Hand this rank's mean gradient to its parameters, or to the optimizer's."""
        with self.comm.probe.phase("reduce"):
            self.gradients.finish(self._accept)

    def land(self) -> None:
        """Wait for mean gradients that go to host memory, and hand them on."""
        if self.gradients.landing:
            with self.comm.probe.phase("reduce"):
                self.gradients.land(self._accept)

    def _accept(self, index: int, share: torch.Tensor, present: Sequence[bool]) -> None:
        self.sharded.hooked(index, share, present)
        taken = 0
        for part in self.flat_parts.get(index, ()):
            part.accept(share, present)
            taken += len(part.homes)
        self.sharded.accept(index, share, present, taken)

    def recover(self, *, failed: bool) -> None:
        """Be SHARDED; after a failed backward also without what it left of a gradient."""
        if not failed and not self.is_present:  # as after nearly every step
            self._narrow = None
            self.gradients.check()
            return
        # Of a gather among few ranks that is under way ``free`` needs it to finish.
        self._narrow = None if self._gathering is None else self._narrow
        if failed:
            self.gradients.drop()
        coming = self.is_current and self._gathering is not None and not failed
        changed = self.is_present and self.writes.is_changed
        if failed or changed or (self.reshard_after_backward and not coming):
            self.free()
        self._narrow = None  # also where nothing was freed
        self.gradients.check()

    def settle(self) -> None:
        """After a backward: reduce what came later than its unit's reduce, or was held back by an
        earlier backward and not touched by this one."""
        if self.gradients.is_left(self._sums_all) and not self.holds and not self.driven_by_hand:
            self.start_reduce()
            self.finish_reduce()
        if self.gradients.landing:
            self.land()
        self.buffers.let_change()

    # ---- forwards and backwards ------------------------------------------------------------------

    def check(self) -> None:
        """A forward begins: what must hold of the unit is checked, and of its parameters."""
        self.showing.show_parallel()
        if self.structure.has_empty:
            self.flow.tell_of_buffers()
        if torch.is_grad_enabled():
            self.structure.check(self.name)
        if not self._is_alike:
            self._is_alike = True
            replicas.check(self.name, self.buffers, self.comm)

    def unwatch(self) -> InputError | None:
        """That forward is over: what to say if it wrote a parameter."""
        error = self.writes.refusal(self.name)
        if error is not None:
            self.free()
        return error

    def take_stray(self, parameter: Replica, gradient: torch.Tensor) -> None:
        """A gradient of a use outside of the unit's forward: it is summed with the unit's."""
        if gradient_hooks(parameter) or len(accumulated_hooks(parameter)) > 1:
            raise hooked_twice(f"{self.members[parameter.place].fqn} of unit '{self.name}'")
        self.gradients.hold(parameter.place, gradient)
        if self.driven_by_hand:
            self.gradients.expect()
        else:
            self.flow.arrive(self)

    # ---- small things ---------------------------------------------------------------------------

    @property
    def all_flat_parts(self) -> Iterator[FlatPart]:
        """What optimizers' flat tensors have of this unit."""
        for flat_parts in self.flat_parts.values():
            yield from flat_parts

    def index(self, fqn: str) -> int:
        """The place of a parameter in layout order."""
        for index, member in enumerate(self.members):
            if fqn == member.fqn or fqn in member.aliases:
                return index
        names = ", ".join(self.param_infos)
        raise InputError(f"unit '{self.name}'", f"one of {names}", f"'{fqn}'")

    def shares_full_buffer(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` would point to freed memory once the unit is resharded."""
        return storage_of(tensor) == self.buffers.whole.place

    def on_meta(self) -> InputError:
        """What to say where memory is asked of a unit without any."""
        return on_meta(f"{self.members[0].fqn} of unit '{self.name}'")

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return self.flow.copied(self, memo)


def _own(member: Member) -> torch.Tensor:
    """The parameter, of what tensor parallelism has cut this rank's part."""
    return local_of(member.parameter.detach()) if member.parallel else member.parameter
