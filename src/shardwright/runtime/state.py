"""Whole weights of a sharded model, by their unsharded names."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.fully_shard import get_dstorage


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole, on every rank (collective): for export, evaluation and tests.

    Each rank needs room for the whole model at once.
    """
    found: dict[str, torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, ShardedTables):
            found.update(_whole_tables(module))
        storage = get_dstorage(module)
        if storage is not None:
            flat = storage.all_gather()
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
