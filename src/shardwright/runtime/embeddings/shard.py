"""``shard_embeddings``: the embeddings of a module, sharded by a plan of tables alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.block import Block, check_tiling
from shardwright.core.tensor import TensorSpec
from shardwright.runtime.comm import Comm, flat
from shardwright.runtime.embeddings.route import Table, make_route
from shardwright.runtime.embeddings.store import InitialBlock
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.guard import Guard
from shardwright.runtime.units.flow import Flow


def make_tables(
    tables: Sequence[Table],
    blocks: Iterable[Block],
    mesh: DeviceMesh,
    initial: InitialBlock,
    learning_rate: float,
    *,
    guard: Guard | None = None,
) -> ShardedTables:
    """One module of ``tables`` whose parameters lie as ``blocks`` say (collective); rank k of these
    is the k-th of ``mesh``, and ``initial`` gives the starting values of a rectangle."""
    blocks = list(blocks)
    mesh = flat(mesh)
    shapes = [TensorSpec(table.fqn, (table.rows, table.dim)) for table in tables]
    check_tiling(blocks, shapes, mesh.size())
    route = make_route(tables, blocks, mesh.size())
    flow = Flow(0, guard)
    return ShardedTables(tables, route, Comm(mesh), initial, learning_rate, flow, path="tables")
