"""One sharded unit: its buffers, its states, and what the flow and the hooks call.

States are told by the bytes they own:

* ``SHARDED``: this rank's shard and, after a backward, its reduced gradient. The modules show
  sharded parameters, views of the shard.
* ``UNSHARDED``: in addition the whole parameters, which the modules show. During a backward also
  the whole unreduced gradient.

A replicated unit is always UNSHARDED: its shard is the whole, it gathers nothing, and sums its
gradient instead of scattering it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from shardwright.core.errors import InputError, expected
from shardwright.core.layout import UnitLayout, unit_layout
from shardwright.core.placement import Flat, Placement
from shardwright.runtime.comm import Comm, Pending
from shardwright.runtime.torch_private import address_of, local_of
from shardwright.runtime.units.buffers import Buffers, piece_of
from shardwright.runtime.units.faces import Faces
from shardwright.runtime.units.flow import Flow
from shardwright.runtime.units.gradients import Gradients, Sink
from shardwright.runtime.units.parameter import DTYPES, Member, ParamInfo
from shardwright.runtime.units.precision import MixedPrecision

Initial = Callable[[str], torch.Tensor]
FULL_PRECISION = MixedPrecision()


class State(enum.Enum):
    """Which bytes a unit owns; see the module's text."""

    SHARDED = "sharded"
    UNSHARDED = "unsharded"


SHARDED, UNSHARDED = State.SHARDED, State.UNSHARDED


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
        reshard_after_forward: bool | int = True,
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
        self.ignored = tuple(ignored)
        self.notes = tuple(notes)
        self.placements = dict(placements)
        self.state = State.SHARDED
        self.members = list(members)
        self.sink: Sink | None = None
        self._gathering: list[Pending] | None = None
        self._narrow: torch.Tensor | None = None
        sources = {member.fqn: member.parameter for member in members}
        meta = initial is None and any(p.is_meta for p in sources.values())
        device = torch.device("meta" if meta else comm.mesh.device_type)
        self._lay_out(device)
        self._fill({name: _value(p, name, initial) for name, p in sources.items()})
        self._show_new()
        self.flow = flow
        self.number = flow.add(self)
        comm.prepare(self.layout.nbytes)

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

    # ---- construction ---------------------------------------------------------------------------

    def _lay_out(self, device: torch.device, shard: torch.Tensor | None = None) -> None:
        """Buffers and views for the members as they are now; nothing is shown yet."""
        specs = [member.spec for member in self.members]
        frozen = [m.fqn for m in self.members if not m.parameter.requires_grad]
        layout = unit_layout(specs, self.placements, self.comm.size, frozen)
        order = {slot.tensor.fqn: index for index, slot in enumerate(layout.slots)}
        self.members.sort(key=lambda member: order[member.fqn])
        self.layout: UnitLayout = layout
        self.buffers = Buffers(layout, self.comm, device, self.precision, shard)
        self.keeps_whole = not self.buffers.whole.nbytes and all(
            views.segment.cut == "replicated" for views in self.buffers.segments
        )
        self.faces = Faces(self.buffers, self.comm, plain=self.keeps_whole)
        self.param_infos = {info.fqn: info for info in self._infos()}
        probe = self.comm.probe
        probe.holds(self.buffers.shard, "weight")
        probe.holds(self.buffers.whole.tensor, "gathered_weight")
        probe.holds(self.buffers.stage.tensor, "communication")

    def _infos(self) -> Iterator[ParamInfo]:
        for views in self.buffers.segments:
            segment = views.segment
            for slot in segment.slots:
                piece = segment.piece(slot, self.comm.rank)
                size = DTYPES[segment.dtype].itemsize
                yield ParamInfo(
                    slot.tensor.fqn,
                    torch.Size(slot.tensor.shape),
                    torch.Size(piece.sizes),
                    DTYPES[segment.dtype],
                    (slot.placement,),
                    piece.shard_offset,
                    segment.offset + slot.start * size,
                    segment.trainable,
                )

    def _fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep this rank's piece of every whole value."""
        for local, piece in zip(self.buffers.locals, self.buffers.pieces, strict=True):
            value = values[piece.tensor.fqn]
            if not value.is_meta:
                local.copy_(piece_of(value.detach(), piece.offsets, piece.sizes))

    def _show_new(self) -> None:
        """Parameters for users, and whole ones for computing, over the present buffers."""
        self._whole = self.buffers.parameters
        if self.keeps_whole:
            self.faces.parameters = _by_segment(self._whole, self.layout)
            local = self._whole
        else:
            local = self.faces.make()
        for member, parameter in zip(self.members, local, strict=True):
            member.parameter = parameter
        self._finish_views()

    def _finish_views(self) -> None:
        self.gradients = Gradients(self.buffers, self._whole, self.comm)
        self.comm.probe.holds(self.gradients.buffer.tensor, "unreduced_gradient")
        rows = list(zip(self.members, self._whole, strict=True))
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
        self._expected = [
            (*member.places[0], member.parameter, address_of(local))
            for member, local in zip(self.members, self.buffers.locals, strict=True)
        ]
        self._show(UNSHARDED if self.keeps_whole else SHARDED)

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

    def _follow_freezing(self) -> None:
        """Full parameters train as the sharded ones do, which users freeze and unfreeze."""
        for member, whole in zip(self.members, self._whole, strict=True):
            wanted = member.parameter.requires_grad
            if whole.requires_grad is wanted:
                continue
            if wanted and not self.param_infos[member.fqn].requires_grad:
                self._make_trainable(member.fqn)
                return
            whole.requires_grad_(wanted)

    def _make_trainable(self, fqn: str) -> None:
        """Give parameters that were frozen a place among those that have gradients (collective)."""
        if self.sink is not None or Flat() in self.placements.values():
            raise InputError(
                expected(
                    f"{fqn} of unit '{self.name}'",
                    "requires_grad as when it was sharded",
                    "a frozen parameter that is to train",
                    "Unfreeze parameters before sharding: flat shards would move.",
                )
            )
        from shardwright.runtime.units.moved import relay

        relay(self)
        self._follow_freezing()

    # ---- what the flow calls --------------------------------------------------------------------

    @property
    def is_present(self) -> bool:
        """Whether the whole unit is there, or on its way."""
        return self.state is UNSHARDED or self._gathering is not None

    def start_gather(self) -> None:
        """Begin to gather (collective)."""
        self._refuse_meta()
        label = f"{self.name} gather"
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
        return self.comm.size if isinstance(kind, bool) else kind

    def free(self, *, after_forward: bool = False) -> None:
        """Free the full parameters and show the sharded ones; nothing for a replicated unit."""
        if self.keeps_whole or not self.is_present:
            return
        self.finish_gather()
        if after_forward and self._ranks_after_forward != self.comm.size:
            near = self.comm.narrow(self._ranks_after_forward)
            self._narrow = self.buffers.whole.tensor.view(near.size, -1)[near.rank].clone()
            self.comm.probe.holds(self._narrow, "gathered_weight")
        self.buffers.whole.give()
        self._show(SHARDED)

    def prepare_gradient(self) -> None:
        """Have room for the gradient of every full parameter, zeroed."""
        self.gradients.prepare()

    def keep_gradient(self) -> None:
        """Hold the gradient of this backward, unreduced."""
        self.gradients.keep()

    def start_reduce(self) -> None:
        """Begin to sum the gradient over ranks (collective)."""
        with self.comm.probe.phase("reduce"):
            self.gradients.start(f"{self.name} reduce", self.sink or self.faces)

    def finish_reduce(self) -> None:
        """Hand this rank's mean gradient to its parameters, or to the optimizer's."""
        with self.comm.probe.phase("reduce"):
            self.gradients.finish(self.sink or self.faces)

    def recover(self, *, failed: bool) -> None:
        """Be SHARDED; after a failed backward also without what it left of a gradient."""
        self._narrow = None if self._gathering is None else self._narrow
        if failed:
            if self.gradients.was_cleared and self.sink is None:
                for parameter in self.faces.all:
                    parameter.grad = None
            self.gradients.drop()
        self.free()
        self._narrow = None

    def settle(self) -> None:
        """After a backward: reduce what came later than its unit's reduce, or was held back by an
        earlier backward and not touched by this one."""
        late = []
        if not self.gradients.is_live and not self.keeps_whole:
            late = [(p, v, p.grad) for p, v in self.gradients.rows if p.grad is not None]
        waits = self.flow.synchronise and not self.driven_by_hand and self.gradients.waits
        if not (late or waits):
            return
        for parameter, _, _ in late:
            parameter.grad = None
        self.prepare_gradient()
        for _, view, gradient in late:
            view.copy_(gradient.detach())
        self.start_reduce()
        self.finish_reduce()

    # ---- parameters that someone moved or replaced ----------------------------------------------

    def absorb(self) -> None:
        """Take over what was done to the sharded parameters behind the unit's back.

        ``to``, ``to_empty``, assigning loads and replaced parameters leave tensors that are no
        views of the shard. Their values are copied back; another dtype or device gets new buffers.
        A parameter that was put in place of another one stays there, unless it is a plain tensor
        where a DTensor is shown.
        """
        if self.state is UNSHARDED and not self.keeps_whole:
            return
        moved = [
            index
            for index, (shown, name, parameter, address) in enumerate(self._expected)
            if shown.get(name) is not parameter
            or address_of(local_of(parameter)) != address
            or (not address and _is_elsewhere(parameter, self.buffers.locals[index]))
        ]
        if moved:
            from shardwright.runtime.units.moved import absorb_moved

            absorb_moved(self, moved)
        self._follow_freezing()

    # ---- small things ---------------------------------------------------------------------------

    def _index(self, fqn: str) -> int:
        for index, member in enumerate(self.members):
            if fqn == member.fqn or fqn in member.aliases:
                return index
        names = ", ".join(self.param_infos)
        raise InputError(expected(f"unit '{self.name}'", f"one of {names}", f"'{fqn}'"))

    def shares_full_buffer(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` would point to freed memory once the unit is resharded."""
        if self.keeps_whole:
            return False
        return bool(tensor.untyped_storage()._cdata == self.buffers.whole.storage._cdata)

    def _refuse_meta(self) -> None:
        if self.buffers.shard.is_meta:
            self.absorb()
        if self.buffers.shard.is_meta:
            raise self._on_meta()

    def _on_meta(self) -> InputError:
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


def _by_segment(parameters: list[nn.Parameter], layout: UnitLayout) -> list[list[nn.Parameter]]:
    rest = iter(parameters)
    return [[next(rest) for _ in segment.slots] for segment in layout.segments]


def _is_elsewhere(parameter: nn.Parameter, local: torch.Tensor) -> bool:
    """Whether a parameter without an address here was moved or cast."""
    found = local_of(parameter)
    return found.dtype is not local.dtype or found.device != local.device
