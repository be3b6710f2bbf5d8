"""What several ranks hold alike: parameters that are not cut, and the replicas of a mesh."""

from __future__ import annotations

import torch

from shardwright.core.errors import MismatchError, expected
from shardwright.runtime.comm import Comm
from shardwright.runtime.units.buffers import Buffers

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differ(unit: str, buffers: Buffers, comm: Comm) -> bool:
    """Whether ranks that should have the same values do not (collective, if there are any)."""
    if comm.is_fake or buffers.shard.is_meta:
        return False
    for everywhere in (True, False):
        shares = _shares(buffers, comm, everywhere)
        label = f"{unit} replicas"
        if shares and comm.differs(label, _sums(shares), everywhere=everywhere):
            return True
    return False


def level(unit: str, buffers: Buffers, comm: Comm) -> None:
    """Give every replica the values of the first, as DDP does (collective)."""
    for everywhere in (True, False):
        for share in _shares(buffers, comm, everywhere):
            comm.broadcast_replicas(f"{unit} start", share, everywhere=everywhere)


def check(unit: str, buffers: Buffers, comm: Comm) -> None:
    """Raise MismatchError on every rank if replicas differ (collective)."""
    if differ(unit, buffers, comm):
        raise MismatchError(
            expected(
                f"replicas of unit '{unit}'",
                "the same values on every rank",
                "others on some",
                "Give them values with one seed, or load a state.",
            )
        )


def _shares(buffers: Buffers, comm: Comm, everywhere: bool) -> list[torch.Tensor]:
    """What every rank has alike, or what only replicas of the mesh have."""
    several = comm.total > 1 if everywhere else comm.replicas is not None
    return [
        views.share
        for views in buffers.segments
        if several and (views.segment.cut == "replicated") is everywhere and views.share.numel()
    ]


def _sums(shares: list[torch.Tensor]) -> torch.Tensor:
    """A number for the bits of each."""
    reals = [torch.view_as_real(s) if s.is_complex() else s for s in shares]
    return torch.stack([r.detach().view(_BITS[r.element_size()]).sum() for r in reals])
