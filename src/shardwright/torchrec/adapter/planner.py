"""A planner for TorchRec's ``DistributedModelParallel``: our search, its sharding plan."""

# It stands where TorchRec's EmbeddingShardingPlanner stood, so arguments keep its order, and what
# would silently do nothing (a proposer, an enumerator) is refused. Rank 0 plans alone and sends
# what it found: a search with a time limit may end at another plan on another rank, and ranks with
# different plans hang. An error is sent too, since the others wait for an answer.

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch.distributed as dist
from torch import nn
from torchrec.distributed import comm
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import StorageReservation
from torchrec.distributed.sharding_plan import get_default_sharders, placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingPlanner,
    ShardMetadata,
)

from shardwright.core.document import decode_json
from shardwright.core.errors import MismatchError, PeerError, UnsupportedError
from shardwright.core.model import DENSE
from shardwright.core.quantities import format_seconds
from shardwright.core.sharding import traits
from shardwright.job.job import parse_job
from shardwright.job.model_of_job import model_of
from shardwright.job.plan import Plan, TablePlan
from shardwright.planner.planner import plan as make_plan
from shardwright.torchrec.adapter.job import PlanRequest, default_topology, document
from shardwright.torchrec.adapter.tables import Constraints, Sharders, TorchRecTable, check_averages

WHERE = "model"

_PROPOSERS = (
    "Its proposers search with job_overrides={'planner': {'search': 'proposers'}}, under "
    "TorchRec's options with 'options': 'torchrec' beside it."
)
_COSTS = "Costs are a job's planner.constants and planner.estimator, in job_overrides."
_OPTIONS = "Constraints say which options a table has."
# Parts of TorchRec's search, and what does their work here.
PARTS = {
    "enumerator": f"{_OPTIONS} {_COSTS}",
    "proposer": _PROPOSERS,
    "partitioner": _PROPOSERS,
    "performance_model": _COSTS,
    "stats": "After planning, 'made' is the plan, which 'shardwright explain' reads.",
    "callbacks": _OPTIONS,
    "plan_loader": "sharding_plan(plan, tables, topology) gives a plan that was made before.",
}

logger = logging.getLogger(__name__)


class ShardwrightPlanner(ShardingPlanner):
    """Plans tables by TorchRec's own costs, or those that ``job_overrides`` ask for.

    Arguments stand in the order of TorchRec's ``EmbeddingShardingPlanner``: ``topology``,
    ``batch_size`` (per rank), ``storage_reservation``, ``constraints`` and ``timeout_seconds`` are
    as there, ``debug`` says whether a summary is logged. Parts of a search that is not ours
    (``enumerator``, ``proposer``, ``partitioner``, ``performance_model``, ``stats``,
    ``callbacks``, ``plan_loader``) are refused. ``job_overrides`` are sections of a job that win
    over what the model says, such as ``{"planner": {"options": "torchrec"}}``. After planning,
    ``made`` is the plan as Shardwright writes and explains it.

    :raises UnsupportedError: a part of TorchRec's search is given.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: object | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: object | None = None,
        partitioner: object | None = None,
        performance_model: object | None = None,
        stats: object | None = None,
        constraints: Constraints | None = None,
        debug: bool = True,
        callbacks: object | None = None,
        timeout_seconds: float | None = None,
        plan_loader: object | None = None,
        *,
        job_overrides: Mapping[str, Any] | None = None,
    ) -> None:
        parts = (enumerator, proposer, partitioner, performance_model, stats, callbacks)
        for (name, remedy), part in zip(PARTS.items(), (*parts, plan_loader), strict=True):
            if part:
                raise UnsupportedError(name, "nothing: our own search", type(part).__name__, remedy)
        self._debug = debug
        self._request = PlanRequest(
            topology or default_topology(),
            batch_size or BATCH_SIZE,
            constraints,
            storage_reservation,
            timeout_seconds,
            job_overrides,
        )
        self.made: Plan | None = None

    def plan(self, module: nn.Module, sharders: Sharders) -> ShardingPlan:
        """The sharding plan of ``module``; raises NoPlanError with the shortfall if none fits."""
        found, tables = document(module, sharders, self._request)
        if not tables:
            return ShardingPlan({})
        self.made = make_plan(parse_job(found, WHERE), model_of)
        check_averages(self.made, tables)
        if self._debug:
            logger.info(_summary(self.made))
        return sharding_plan(self.made, tables, self._request.topology)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sharders | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Rank 0 of ``pg`` plans, all ranks get the plan; without a process group, just plan.

        :raises PeerError: on the other ranks, where rank 0 could not plan.
        """
        sharders = sharders or get_default_sharders()
        if pg is None and dist.is_initialized():
            pg = dist.GroupMember.WORLD
        if pg is None:
            return self.plan(module, sharders)
        outcome: list[Any] = [None]
        error: Exception | None = None
        if pg.rank() == 0:
            try:
                found = self.plan(module, sharders)
                self._check_group(pg)
                made = msgspec.json.encode(self.made) if self.made else b""
                outcome = [(found, made, "")]
            except Exception as caught:  # the others wait for an answer
                error, outcome = caught, [(None, b"", f"{type(caught).__name__}: {caught}")]
        # Also where rank 0 failed: it raises only after the others have heard of it.
        if pg.size() > 1:
            dist.broadcast_object_list(outcome, group=pg, group_src=0)
        if error is not None:
            raise error
        sharding, made, failure = outcome[0]
        if failure:
            raise PeerError(WHERE, "a plan from rank 0", failure.rstrip("."))
        self.made = decode_json(made, Plan) if made else None
        return sharding

    def _check_group(self, pg: dist.ProcessGroup) -> None:
        """TorchRec's runtime counts ranks by itself: refuse what it would place elsewhere."""
        ranks = self._request.topology.world_size
        # A multiple is allowed: a topology may be of one of several groups that each hold
        # everything (2D parallelism).
        if pg.size() % ranks:
            wanted = f"a divisor of the process group's {pg.size()} ranks"
            raise MismatchError("topology.world_size", wanted, str(ranks))
        tables = self.made.tables if self.made and pg.size() == ranks else ()
        if any(traits(table.sharding_type).within_hosts for table in tables):
            group = comm.get_topology_group_world_size(pg.size())
            planned = self._request.topology.intra_group_size
            if group != planned:
                wanted = f"{group} linked ranks, as LOCAL_WORLD_SIZE and the pod size say"
                raise MismatchError("topology", wanted, str(planned))


def _summary(made: Plan) -> str:
    return (
        f"{len(made.tables)} tables on {made.world_size} ranks: the slowest takes "
        f"{format_seconds(made.max_rank_seconds)} per step, no plan less than "
        f"{format_seconds(made.lower_bound_seconds)} (gap {made.gap:.1%})"
    )


def sharding_plan(plan: Plan, tables: Sequence[TorchRecTable], topology: Topology) -> ShardingPlan:
    """``plan`` for TorchRec's ``DistributedModelParallel``; ``tables`` are those it was made of."""
    if plan.world_size != topology.world_size:
        ranks = f"{plan.world_size} ranks"
        raise MismatchError("plan", f"{topology.world_size} ranks, as topology", ranks)
    chosen = {table.name: table for table in plan.tables}
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for table in tables:
        found = chosen.get(table.spec.name)
        if found is None or (found.rows, found.dim) != (table.spec.rows, table.spec.dim):
            shape = f"{table.spec.rows} x {table.spec.dim}"
            got = f"{found.rows} x {found.dim}" if found else "no such table"
            raise MismatchError(
                f"plan of table '{table.spec.name}'", shape, got, "Plan this model."
            )
        module = modules.setdefault(table.module_path, EmbeddingModuleShardingPlan())
        module[table.name] = _parameter(found, table, topology)
    return ShardingPlan(dict(modules))


def _parameter(found: TablePlan, table: TorchRecTable, topology: Topology) -> ParameterSharding:
    replicated = traits(found.sharding_type).replicated
    given = table.constraint
    return ParameterSharding(
        sharding_type=found.sharding_type,
        compute_kernel=DENSE if replicated else found.compute_kernel,  # it has no other replicas
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
