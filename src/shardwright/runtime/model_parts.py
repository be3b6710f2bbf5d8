"""What this rank holds of a model, by the names of the unsharded one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.runtime.checkpoint.held import Held, whole
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.units.dstorage import DStorage, storages_in
from shardwright.runtime.units.parameter import plain_name
from shardwright.tracker.private import own_buffers

STATE = "optimizer/"  # what names of optimizer state begin with


class Part(NamedTuple):
    """This rank's part of a parameter, in the memory that the model computes with.

    ``held`` has its name in the model. ``parameter`` is what the module shows while sharded;
    ``slot`` its place in the layout of ``unit``, which is None for a parameter that every rank
    has whole and no unit keeps alike.
    """

    held: Held
    parameter: nn.Parameter
    unit: DStorage | None = None
    slot: int = 0

    @property
    def fqn(self) -> str:
        """Its name in the model; the first of several."""
        return self.held.name

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return self.held.tensor.numel()


def settle(model: nn.Module) -> list[DStorage]:
    """Every unit of the model, SHARDED, with the values its parameters have now (collective)."""
    units = list(storages_in(model))
    for unit in units:
        unit.free()
        unit.absorb()
        if unit.buffers.shard.is_meta:
            raise InputError(
                expected(
                    f"{unit.members[0].fqn} of unit '{unit.name}'",
                    "a real tensor",
                    "one on the meta device",
                    "Call to_empty(device=...) on the model first.",
                )
            )
    return units


def comm_of(model: nn.Module, mesh: DeviceMesh | None = None) -> Comm | None:
    """The ranks that have parts of ``model``; None: this process has all of it.

    Units and tables name their mesh. ``mesh`` is for models without any, and for those whose units
    are on different ones: all ranks together.
    """
    if mesh is not None:
        return Comm(mesh)
    found = [unit.comm for unit in storages_in(model)]
    found += [module.comm for module in model.modules() if isinstance(module, ShardedTables)]
    if any(comm.mesh != found[0].mesh for comm in found):
        raise InputError(
            expected("mesh", "one of all ranks, for units are on several", "none", "Pass mesh=...")
        )
    if found:
        return found[0]
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise InputError(
            expected(
                "mesh",
                "the ranks that have the model, which has no units to know them by",
                "none",
                "Pass mesh=... of all ranks, or of this one alone.",
            )
        )
    return None


def parts_of(model: nn.Module) -> list[Part]:
    """Every parameter of the model once, tied ones by their first name; units must be settled."""
    places = {
        id(member.parameter): (unit, index)
        for unit in storages_in(model)
        for index, member in enumerate(unit.members)
    }
    parts = []
    for name, parameter in model.named_parameters():
        place = places.get(id(parameter))
        name = plain_name(name)
        if place is None:
            _refuse_dtensor(name, parameter)
            parts.append(Part(whole(name, parameter.detach()), parameter))
            continue
        unit, index = place
        piece = unit.buffers.pieces[index]
        shape, local = piece.tensor.shape, unit.buffers.locals[index]
        held = Held(name, shape, piece.offsets, piece.sizes, local)
        parts.append(Part(held, parameter, unit, index))
    return parts


def holdings(model: nn.Module, parts: list[Part], *, leads: bool) -> list[Held]:
    """Parameters, tables with their row sums, and persistent buffers of the model.

    What no unit keeps alike on all ranks, buffers and parameters outside of units, is listed by the
    rank that ``leads``: that one's is saved. To load it every rank asks for it.
    """
    held = [part.held for part in parts if leads or part.unit is not None]
    for module in model.modules():
        if isinstance(module, ShardedTables):
            held.extend(_of_tables(module))
    if leads:
        held.extend(whole(name, buffer) for name, buffer in _buffers(model))
    return held


def row_sums(model: nn.Module) -> set[str]:
    """Names of the optimizer state that belongs to tables, and so to the model."""
    return {
        _row_sum(table.fqn)
        for module in model.modules()
        if isinstance(module, ShardedTables)
        for table in module.tables
    }


def _row_sum(fqn: str) -> str:
    return f"{STATE}{fqn}/sum"


def _of_tables(tables: ShardedTables) -> Iterator[Held]:
    shapes = {table.fqn: (table.rows, table.dim) for table in tables.tables}
    for store, item in tables.holdings():
        block = item.block
        shape = shapes[block.tensor]
        yield Held(block.tensor, shape, block.offsets, block.sizes, store.block_view(item))
        if store.state.numel():
            rows, sums = block.offsets[:1], store.state_view(item)
            yield Held(_row_sum(block.tensor), shape[:1], rows, block.sizes[:1], sums)


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dict has, each once."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, buffer in own_buffers(module).items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            fqn = plain_name(f"{path}.{name}" if path else name)
            _refuse_dtensor(fqn, buffer)
            yield fqn, buffer


def _refuse_dtensor(fqn: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise UnsupportedError(
            expected(
                fqn,
                "a plain tensor or a parameter of a unit",
                "a DTensor of someone else's",
                "Save it with torch.distributed.checkpoint.",
            )
        )
