"""A sharded model's state by the names of the unsharded one: what is kept, saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import check_type
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.model_parts import tables_in
from shardwright.runtime.units.dstorage import DStorage, units_in
from shardwright.runtime.units.parameter import DTYPES, plain_name
from shardwright.runtime.units.rebind import absorb
from shardwright.runtime.units.shard_tensor import OPERATORS
from shardwright.runtime.units.unit import Unit


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer whole, by its name in the unsharded model, on every
    rank (collective).

    For export, evaluation and tests; ``model.state_dict()`` shows what this rank keeps. Each rank
    needs room for the whole model at once. Recomputation and compilation wrappers are not part of
    names, so it loads into the model without them. As in a ``state_dict``, what is tied has all of
    its names, which share one tensor, and names are in the order of the model's.
    """
    check_type(model, nn.Module, "model")
    found: dict[str, torch.Tensor] = {}
    for tables in tables_in(model):
        with tables.comm.asked_of_all("sw.full_state_dict"):
            found.update(_whole_tables(tables))
    for unit in units_in(model):
        with unit.comm.asked_of_all("sw.full_state_dict"):
            gathered = DStorage(unit).all_gather()
        wholes = _wholes(unit, gathered)
        rows = zip(wholes, unit.sharded.cuts, unit.buffers.locals, strict=True)
        wholes |= {n: cut.whole(part) for n, cut, part in rows if cut and n in unit.joints}
        found.update(_named(model, unit, wholes))
    state = {plain_name(n): each for n, each in model.state_dict(keep_vars=True).items()}
    copies: dict[int, torch.Tensor] = {}
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and name not in found:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
            found[name] = copies[id(tensor)]
    return {name: found[name] for name in [*filter(found.__contains__, state), *found]}


def _named(
    model: nn.Module, unit: Unit, wholes: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A unit's whole tensors by the names that ``model`` has for them."""
    shown = {id(m.shown()): m.fqn for m in unit.members}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in shown:
            yield plain_name(name), wholes[shown[id(parameter)]]


def _wholes(unit: Unit, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every tensor of a unit, out of its unsharded bytes."""
    found = {}
    for info in unit.param_infos.values():
        start = info.unsharded_byte_offset
        size = info.global_shape.numel() * info.dtype.itemsize
        part = flat[start : start + size].view(info.dtype)
        found[info.fqn] = part.view(info.global_shape).clone()
    return found


def _whole_tables(tables: ShardedTables) -> dict[str, torch.Tensor]:
    """Blocks are disjoint, so the sum over ranks of what each holds is the table."""
    whole = {
        table.fqn: torch.zeros(
            table.rows, table.dim, dtype=DTYPES[table.dtype], device=tables.device
        )
        for table in tables.tables
    }
    for store, held in tables.holdings():
        (row, column), (rows, columns) = held.block.offsets, held.block.sizes
        target = whole[held.block.tensor][row : row + rows, column : column + columns]
        target.copy_(store.block_view(held))
    for table in tables.tables:
        if not table.replicated:
            tables.comm.all_reduce(f"gather {table.fqn}", whole[table.fqn])
    return whole


def follow_state_dict(module: nn.Module, unit: Unit, prefix: str) -> None:
    """Let ``module.state_dict()`` show sharded tensors at any time, and assigning loads
    (``load_state_dict(..., assign=True)``) take whole tensors and DTensors of any mesh and
    placement. Loads that copy need no help: a sharded tensor takes its part of a whole one.

    ``prefix`` is what the unit's names have before the module's.
    """
    start = f"{prefix}." if prefix else ""
    # Not closures: a deep copy of the module is to have hooks of its own units.
    module.register_state_dict_pre_hook(partial(_before_saving, unit))
    module.register_state_dict_post_hook(partial(_after_saving, unit))
    module.register_load_state_dict_pre_hook(partial(_before_loading, unit, start))
    module.register_load_state_dict_post_hook(partial(_after_loading, unit))


def _before_saving(unit: Unit, *_: Any) -> None:
    """Sharded parameters are shown, also where a forward has left whole ones."""
    absorb(unit)
    unit.show_sharded()


def _after_saving(unit: Unit, *_: Any) -> None:
    unit.show_again()


def _before_loading(
    unit: Unit, start: str, _module: nn.Module, state: dict[str, Any], prefix: str, *more: Any
) -> None:
    """What is about to be assigned is cut."""
    unit.free()
    absorb(unit)
    local_metadata, *_ = more
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    keys = {plain_name(key): key for key in state if key.startswith(prefix)}
    device = unit.buffers.shard.device
    device = torch.device(unit.mesh.device_type) if device.type == "meta" else device
    for member, cut in zip(unit.members, unit.sharded.cuts, strict=True):
        for name in (member.fqn, *member.aliases):
            key = keys.get(plain_name(prefix) + name.removeprefix(start), "")
            given = state.get(key)
            if cut is None or not isinstance(given, torch.Tensor):
                continue
            if given.shape == cut.shape and name.startswith(start):
                state[key] = OPERATORS.as_part(given.detach().to(device), cut)


def _after_loading(unit: Unit, *_: Any) -> None:
    """What an assigning load put in place of the parameters becomes their values."""
    absorb(unit)
