"""A plan in TorchRec's words: for each module and table a type, a kernel, ranks and shards."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from shardwright.adapters.torchrec.tables import TorchRecTable
from shardwright.core.errors import MismatchError, expected
from shardwright.core.plan import Plan, TablePlan


def sharding_plan(plan: Plan, tables: Sequence[TorchRecTable], topology: Topology) -> ShardingPlan:
    """``plan`` for TorchRec's ``DistributedModelParallel``; ``tables`` are those it was made of."""
    if plan.world_size != topology.world_size:
        ranks = f"{plan.world_size} ranks"
        raise MismatchError(expected("plan", f"{topology.world_size} ranks, as topology", ranks))
    chosen = {table.name: table for table in plan.tables}
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for table in tables:
        found = chosen.get(table.spec.name)
        if found is None or (found.rows, found.dim) != (table.spec.rows, table.spec.dim):
            shape = f"{table.spec.rows} x {table.spec.dim}"
            got = f"{found.rows} x {found.dim}" if found else "no such table"
            raise MismatchError(
                expected(f"plan of table '{table.spec.name}'", shape, got, "Plan this model.")
            )
        module = modules.setdefault(table.module_path, EmbeddingModuleShardingPlan())
        module[table.name] = _parameter(found, table, topology)
    return ShardingPlan(dict(modules))


def _parameter(found: TablePlan, table: TorchRecTable, topology: Topology) -> ParameterSharding:
    replicated = found.sharding_type == "data_parallel"
    given = table.constraint
    return ParameterSharding(
        sharding_type=found.sharding_type,
        compute_kernel=found.compute_kernel,
        ranks=list(found.ranks),
        sharding_spec=None if replicated else EnumerableShardingSpec(_shards(found, topology)),
        cache_params=given.cache_params if given else None,
        enforce_hbm=given.enforce_hbm if given else None,
        stochastic_rounding=given.stochastic_rounding if given else None,
        bounds_check_mode=given.bounds_check_mode if given else None,
        output_dtype=given.output_dtype if given else None,
        key_value_params=given.key_value_params if given else None,
    )


def _shards(found: TablePlan, topology: Topology) -> list[ShardMetadata]:
    """Every shard with its rank, in the order of the table's rows and columns."""
    device, local = topology.compute_device, topology.local_world_size
    return [
        ShardMetadata(
            shard_offsets=[shape.row, shape.column],
            shard_sizes=[shape.rows, shape.columns],
            placement=placement(device, rank, local),
        )
        for shard in found.shards
        for rank, shape in zip(shard.ranks, shard.run.shapes(), strict=True)
    ]
