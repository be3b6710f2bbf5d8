"""Whole weights of a sharded model, by their unsharded names."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.fully_shard import get_dstorage


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole, by its unsharded name, on every rank (collective).

    For export, evaluation and tests; ``model.state_dict()`` shows what this rank keeps.

    Each rank needs room for the whole model at once.
    """
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, ShardedTables):
            found.update(_whole_tables(module))
        storage = get_dstorage(module)
        if storage is not None:
            flat = storage.all_gather()
            for info in storage.param_infos.values():
                name = info.fqn if storage.name else ".".join(filter(None, (path, info.fqn)))
                start = info.unsharded_byte_offset
                size = info.global_shape.numel() * info.dtype.itemsize
                part = flat[start : start + size].view(info.dtype)
                found[name] = part.view(info.global_shape).clone()
    for name, parameter in model.named_parameters():
        if name not in found:
            found[name] = parameter.detach().clone()
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
