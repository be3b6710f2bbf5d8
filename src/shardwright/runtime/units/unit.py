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

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from shardwright.core.errors import InputError, expected
from shardwright.core.layout import UnitLayout, unit_layout
from shardwright.core.placement import Placement, Zero
from shardwright.core.timeline import Kind
from shardwright.runtime.comm import Comm
from shardwright.runtime.guard import Guard
from shardwright.runtime.torch_private import local_of, storage_of
from shardwright.runtime.units import replicas
from shardwright.runtime.units.arrivals import Arrivals
from shardwright.runtime.units.buffers import Awaited, Buffers
from shardwright.runtime.units.cut import part_of
from shardwright.runtime.units.gradients import Gradients, Taker
from shardwright.runtime.units.linked import (
    AtShard,
    Replica,
    follow_accumulation,
    follow_gradients,
    hooked_twice,
    inherit,
    on_meta,
)
from shardwright.runtime.units.parameter import DTYPES, Member, infos_of
from shardwright.runtime.units.precision import MixedPrecision
from shardwright.runtime.units.sharded_parameters import ShardedParameters, Writes
from shardwright.runtime.units.structure import Structure
from shardwright.runtime.units.tensor_parallel import joints
from shardwright.tracker.private import accumulated_hooks, gradient_hooks

Ahead = dict[str, "list[weakref.ref[Unit]] | None"]  # what a user wants gathered meanwhile
Initial = Callable[[str], torch.Tensor]
FULL_PRECISION = MixedPrecision()


class State(enum.Enum):
    """Which bytes a unit owns; see the module's text."""

    SHARDED = "sharded"
    UNSHARDED = "unsharded"


SHARDED, UNSHARDED = State.SHARDED, State.UNSHARDED


class Driver(Protocol):
    """Who gathers, frees and reduces the units of a model."""

    @property
    def guard(self) -> Guard | None:
        """Looks at every gradient before it is summed."""
        ...

    def arrive(self, unit: Unit) -> None:
        """A gradient comes to ``unit`` that none of its outputs announced."""
        ...

    def reduce_complete(self) -> None:
        """A bucket's last gradient of a backward is there."""
        ...

    def tell_of_buffers(self) -> None:
        """A forward begins: say which buffers have no values."""
        ...


class Unit:
    """One unit's buffers on this rank; ``DStorage`` is what users see of it, and a flow drives it,
    which knows it by ``key``."""

    flow: Driver
    key: str

    def __init__(
        self,
        members: Sequence[Member],
        comm: Comm,
        placements: Mapping[str, Placement],
        *,
        name: str,
        module_names: Sequence[str] = (),
        bucket: str = "",
        reshard_after_forward: bool | int | None = None,
        driven_by_hand: bool = False,
        precision: MixedPrecision = FULL_PRECISION,
        zero: Zero = 3,
        offloaded: bool = False,
        block_size: int = 1,
        initial: Initial | None = None,
        ignored: Sequence[str] = (),
    ) -> None:
        self._bucket = bucket
        self.name = f"{name} {bucket}".strip()
        self.module_names = tuple(module_names) or (name,)
        self.comm = comm
        self.mesh = comm.mesh
        self.precision = precision
        self.zero: Zero = zero
        self.offloaded = offloaded
        self.block_size = block_size
        self.driven_by_hand = driven_by_hand
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.synchronise = True
        self.over_replicas = True  # sums of gradients, where there are replicas of shards
        self.divisor: float | None = None  # of summed gradients; None: the number of ranks
        self.ahead: Ahead = {"forward": None, "backward": None}
        self.ignored = tuple(ignored)
        self.placements = dict(placements)
        self.state = State.SHARDED
        self.members = list(members)
        self.arrivals = Arrivals() if bucket else None
        self.takers: dict[int, list[Taker]] = {}  # of segments' shares, besides the parameters
        self.structure = Structure()
        self.frozen = [m.fqn for m in members if not m.parameter.requires_grad]  # when sharded
        self.laid_out = 0  # how often memory and views were made
        self._is_alike = False  # whether replicas were seen to be equal since they got values
        self._gathering: list[Awaited] | None = None
        self._narrow: torch.Tensor | None = None
        self.joints = joints({m.fqn: m.parallel for m in members if m.parallel}, comm)
        sources = {member.fqn: _own(member) for member in members}
        meta = initial is None and any(p.is_meta for p in sources.values())
        home = "meta" if meta else "cpu" if offloaded else comm.mesh.device_type
        self.lay_out(torch.device(home))
        self.fill(lambda name: _value(sources[name], name, initial))
        self.show_new()
        comm.prepare(self.layout.nbytes)

    def rename(self, paths: Sequence[str]) -> None:
        """Be called by the paths of the unit's modules: ``layers.0-3`` for neighbours."""
        first, last = paths[0], paths[-1]
        parent, _, number = last.rpartition(".")
        alike = number.isdigit() and first.rpartition(".")[0] == parent
        self.module_names = tuple(paths)
        name = first if len(paths) == 1 else f"{first}-{number}" if alike else "+".join(paths)
        self.name = f"{name} {self._bucket}".strip()
        if len(paths) == 1:
            self.sharded.rename(first)

    # ---- construction ---------------------------------------------------------------------------

    def lay_out(self, home: torch.device, shard: torch.Tensor | None = None) -> None:
        """Buffers, the shard in the memory of ``home``, and views for the members as they are now;
        nothing is shown yet."""
        specs = [member.spec for member in self.members]
        cast = {s.dtype for s in specs if self.offloaded or self._casts(DTYPES[s.dtype])}
        how: dict[str, Any] = {"zero": self.zero, "kept": self.comm.kept, "block": self.block_size}
        layout = unit_layout(specs, self.placements, self.comm.size, self.frozen, cast=cast, **how)
        order = {slot.tensor.fqn: index for index, slot in enumerate(layout.slots)}
        self.members.sort(key=lambda member: order[member.fqn])
        self.layout: UnitLayout = layout
        self.laid_out += 1
        self.buffers = Buffers(
            layout, self.comm, self.near(home), self.precision, shard, offloaded=self.offloaded
        )
        self.writes = Writes(self.buffers)
        self.is_replicated = not self.buffers.whole.nbytes and all(
            views.segment.cut == "replicated" for views in self.buffers.segments
        )
        self.keeps_whole = self.zero < 3 or self.is_replicated
        self.sharded = ShardedParameters(self.buffers, self.comm, self.joints)
        self.param_infos = {i.fqn: i for i in infos_of(layout, self.comm.rank)}

    def near(self, home: torch.device) -> torch.device:
        """Where whole parameters are whose shards are in the memory of ``home``."""
        stays = not self.offloaded or home.type == "meta"
        return home if stays else torch.device(self.comm.mesh.device_type)

    def _casts(self, dtype: torch.dtype) -> bool:
        return self.precision.computed(dtype) != dtype

    def lasting(self) -> Iterator[tuple[torch.Tensor, Kind]]:
        """The buffers, whose storages may be empty now, and what they are for."""
        yield self.buffers.shard, "weight"
        yield self.buffers.whole.tensor, "gathered_weight"
        yield self.buffers.stage.tensor, "all_gather"
        yield from (
            (gradient.send.tensor, "reduce_scatter") for gradient in self.gradients.segments
        )

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
            if self.arrivals is not None:
                follow_accumulation(whole, place, weakref.ref(self))
            if isinstance(member.parameter, Replica):
                member.parameter.unit, member.parameter.place = weakref.ref(self), place
        self._places = [
            (shown, name, member.parameter, whole)
            for member, whole in rows
            for shown, name in member.places
        ]
        self._parallel = [
            (shown, name, member.parallel, whole)
            for member, whole in rows
            for shown, name in member.places
            if member.parallel is not None
        ]
        self._setters = [
            (setter, name, member.parameter, whole)
            for member, whole in rows
            for setter, name in member.setters
        ]
        self.expected = [
            (index, *place, member.parameter, local)
            for index, (member, local) in enumerate(zip(self.members, buffers.locals, strict=True))
            for place in member.places
        ]
        self._show(SHARDED)

    def _show(self, state: State) -> None:
        """Let every module have the parameters of ``state``."""
        if state is UNSHARDED:
            for shown, name, _, whole in self._places:
                shown[name] = whole
            self._show_parallel()
        else:
            for shown, name, sharded, _ in self._places:
                shown[name] = sharded
        for reference, name, sharded, whole in self._setters:  # recurrent layers keep lists of them
            module = reference()
            if module is not None:
                setattr(module, name, whole if state is UNSHARDED else sharded)
        self.state = state

    def _show_parallel(self) -> None:
        """Let modules have DTensors of what tensor parallelism has cut, in the graph to come."""
        for shown, name, parallel, whole in self._parallel:
            shown[name] = parallel.shown(whole)

    def follow_freezing(self) -> None:
        """Full parameters train as the sharded ones do; users freeze whichever is shown."""
        if self.sharded.follow_freezing(self.buffers.parameters):
            for taker in self.all_takers:
                taker.follow_freezing()

    # ---- what the flow calls --------------------------------------------------------------------

    @property
    def is_present(self) -> bool:
        """Whether the whole unit is there, or on its way."""
        return self.state is UNSHARDED or self._gathering is not None

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
        if self.is_current and not self.is_replicated:
            self._gathering = []
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

    def finish_gather(self) -> None:
        """Wait until the whole unit is there and show it."""
        pending, self._gathering = self._gathering, None
        if pending is None:
            return
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
        if self.gradients.under_way:  # in the room that this one takes
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
        for taker in self.takers.get(index, ()):
            taker.accept(share, present)
        self.sharded.accept(index, share, present)

    def recover(self, *, failed: bool) -> None:
        """Be SHARDED; after a failed backward also without what it left of a gradient."""
        self._narrow = None if self._gathering is None else self._narrow
        if failed:
            self.gradients.drop()
        coming = self.is_current and self._gathering is not None and not failed
        changed = self.is_present and self.writes.is_changed
        if failed or changed or (self.reshard_after_backward and not coming):
            self.free()
        self._narrow = None
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

    def follow_gradient(self, place: int) -> None:
        """A backward has left the gradient of a bucket's tensor at ``place``."""
        if self.arrivals is not None and self.gradients.expected and self.arrivals.come(place):
            self.flow.reduce_complete()

    def check(self) -> None:
        """A forward begins: what must hold of the unit is checked, and of its parameters."""
        self._show_parallel()
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
    def all_takers(self) -> Iterator[Taker]:
        """The optimizers' flat tensors that have something of this unit."""
        for takers in self.takers.values():
            yield from takers

    def set_ahead(self, direction: str, units: Sequence[Unit]) -> None:
        """Gather ``units`` while this one computes, instead of those that came next last time."""
        self.ahead[direction] = [weakref.ref(unit) for unit in units]

    def _index(self, fqn: str) -> int:
        for index, member in enumerate(self.members):
            if fqn == member.fqn or fqn in member.aliases:
                return index
        names = ", ".join(self.param_infos)
        raise InputError(expected(f"unit '{self.name}'", f"one of {names}", f"'{fqn}'"))

    def shares_full_buffer(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` would point to freed memory once the unit is resharded."""
        return storage_of(tensor) == self.buffers.whole.place

    def on_meta(self) -> InputError:
        """What to say where memory is asked of a unit without any."""
        return on_meta(f"{self.members[0].fqn} of unit '{self.name}'")


def _own(member: Member) -> torch.Tensor:
    """The parameter, of what tensor parallelism has cut this rank's part."""
    return local_of(member.parameter.detach()) if member.parallel else member.parameter


def _value(parameter: torch.Tensor, fqn: str, initial: Initial | None) -> torch.Tensor:
    return parameter if initial is None else initial(fqn)
