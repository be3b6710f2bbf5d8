"""Taking over sharded parameters that were moved, cast or replaced behind their unit's back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.core.errors import InputError, expected
from shardwright.runtime.torch_private import local_of
from shardwright.runtime.units.buffers import Buffers, piece_of
from shardwright.runtime.units.precision import MixedPrecision

if TYPE_CHECKING:
    from shardwright.runtime.units.unit import Unit


@torch.no_grad()
def absorb_moved(unit: Unit, moved: list[int]) -> None:
    """Make the parameters at ``moved`` views of the shard again, with the values they have.

    A new device or dtype gets new buffers; a new dtype is a collective, for another alignment can
    move the cuts.
    """
    values = [_current(unit, index) for index in range(len(unit.members))]
    device = values[moved[0]].device
    if any(value.device != device for value in values):
        raise InputError(
            expected(
                f"parameters of unit '{unit.name}'",
                f"all of them on {device}",
                "some on another device",
                "Move the whole model at once.",
            )
        )
    cast = any(v.dtype != m.dtype for v, m in zip(values, unit.members, strict=True))
    if cast or device != unit.buffers.shard.device:
        _refuse_stale_optimizer(unit)
        _rebuild(unit, values, device, cast=cast)
        return
    for index in moved:
        local = unit.buffers.locals[index]
        if local.numel():
            local.copy_(values[index])
    _follow_objects(unit)


@torch.no_grad()
def relay(unit: Unit) -> None:
    """Lay the unit out anew, now that other parameters train than before (collective)."""
    values = list(unit.buffers.locals)
    _rebuild(unit, values, unit.buffers.shard.device, cast=True)


def _follow_objects(unit: Unit) -> None:
    """Go on with the parameters that the modules show, for those are what optimizers made from now
    on will hold, over the present buffers. A plain one in place of a DTensor cannot become one:
    there its values are kept and the DTensor is shown again."""
    for member in unit.members:
        shown, ours = member.shown(), member.parameter
        if not isinstance(ours, DTensor) or _is_like(shown, ours):
            member.parameter = shown
    kept = [member.parameter for member in unit.members]
    unit.faces.adopt(kept)
    unit._whole = kept if unit.keeps_whole else unit.buffers.parameters
    unit._finish_views()


def _is_like(shown: torch.Tensor, ours: DTensor) -> bool:
    return (
        isinstance(shown, DTensor)
        and shown.device_mesh == ours.device_mesh
        and shown.placements == ours.placements
        and shown.shape == ours.shape
    )


def _current(unit: Unit, index: int) -> torch.Tensor:
    """This rank's values of a parameter, wherever they are."""
    member = unit.members[index]
    shown = member.shown()
    if not isinstance(shown, nn.Parameter):
        raise InputError(
            expected(
                f"{member.fqn} of unit '{unit.name}'",
                "a parameter",
                "none: it was removed or put behind a parametrization",
                "Change modules before sharding them.",
            )
        )
    value = local_of(shown).detach()
    piece = unit.buffers.pieces[index]
    if value.shape == torch.Size(piece.sizes):
        return value
    if value.shape == member.shape:
        return piece_of(value, piece.offsets, piece.sizes)
    raise InputError(
        expected(
            f"{member.fqn} of unit '{unit.name}'",
            f"shape {tuple(piece.sizes)}, this rank's part, or {tuple(member.shape)}, the whole",
            str(tuple(value.shape)),
        )
    )


def _refuse_stale_optimizer(unit: Unit) -> None:
    if unit.sink is not None:
        raise InputError(
            expected(
                f"unit '{unit.name}'",
                "its dtype and device as when optimizer_parameters was called",
                "others",
                "Move the model first, then make the optimizer.",
            )
        )


def _rebuild(unit: Unit, values: list[torch.Tensor], device: torch.device, *, cast: bool) -> None:
    """New buffers on ``device``, in the dtypes of ``values``, with the same parameters."""
    whole: dict[str, torch.Tensor] = {}
    if cast and device.type != "meta":
        whole = _gathered(unit, values, device)
    for member, value in zip(unit.members, values, strict=True):
        member.dtype = value.dtype
    by_name = {member.fqn: value for member, value in zip(unit.members, values, strict=True)}
    unit._lay_out(device)
    if whole:
        unit._fill(whole)
    elif device.type != "meta":
        for member, local in zip(unit.members, unit.buffers.locals, strict=True):
            local.copy_(by_name[member.fqn])
    _follow_objects(unit)


def _gathered(
    unit: Unit, values: list[torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Every whole parameter in its new dtype, by way of the old layout (collective)."""
    old = Buffers(unit.layout, unit.comm, device, MixedPrecision())
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
    shard.copy_(unit.buffers.shard)
    unit._lay_out(shard.device, shard)
    _follow_objects(unit)
