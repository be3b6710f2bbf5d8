"""Bytes that pass through the shards of a table in one step, by the formulas of the plan's costs.

Memory may hold more than one step's inputs and none of its outputs; this is what one step moves.
"""

from __future__ import annotations

from typing import Any

from shardwright.core.batch import Batch, lookups, outputs
from shardwright.core.model import TableSpec
from shardwright.core.plan import Plan
from shardwright.core.tensor import element_bytes
from shardwright.cost import embedding
from shardwright.cost.embedding import Demand
from shardwright.planner import profiles
from shardwright.planner.pricing.evaluate import Lift, bare


def shard_traffic(
    plan: Plan, table: TableSpec, sharding_type: str, rows: int, columns: int, lift: Lift = bare
) -> tuple[Any, Any]:
    """Bytes of the ids that reach a shard of ``rows`` x ``columns`` and of the rows it hands out;
    with ``leaf`` for ``lift`` as derivations."""
    batch = Batch(plan.job.batch.size, plan.job.batch.sequence)
    where = f"tables.{table.name}"
    ids = lift(lookups(table, batch), "ids_of_one_rank", "ids", f"{where} x batch.size")
    bags = lift(outputs(table, batch), "bags_of_one_rank", "rows", f"{where} x batch.size")
    size = lift(element_bytes(table.dtype), "element_bytes", "B", f"{where}.dtype {table.dtype}")
    own_rows = lift(rows, "rows_of_shard", "rows", "the shard's")
    own_columns = lift(columns, "columns_of_shard", "columns", "the shard's")
    demand = Demand(ids, bags, own_rows, own_columns, 0, 0, 0, 0)
    if plan.job.planner.constants == "torchrec-1.9":
        return profiles.torchrec.exchange_bytes(
            plan.cluster, table.pooled, sharding_type, demand, size, lift
        )
    world = lift(plan.world_size, "ranks", "", "cluster.world_size")
    local_ranks = None
    if plan.cluster.group < plan.world_size:
        local_ranks = lift(plan.cluster.group, "ranks_of_host", "", "cluster.local_world_size")
    once = lift(1, "batches_in_flight", "batches", "of one step")
    found = embedding.exchange_bytes(demand, sharding_type, size, once, world, local_ranks)
    return found["input"], found["output"]
