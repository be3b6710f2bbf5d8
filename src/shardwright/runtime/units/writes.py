"""What someone wrote to the whole parameters of a unit: kept, or refused inside of its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwright.core.errors import InputError, expected
from shardwright.runtime.units.cut import part_of

if TYPE_CHECKING:
    from shardwright.runtime.units.unit import Unit


def versions(unit: Unit) -> tuple[int, int]:
    """Of the whole parameters, and of those that are where the shard is."""
    return unit.buffers.whole.tensor._version, unit.buffers.replica._version


@torch.no_grad()
def keep(unit: Unit) -> None:
    """Keep this rank's part of the whole parameters as they are now.

    Where they compute in another dtype, elements that nobody changed keep their precision.
    """
    if unit.is_changed:
        raise InputError(
            expected(
                f"parameters of unit '{unit.name}'",
                "either the sharded or the gathered ones to be written",
                "both, since they were gathered",
                "Write under torch.no_grad() before the forward or after the backward.",
            )
        )
    buffers = unit.buffers
    for local, piece, whole in zip(buffers.locals, buffers.pieces, buffers.parameters, strict=True):
        now = part_of(whole.detach(), piece.offsets, piece.sizes)
        if now.dtype is not local.dtype:
            now = torch.where(now == local.to(now.dtype), local, now.to(local.dtype))
        local.copy_(now)
    unit.accept_writes()


def refuse(unit: Unit) -> None:
    """The forward is over: raise if it wrote a parameter, for the write goes with the gathered
    copy, or is another on each replica."""
    was, unit.watched = unit.watched, None
    now = versions(unit)
    if was is None or now == was:
        return
    written = _written(unit, shard=now[1] != was[1])
    unit.forget_writes()
    unit.free()
    raise InputError(
        expected(
            f"forward of unit '{unit.name}'",
            "one that only reads its parameters",
            f"one that writes {', '.join(written) or 'one'} in place",
            "Keep what a forward changes in a buffer, leave the parameter out "
            "(ignored_params), or write inside storage.unsharded(write=True).",
        )
    )


def _written(unit: Unit, *, shard: bool) -> list[str]:
    """What was written, as far as this rank's part shows it; of replicas, all that may be."""
    buffers = unit.buffers
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
