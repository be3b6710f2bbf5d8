"""Our sharded tables behind the functions that a side-by-side benchmark of such runtimes calls.

``build(specs, types, mesh, optimizer, learning_rate, weights)`` gives a module that takes a mapping
of features to (values int64, offsets int64 [B + 1]) and gives a mapping of features to rows
[B, dim], or [values, dim] of what is not pooled. Its backward updates the rows by the mean of the
ranks' gradients. ``full_weight(module, name)`` gathers a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.core.amount import ceil_div
from shardwright.core.block import Block
from shardwright.core.schedule import RIDE_BYTES
from shardwright.core.sharding import traits
from shardwright.job.planner import IN_FULL, Communication
from shardwright.runtime.embeddings.initial import blocks_of_whole
from shardwright.runtime.embeddings.route import Table
from shardwright.runtime.embeddings.shard import make_tables

FLOAT = 4


def build(
    specs: Sequence[Mapping[str, Any]],
    types: Mapping[str, str],
    mesh: DeviceMesh,
    optimizer: str,
    learning_rate: float,
    weights: Mapping[str, torch.Tensor],
    *,
    dedup: bool = False,
    communication: Communication = IN_FULL,
) -> nn.Module:
    """Tables as ``specs`` (name, rows, dim, pooling, features) say, each cut as ``types`` does.

    A 2-D mesh is (host, device); a 1-D one is one host. ``weights`` are the whole tables. Large
    ones that are replicated exchange the rows that were looked up. With ``dedup`` a row travels
    once to a rank that asks for it several times; ``communication`` are the dtypes of rows and
    gradients on the wire.
    """
    copied = {name: traits(kind).replicated for name, kind in types.items()}
    tables = [
        Table(
            spec["name"],
            spec["name"],
            spec["rows"],
            spec["dim"],
            tuple(spec["features"]),
            optimizer,
            spec["pooling"],
            replicated=copied[spec["name"]],
            by_rows=copied[spec["name"]] and spec["rows"] * spec["dim"] * FLOAT > RIDE_BYTES,
            dedup=dedup,
        )
        for spec in specs
    ]

    initial = blocks_of_whole(weights)
    blocks = _blocks(tables, types, mesh)
    return make_tables(tables, blocks, mesh, initial, learning_rate, communication=communication)


def full_weight(module: nn.Module, name: str) -> torch.Tensor:
    """Table ``name`` whole, on every rank (collective)."""
    return sw.full_state_dict(module)[name]


def _blocks(tables: Sequence[Table], types: Mapping[str, str], mesh: DeviceMesh) -> list[Block]:
    """Where everything lies: the widest first, each to the ranks with the fewest columns so far."""
    load = [0.0] * mesh.size()
    found: dict[str, list[Block]] = {}
    for table in sorted(tables, key=lambda table: -table.dim * len(table.features)):
        blocks = list(_cut(table, types[table.name], mesh, load))
        for block in blocks:
            load[block.rank] += block.numel / table.rows * len(table.features)
        found[table.name] = blocks
    return [block for table in tables for block in found[table.name]]


def _cut(
    table: Table, sharding_type: str, mesh: DeviceMesh, load: Sequence[float]
) -> Iterator[Block]:
    kind, ranks = traits(sharding_type), range(mesh.size())
    local = mesh.size(mesh.ndim - 1)
    hosts = [ranks[first : first + local] for first in range(0, len(ranks), local)]
    hosts.sort(key=lambda host: sum(load[rank] for rank in host))
    free = sorted(ranks, key=lambda rank: load[rank])
    whole = [(0, table.dim)]
    if kind.replicated:
        for rank in ranks:
            yield from _rows(table, whole[0], [rank])
    elif kind.whole:
        yield from _rows(table, whole[0], free[:1])
    elif sharding_type == "row_wise":
        yield from _rows(table, whole[0], ranks)
    elif sharding_type == "table_row_wise":
        yield from _rows(table, whole[0], hosts[0])
    elif sharding_type == "grid_shard":
        for columns, host in zip(_parts(table.dim, len(hosts)), hosts, strict=False):
            yield from _rows(table, columns, host)
    else:
        owners = free if sharding_type == "column_wise" else list(hosts[0])
        for columns, rank in zip(_parts(table.dim, len(owners)), owners, strict=False):
            yield from _rows(table, columns, [rank])


def _rows(table: Table, columns: tuple[int, int], ranks: Sequence[int]) -> Iterator[Block]:
    """``columns`` (first, count) cut by rows over ``ranks``."""
    for (row, rows), rank in zip(_parts(table.rows, len(ranks)), ranks, strict=False):
        yield Block(table.name, "parameter", (row, columns[0]), (rows, columns[1]), rank)


def _parts(size: int, parts: int) -> list[tuple[int, int]]:
    """Ceiling chunks (first, count) of ``size``; the last ones may be missing."""
    chunk = ceil_div(size, parts)
    return [(first, min(chunk, size - first)) for first in range(0, size, chunk)]
