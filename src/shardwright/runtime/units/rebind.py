"""Taking over sharded parameters that were moved, cast or replaced behind their unit's back."""

# ``model.to(...)``, ``p.data = x``, assigning loads and ``to_empty`` put other tensors in the place
# of parameters and tell nobody. What computes is the shard, so a unit that did not look would go on
# with values that a user believes to be replaced. It looks when a forward of the model begins and
# before anything is saved or shown, by comparing what modules show with what it gave them: objects
# and addresses, no values.

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.core.errors import InputError
from shardwright.runtime.torch_private import address_of, local_of
from shardwright.runtime.units.buffers import Buffers
from shardwright.runtime.units.cut import part_of
from shardwright.runtime.units.cutting import FULL_PRECISION
from shardwright.runtime.units.parameter import Member
from shardwright.runtime.units.shard_tensor import OPERATORS, ShardTensor
from shardwright.runtime.units.unit import UNSHARDED, Unit


def absorb(unit: Unit) -> None:
    """Take over what was done to parameters behind the unit's back.

    ``to``, ``to_empty``, ``p.data = x`` and assigning loads leave tensors that are no views of
    the shard. Their values are copied to new memory; what was here before is left as it is.
    """
    if unit.state is UNSHARDED:
        if unit.writes.whole_is_written:
            unit.writes.keep(unit.name)
        return
    moved = [
        index
        for index, shown, name, parameter, local in unit.showing.expected
        if name not in shown
        or shown[name] is not parameter
        # first what holds of nearly all, with no call: this is done for every parameter and step
        or (
            (type(parameter) is not ShardTensor or parameter._local_tensor is not local)
            and _is_moved(parameter, local)
        )
    ]
    if moved:
        _take_over(unit, moved)
    unit.follow_freezing()


def _is_moved(parameter: nn.Parameter, local: torch.Tensor) -> bool:
    if isinstance(parameter, ShardTensor):
        return parameter._local_tensor is not local
    return (
        address_of(parameter) != address_of(local)
        or parameter.dtype is not local.dtype
        or parameter.device != local.device
    )


@torch.inference_mode(False)
@torch.no_grad()
def _take_over(unit: Unit, moved: list[int]) -> None:
    """Give the unit new memory with the values that its parameters have now.

    A new dtype is a collective, for another alignment can move the cuts.
    """
    # Outside of inference mode, in which the unit's new memory would have no version counter, and
    # nothing could train with it.
    tied = _tied(unit, moved)
    values = [_current(unit, index) for index in range(len(unit.members))]
    device = values[moved[0]].device
    if any(value.device != device for value in values):
        where, wanted = f"parameters of unit '{unit.name}'", f"all of them on {device}"
        raise InputError(where, wanted, "some on another device", "Move the whole model at once.")
    # The optimizer's flat tensors are views of the memory that would be left behind.
    if unit.flat_parts:
        raise InputError(
            f"unit '{unit.name}'",
            "its memory, dtype and device as when optimizer_parameters was called",
            f"another {unit.members[moved[0]].fqn}",
            "Move or replace parameters first, then make the optimizer; copy_ keeps memory.",
        )
    if unit.offloaded and device.type not in ("cpu", "meta"):
        raise InputError(
            f"parameters of unit '{unit.name}'",
            "to stay in host memory, where cpu_offload keeps them",
            f"parameters on {device}",
            "Leave the model where it is (to_empty(device='cpu') if it is on meta), or leave "
            "cpu_offload out.",
        )
    cast = any(v.dtype != m.dtype for v, m in zip(values, unit.members, strict=True))
    _rebuild(unit, values, device, tied=tied, cast=cast or bool(tied))


def _tied(unit: Unit, moved: list[int]) -> dict[int, int]:
    """Members that now show another member's parameter: which shows whose."""
    owners = {id(member.parameter): index for index, member in enumerate(unit.members)}
    found = {}
    for index in moved:
        owner = owners.get(id(unit.members[index].shown()))
        if owner is not None and owner != index:
            found[index] = owner
    return found


def _current(unit: Unit, index: int) -> torch.Tensor:
    """This rank's values of a parameter, wherever they are."""
    member, piece = unit.members[index], unit.buffers.pieces[index]
    where = f"{member.fqn} of unit '{unit.name}'"
    shown = member.shown()
    if not isinstance(shown, nn.Parameter):
        found = "none: it was removed or put behind a parametrization"
        raise InputError(where, "a parameter", found, "Change modules before sharding them.")
    cut = unit.sharded.cuts[index]
    shape = member.shape if cut is None else cut.shape
    if shown.shape != shape:
        wanted = f"shape {tuple(shape)}, as when it was sharded"
        raise InputError(where, wanted, f"{tuple(shown.shape)}")
    if cut is None:
        return part_of(local_of(shown).detach(), piece.offsets, piece.sizes)
    if not isinstance(shown, DTensor):
        raise InputError(
            where,
            "the sharded parameter",
            "another, whole one in its place, which nothing would shard or reduce",
            "Copy values (p.copy_(whole) under no_grad), or replace it before sharding.",
        )
    return OPERATORS.as_part(shown.detach(), cut)._local_tensor


def _rebuild(
    unit: Unit,
    values: list[torch.Tensor],
    device: torch.device,
    *,
    tied: dict[int, int],
    cast: bool,
) -> None:
    """New buffers on ``device``, in the dtypes of ``values``, with what modules show."""
    whole: dict[str, torch.Tensor] = {}
    if cast and device.type != "meta":
        whole = _gathered(unit, values, device)
    by_name = {m.fqn: value for m, value in zip(unit.members, values, strict=True)}
    for member, value in zip(unit.members, values, strict=True):
        member.dtype = value.dtype
        # The object that is shown stays, for optimizers and users hold it.
        member.parameter = member.shown()
    for index, owner in tied.items():
        _join(unit.members[owner], unit.members[index])
    unit.members = [m for index, m in enumerate(unit.members) if index not in tied]
    unit.lay_out(device)
    if whole:
        unit.fill(whole.__getitem__)
    elif device.type != "meta":
        for member, local in zip(unit.members, unit.buffers.locals, strict=True):
            local.copy_(by_name[member.fqn])
    follow_objects(unit)


def _join(member: Member, other: Member) -> None:
    """Let ``member`` be shown where ``other`` is, too."""
    member.aliases.extend([other.fqn, *other.aliases])
    member.places.extend(other.places)
    member.setters.extend(other.setters)


def follow_objects(unit: Unit) -> None:
    """Go on with the parameters that the members have, over the present buffers."""
    for member, cut in zip(unit.members, unit.sharded.cuts, strict=True):
        parameter = member.parameter
        if cut is not None and not isinstance(parameter, ShardTensor):
            OPERATORS.cut_again(parameter, cut)  # torch's, of an assigning load
    unit.sharded.adopt([member.parameter for member in unit.members])
    unit.finish_views()


def _gathered(
    unit: Unit, values: list[torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Every whole parameter in its new dtype, by way of the old layout (collective)."""
    near, offloaded = unit.near(device), unit.offloaded
    # Without the unit's precision: a gather in the dtype of computing would round what is kept.
    old = Buffers(unit.layout, unit.comm, near, FULL_PRECISION, offloaded=offloaded)
    for local, value in zip(old.locals, values, strict=True):
        local.copy_(value)
    old.finish_gather(old.start_gather(f"{unit.name} cast"))
    names = [member.fqn for member in unit.members]
    dtypes = {name: value.dtype for name, value in zip(names, values, strict=True)}
    return {
        name: parameter.detach().to(dtypes[name])
        for name, parameter in zip(names, old.parameters, strict=True)
    }


@torch.no_grad()
def rebase(unit: Unit, shard: torch.Tensor) -> None:
    """Let ``shard``, of as many bytes, be the unit's memory from now on, with its values."""
    # Before the layout is made, which drops the old memory.
    shard.copy_(unit.buffers.shard)
    unit.lay_out(shard.device, shard)
    follow_objects(unit)


def start_gather(unit: Unit) -> None:
    """Begin to gather (collective), a unit that was on the meta device with its new memory."""
    if unit.buffers.shard.is_meta:
        absorb(unit)
    unit.start_gather()


def copied(unit: Unit, memo: dict[int, Any]) -> Unit:
    """``unit`` of modules that are being copied, driven by nobody yet: its memory is its own, the
    ranks are the same. No optimizer has its parameters."""
    # Not by __init__, which takes values from modules and has collectives; a copy needs neither.
    made = memo[id(unit)] = object.__new__(Unit)
    # So that modules show what is to be copied, the sharded parameters.
    unit.free()
    absorb(unit)
    made.__dict__.update(unit.__dict__)
    made.forget_users()
    made.members = [member.copied(memo) for member in unit.members]
    made.lay_out(unit.buffers.shard.device)
    made.buffers.shard.copy_(unit.buffers.shard)
    follow_objects(made)
    return made
