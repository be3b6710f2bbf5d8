"""A sharded model's state by the names of the unsharded one: what is kept, saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.core.layout import unit_layout
from shardwright.core.placement import Flat, Shard
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.units.buffers import piece_of
from shardwright.runtime.units.dstorage import DStorage
from shardwright.runtime.units.dtensors import as_dtensor, is_explained
from shardwright.runtime.units.registry import storages_in


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole, by its unsharded name, on every rank (collective).

    For export, evaluation and tests; ``model.state_dict()`` shows what this rank keeps.

    Each rank needs room for the whole model at once.
    """
    found: dict[str, torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, ShardedTables):
            found.update(_whole_tables(module))
    for storage in storages_in(model):
        found.update(_named(model, storage, _wholes(storage, storage.all_gather())))
    for name, parameter in model.named_parameters():
        if name not in found:
            found[name] = parameter.detach().clone()
    return found


def _named(
    model: nn.Module, storage: DStorage, wholes: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A unit's whole tensors by the names that ``model`` has for them."""
    shown = {id(m.shown()): m.fqn for m in storage.members}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in shown:
            yield name, wholes[shown[id(parameter)]]


def _wholes(storage: DStorage, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every tensor of a unit, out of its unsharded bytes."""
    found = {}
    for info in storage.param_infos.values():
        start = info.unsharded_byte_offset
        size = info.global_shape.numel() * info.dtype.itemsize
        part = flat[start : start + size].view(info.dtype)
        found[info.fqn] = part.view(info.global_shape).clone()
    return found


def _whole_tables(tables: ShardedTables) -> dict[str, torch.Tensor]:
    """Blocks are disjoint, so the sum over ranks of what each holds is the table."""
    whole = {
        table.fqn: torch.zeros(table.rows, table.dim, device=tables.device)
        for table in tables.tables
    }
    for store, held in tables.holdings():
        (row, column), (rows, columns) = held.block.offsets, held.block.sizes
        target = whole[held.block.tensor][row : row + rows, column : column + columns]
        target.copy_(store.block_view(held))
    replicated = {held.block.tensor for held in tables.replicas.held}
    for fqn, table in whole.items():
        if fqn not in replicated:
            tables.comm.all_reduce(f"gather {fqn}", table)
    return whole


# ---- state_dict and load_state_dict -------------------------------------------------------------


def follow_state_dict(module: nn.Module, storage: DStorage, prefix: str) -> None:
    """Let ``module.state_dict()`` give DTensors by unsharded names, and ``load_state_dict`` take
    whole tensors and DTensors of any mesh and placement.

    A unit under a flat cut is gathered for it, so every rank must call. ``prefix`` is what the
    unit's names have before the module's.
    """
    module.register_state_dict_post_hook(_Saving(storage, prefix))
    module.register_load_state_dict_pre_hook(_Loading(storage, prefix))
    module.register_load_state_dict_post_hook(_Loaded(storage))


class _Names:
    """The keys of a unit's parameters in a module's state dict."""

    def __init__(self, storage: DStorage, prefix: str) -> None:
        self.storage = storage
        self.start = f"{prefix}." if prefix else ""

    def keys(self, prefix: str) -> Iterator[tuple[int, str]]:
        """(index of a member, key) for every name it has in this module."""
        for index, member in enumerate(self.storage.members):
            for name in (member.fqn, *member.aliases):
                if name.startswith(self.start):
                    yield index, prefix + name.removeprefix(self.start)


class _Saving(_Names):
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        storage = self.storage
        if storage.keeps_whole:
            return
        keys = [(index, key) for index, key in self.keys(prefix) if key in state]
        if keys:
            made = sharded_tensors(storage)
            for index, key in keys:
                state[key] = made[storage.members[index].fqn]


def sharded_tensors(storage: DStorage) -> dict[str, torch.Tensor]:
    """Every parameter of a unit as a DTensor (collective under a flat cut)."""
    storage.absorb()
    found: dict[str, torch.Tensor] = {}
    flat = [m.fqn for m in storage.members if storage.placements[m.fqn] == Flat()]
    wholes = _wholes(storage, storage.all_gather()) if flat else {}
    faces = [face for faces in storage.faces.faces for face in faces]
    for member, face, local in zip(storage.members, faces, storage.buffers.locals, strict=True):
        if member.fqn in wholes:
            found[member.fqn] = in_chunks(storage, wholes[member.fqn], member.fqn)
        else:
            found[member.fqn] = face.wrap(local.detach())
    return found


def in_chunks(storage: DStorage, whole: torch.Tensor, fqn: str) -> torch.Tensor:
    """A whole tensor, the same on every rank, as the DTensor that torch would cut by rows."""
    comm = storage.comm
    spec = next(m for m in storage.members if m.fqn == fqn).spec
    layout = unit_layout((spec,), Shard(0), comm.size)
    (piece,), (slot,) = layout.pieces(comm.rank), layout.slots
    local = piece_of(whole, piece.offsets, piece.sizes).clone()
    return as_dtensor(local, slot.placement, piece, comm.mesh, lambda tensor: tensor)


class _Loading(_Names):
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        storage = self.storage
        storage.free()
        storage.absorb()
        faces = [face for faces in storage.faces.faces for face in faces]
        for index, key in self.keys(prefix):
            given = state.get(key)
            if not isinstance(given, torch.Tensor):
                continue
            shown = storage.members[index].parameter
            if isinstance(given, DTensor):
                if alike(given, shown, storage.comm):
                    continue
                given = given.full_tensor()
            if given.shape != storage.members[index].shape:
                continue  # torch tells the shapes, or it is this rank's part
            if storage.keeps_whole:
                state[key] = given
                continue
            piece = storage.buffers.pieces[index]
            part = piece_of(given, piece.offsets, piece.sizes).contiguous()
            shard = storage.buffers.shard
            device = storage.mesh.device_type if shard.is_meta else shard.device
            state[key] = faces[index].wrap(part.to(device))


class _Loaded:
    """What an assigning load put in place of the parameters becomes their values."""

    def __init__(self, storage: DStorage) -> None:
        self.storage = storage

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        self.storage.absorb()


def alike(given: DTensor, shown: torch.Tensor, comm: Comm) -> bool:
    """Whether ``given`` can be copied into ``shown`` rank by rank, the same answer on every rank.

    Where placements do not tell how tensors are cut the ranks compare (collective).
    """
    if (
        not isinstance(shown, DTensor)
        or given.device_mesh != shown.device_mesh
        or given.placements != shown.placements
        or given.shape != shown.shape
    ):
        return False
    differs = given.to_local().shape != shown.to_local().shape
    if not (is_explained(given) or is_explained(shown)):
        return not differs
    ranks = torch.tensor([int(differs)], device=comm.mesh.device_type)
    comm.all_reduce("ranks where a tensor is cut in another way", ranks)
    return not ranks.item()
