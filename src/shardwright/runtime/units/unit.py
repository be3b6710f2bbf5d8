"""One sharded unit: its buffers, its states, and what the flow and the hooks call.

States are told by the bytes they own:

* ``SHARDED``: this rank's shard and, after a backward, its reduced gradient. The modules show
  sharded parameters, views of the shard.
* ``UNSHARDED``: in addition the whole parameters, which the modules show. During a backward also
  what autograd left of their gradients.

The shard of a replicated unit is the whole: it gathers nothing, and sums its gradient instead of
scattering it.
"""

from __future__ import annotations

import copy
import enum
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version

from shardwright.core.errors import InputError, expected
from shardwright.core.layout import UnitLayout, unit_layout
from shardwright.core.placement import Placement
from shardwright.runtime.comm import Comm, Pending
from shardwright.runtime.torch_private import set_version
from shardwright.runtime.units import replicas, writes
from shardwright.runtime.units.buffers import Buffers
from shardwright.runtime.units.cut import part_of
from shardwright.runtime.units.flow import Flow
from shardwright.runtime.units.gradients import Gradients
from shardwright.runtime.units.linked import (
    AtShard,
    Replica,
    follow_gradients,
    hooked_twice,
    inherit,
)
from shardwright.runtime.units.parameter import Member, infos_of
from shardwright.runtime.units.precision import MixedPrecision
from shardwright.runtime.units.rebind import find_moved, follow_objects, take_over
from shardwright.runtime.units.sharded_parameters import ShardedParameters
from shardwright.runtime.units.structure import Structure

Ahead = dict[str, "list[weakref.ref[Unit]] | None"]  # what a user wants gathered meanwhile
Initial = Callable[[str], torch.Tensor]
FULL_PRECISION = MixedPrecision()


class State(enum.Enum):
    """Which bytes a unit owns; see the module's text."""

    SHARDED = "sharded"
    UNSHARDED = "unsharded"


SHARDED, UNSHARDED = State.SHARDED, State.UNSHARDED


class Taker(Protocol):
    """An optimizer's flat tensor that has a stretch of a unit's shares."""

    def accept(self, share: torch.Tensor, present: Sequence[bool]) -> None:
        """Take its stretch of a segment's mean gradient, of tensors that have one."""
        ...

    def follow_freezing(self) -> None:
        """Parameters in it were frozen or unfrozen."""
        ...


class Unit:
    """One unit's buffers on this rank; ``DStorage`` is what users see of it."""

    def __init__(
        self,
        members: Sequence[Member],
        comm: Comm,
        placements: Mapping[str, Placement],
        flow: Flow,
        *,
        name: str,
        module_names: Sequence[str] = (),
        reshard_after_forward: bool | int | None = None,
        driven_by_hand: bool = False,
        precision: MixedPrecision = FULL_PRECISION,
        initial: Initial | None = None,
        ignored: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.module_names = tuple(module_names) or (name,)
        self.comm = comm
        self.mesh = comm.mesh
        self.precision = precision
        self.driven_by_hand = driven_by_hand
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.synchronise = True
        self.divisor: float | None = None  # of summed gradients; None: the number of ranks
        self.ahead: Ahead = {"forward": None, "backward": None}
        self.ignored = tuple(ignored)
        self.notes = tuple(notes)
        self.placements = dict(placements)
        self.state = State.SHARDED
        self.members = list(members)
        self.takers: dict[int, list[Taker]] = {}  # of segments' shares, besides the parameters
        self.structure = Structure()
        self.frozen = [m.fqn for m in members if not m.parameter.requires_grad]  # when sharded
        self.watched: tuple[int, int] | None = None  # versions, while a forward is under way
        self._is_alike = False  # whether replicas were seen to be equal since they got values
        self._gathering: list[Pending] | None = None
        self._narrow: torch.Tensor | None = None
        self._whole_version = 0  # of the whole unit's values, which autograd saves with a graph
        self._replica_version = 0
        sources = {member.fqn: member.parameter for member in members}
        meta = initial is None and any(p.is_meta for p in sources.values())
        device = torch.device("meta" if meta else comm.mesh.device_type)
        self.lay_out(device)
        self.fill(lambda name: _value(sources[name], name, initial))
        self.show_new()
        self.flow = flow
        self.number = flow.add(self)
        comm.prepare(self.layout.nbytes)

    def copy_of(self, other: Unit, memo: dict[int, Any]) -> None:
        """Be a copy of ``other``, of modules that are being copied: memory and flow are its own,
        the ranks the same. No optimizer has its parameters yet."""
        other.free()
        other.absorb()
        self.__dict__.update(other.__dict__)
        self.ahead = {"forward": None, "backward": None}
        self.placements = dict(other.placements)
        self.takers, self.structure, self.frozen = {}, Structure(), other.frozen
        self._gathering = self._narrow = None
        self.members = [member.copied(memo) for member in other.members]
        self.lay_out(other.buffers.shard.device)
        self.buffers.shard.copy_(other.buffers.shard)
        follow_objects(self)
        self.flow = copy.deepcopy(other.flow, memo)
        if other.is_root or not self.flow.has_units:
            self.flow.lead(self)
        self.number = self.flow.add(self)

    def enter(self, flow: Flow) -> None:
        """Share another flow from now on."""
        self.flow = flow
        self.number = flow.add(self)

    def rename(self, paths: Sequence[str]) -> None:
        """Be called by the paths of the unit's modules: ``layers.0-3`` for neighbours."""
        first, last = paths[0], paths[-1]
        parent, _, number = last.rpartition(".")
        alike = number.isdigit() and first.rpartition(".")[0] == parent
        self.module_names = tuple(paths)
        self.name = first if len(paths) == 1 else f"{first}-{number}" if alike else "+".join(paths)
        if len(paths) == 1:
            self.sharded.rename(first)

    # ---- construction ---------------------------------------------------------------------------

    def lay_out(self, device: torch.device, shard: torch.Tensor | None = None) -> None:
        """Buffers and views for the members as they are now; nothing is shown yet."""
        specs = [member.spec for member in self.members]
        layout = unit_layout(specs, self.placements, self.comm.size, self.frozen)
        order = {slot.tensor.fqn: index for index, slot in enumerate(layout.slots)}
        self.members.sort(key=lambda member: order[member.fqn])
        self.layout: UnitLayout = layout
        self._gathered_version = -1  # of the shard, when it was gathered last
        self.buffers = Buffers(layout, self.comm, device, self.precision, shard)
        self.keeps_whole = not self.buffers.whole.nbytes and all(
            views.segment.cut == "replicated" for views in self.buffers.segments
        )
        self.sharded = ShardedParameters(self.buffers, self.comm)
        self.param_infos = {i.fqn: i for i in infos_of(layout, self.comm.rank)}
        probe = self.comm.probe
        probe.holds(self.buffers.shard, "weight")
        probe.holds(self.buffers.whole.tensor, "gathered_weight")
        probe.holds(self.buffers.stage.tensor, "communication")

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
        for gradient in self.gradients.segments:
            self.comm.probe.holds(gradient.send.tensor, "reduce_scatter")
        buffers = self.buffers
        rows = list(zip(self.members, buffers.parameters, strict=True))
        for place, ((member, whole), apart) in enumerate(zip(rows, buffers.apart, strict=True)):
            memory = buffers.whole.storage if apart else None
            where = f"{member.fqn} of unit '{self.name}'"
            whole.home = AtShard(member.parameter, where, memory)
            follow_gradients(whole, weakref.ref(self))
            if isinstance(member.parameter, Replica):
                member.parameter.unit, member.parameter.place = weakref.ref(self), place
        self._places = [
            (shown, name, member.parameter, whole)
            for member, whole in rows
            for shown, name in member.places
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
        else:
            for shown, name, sharded, _ in self._places:
                shown[name] = sharded
        for reference, name, sharded, whole in self._setters:  # recurrent layers keep lists of them
            module = reference()
            if module is not None:
                setattr(module, name, whole if state is UNSHARDED else sharded)
        self.state = state

    def show_sharded(self) -> None:
        """Let every module have its sharded parameters, whatever the state."""
        state = self.state
        self.absorb()
        self._show(SHARDED)
        self.state = state

    def show_again(self) -> None:
        """After ``show_sharded``: the parameters of the state."""
        self._show(self.state)

    def _follow_freezing(self) -> None:
        """Full parameters train as the sharded ones do; users freeze whichever is shown."""
        if self.sharded.follow_freezing(self.buffers.parameters):
            for taker in self.all_takers:
                taker.follow_freezing()

    @property
    def is_root(self) -> bool:
        """Whether its forward is that of the whole model."""
        return self.flow.is_led_by(self)

    @property
    def reshards(self) -> bool:
        """Whether the whole unit goes after a forward that trains. Left open, it does unless it is
        the root of others, whose backward comes at once."""
        if self.keeps_whole:
            return True
        if self.reshard_after_forward is None:
            return not (self.is_root and self.flow.has_several)
        return self.reshard_after_forward is not False

    # ---- what the flow calls --------------------------------------------------------------------

    @property
    def is_present(self) -> bool:
        """Whether the whole unit is there, or on its way."""
        return self.state is UNSHARDED or self._gathering is not None

    @property
    def is_changed(self) -> bool:
        """Whether the shards were changed since they were gathered."""
        return self.buffers.shard._version != self._gathered_version

    @property
    def is_stale(self) -> bool:
        """Whether the whole unit is there, of shards that were changed since."""
        return self.is_present and self.is_changed

    @property
    def whole_is_written(self) -> bool:
        """Whether someone wrote a whole parameter since it was gathered."""
        return writes.versions(self) != (self._whole_version, self._replica_version)

    def forget_writes(self) -> None:
        """Let what was written to whole parameters go with them."""
        set_version(self.buffers.whole.tensor, self._whole_version)
        self._replica_version = self.buffers.replica._version

    def accept_writes(self) -> None:
        """The shards have what was written to whole parameters."""
        self._whole_version, self._replica_version = writes.versions(self)
        self._gathered_version = self.buffers.shard._version

    def start_gather(self) -> None:
        """Begin to gather (collective). Values that a graph has saved keep their version as long as
        the shards are what they were then; else autograd refuses its backward."""
        self._refuse_meta()
        label = f"{self.name} gather"
        if not self.keeps_whole:
            self.comm.remember(label)
        if self.is_changed:
            self._narrow = None
            self._gathered_version = self.buffers.shard._version
            self._whole_version = self.buffers.whole.tensor._version
            increment_version(self.buffers.replica)
        if self._narrow is not None:
            self._gathering = self._gather_narrow(label)
        else:
            self._gathering = self.buffers.start_gather(label)

    def finish_gather(self) -> None:
        """Wait until the whole unit is there and show it."""
        pending, self._gathering = self._gathering, None
        if pending is None:
            return
        if self._narrow is not None:
            for work in pending:
                work.wait()
            self._narrow = None
        else:
            self.buffers.finish_gather(pending)
        self.forget_writes()
        self._show(UNSHARDED)

    def _gather_narrow(self, label: str) -> list[Pending]:
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
        return self.comm.size if every else int(kind)

    def free(self, *, after_forward: bool = False) -> None:
        """Free the full parameters and show the sharded ones."""
        if not self.is_present:
            return
        self.finish_gather()
        if self.whole_is_written:
            writes.keep(self)
        if not after_forward:
            self._follow_freezing()
        if after_forward and self._ranks_after_forward != self.comm.size:
            near = self.comm.narrow(self._ranks_after_forward)
            self._narrow = self.buffers.whole.tensor.view(near.size, -1)[near.rank].clone()
            self.comm.probe.holds(self._narrow, "gathered_weight")
        self.buffers.whole.give()
        # Whatever a graph has saved of the unit is refused by autograd until the unit is there
        # again: reading it would end the process.
        self._whole_version = self.buffers.whole.tensor._version
        increment_version(self.buffers.whole.tensor)
        self._show(SHARDED)

    def start_reduce(self) -> None:
        """Begin to sum the gradient over ranks (collective)."""
        with self.comm.probe.phase("reduce"):
            self.gradients.start(self.name, self.divisor, self.flow.guard)

    def finish_reduce(self) -> None:
        """Hand this rank's mean gradient to its parameters, or to the optimizer's."""
        with self.comm.probe.phase("reduce"):
            self.gradients.finish(self._accept)

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
        if failed or self.reshard_after_backward or self.is_stale:
            self.free()
        self._narrow = None
        self.gradients.check()

    def settle(self) -> None:
        """After a backward: reduce what came later than its unit's reduce, or was held back by an
        earlier backward and not touched by this one."""
        if self.synchronise and not self.driven_by_hand and self.gradients.is_here:
            self.start_reduce()
            self.finish_reduce()

    # ---- what someone did to parameters ---------------------------------------------------------

    def absorb(self) -> None:
        """Take over what was done to the sharded parameters behind the unit's back.

        ``to``, ``to_empty``, ``p.data = x`` and assigning loads leave tensors that are no views of
        the shard. Their values are copied to new memory; what was here before is left as it is.
        """
        if self.state is UNSHARDED:
            if self.whole_is_written:
                writes.keep(self)
            return
        moved = find_moved(self)
        if moved:
            take_over(self, moved)
        self._follow_freezing()

    def watch(self) -> None:
        """A forward begins: what must hold of it is checked, and of its parameters."""
        self.watched = writes.versions(self)
        if torch.is_grad_enabled():
            self.structure.check(self.name)
        if not self._is_alike:
            self._is_alike = True
            replicas.check(self.name, self.buffers, self.comm)

    def take_stray(self, parameter: Replica, gradient: torch.Tensor) -> None:
        """A gradient of a use outside of the unit's forward: it is summed with the unit's."""
        if parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1:
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
        return bool(tensor.untyped_storage()._cdata == self.buffers.whole.storage._cdata)

    def changed(self) -> InputError:
        """What to say of a backward whose forward had other weights."""
        return InputError(
            expected(
                f"backward of unit '{self.name}'",
                "the weights of its forward",
                "weights that were changed in between",
                "Step the optimizer after the backward, or run the forward again.",
            )
        )

    def _refuse_meta(self) -> None:
        if self.buffers.shard.is_meta:
            self.absorb()
        if self.buffers.shard.is_meta:
            raise self.on_meta()

    def on_meta(self) -> InputError:
        """What to say where memory is asked of a unit without any."""
        return InputError(
            expected(
                f"{self.members[0].fqn} of unit '{self.name}'",
                "a real tensor",
                "one on the meta device",
                "Call to_empty(device=...) on the model, then give its parameters their values.",
            )
        )


def _value(parameter: nn.Parameter, fqn: str, initial: Initial | None) -> torch.Tensor:
    return initial(fqn) if parameter.is_meta and initial is not None else parameter
