"""What several ranks hold alike: parameters that are not cut, the replicas of a mesh, and before
parameters are cut all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardwright.core.errors import MismatchError, expected
from shardwright.runtime.comm import Comm
from shardwright.runtime.torch_private import local_of
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
        where = f"replicas of unit '{unit}'"
        remedy = "Give them values with one seed, or load a state."
        raise MismatchError(where, "the same values on every rank", "others on some", remedy)


def agree(what: str, comm: Comm, facts: Mapping[str, str], cut: Mapping[str, torch.Tensor]) -> None:
    """MismatchError on every rank that differs in ``facts`` (collective); a line on the first one
    where ranks have other values of the parameters that are about to be ``cut``: each would keep a
    part of another initialisation. Three elements of each tell."""
    own = torch.zeros(0, dtype=torch.int64) if comm.is_fake else _sample([*cut.values()])
    if comm.agree(what, facts, str(own.tolist())):
        return
    own = own.to(comm.mesh.device_type)
    every = own.new_empty(comm.shards.size * len(own))
    comm.shards.all_gather(f"{what}: values", every, own)
    differs = (every.view(-1, len(own)) != own).any(0).nonzero()
    if len(differs) and (comm.mesh.ndim == 1 or comm.mesh.get_local_rank(0) == 0):
        wanted = "the same values on every rank, of which each keeps a part"
        remedy = "Call torch.manual_seed(N) before the model is built, or load its values after."
        text = expected([*cut][int(differs[0])], wanted, "others on some", remedy)
        comm.shards.tell("values apart", f"{what}: {text}")


def _sample(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number for the bits of three elements of each [N] int64, on the host; 0 on meta."""
    found = torch.zeros(len(tensors), dtype=torch.int64, device="cpu")
    there, elements = [], []
    for number, each in enumerate(tensors):
        tensor = local_of(each.detach())
        if tensor.numel() and not tensor.is_meta and tensor.layout == torch.strided:
            there.append(number)
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            for place in (0, 0.5, 1):  # in any layout without a copy
                at = tuple(int((n - 1) * place) for n in tensor.shape)
                elements.append(tensor[at].double().view(1))
    if there:
        bits = torch.cat([each.to(elements[0].device) for each in elements]).view(torch.int64)
        # Different factors tell apart the same elements in another order.
        found[there] = bits.view(-1, 3).mul(bits.new_tensor([1, 3, 5])).sum(1).cpu()
    return found


def _shares(buffers: Buffers, comm: Comm, everywhere: bool) -> list[torch.Tensor]:
    """What every rank has alike, or what only replicas of the mesh have."""
    several = comm.total > 1 if everywhere else comm.sums_in_two
    return [
        views.share
        for views in buffers.segments
        if several and (views.segment.cut == "replicated") is everywhere and views.share.numel()
    ]


def _sums(shares: list[torch.Tensor]) -> torch.Tensor:
    """A number for the bits of each."""
    # Sums of bits and not of values: a NaN equals itself so, and integers do not round.
    reals = [torch.view_as_real(s) if s.is_complex() else s for s in shares]
    return torch.stack([r.detach().view(_BITS[r.element_size()]).sum() for r in reals])
