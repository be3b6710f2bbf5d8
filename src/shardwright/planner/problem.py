"""What is to be planned, with everything that does not depend on the choice worked out once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardwright.core.batch import Batch, lookups
from shardwright.core.cluster import Cluster
from shardwright.core.errors import InputError, expected
from shardwright.core.job import Job
from shardwright.core.layout import FlatLayout, unit_layout
from shardwright.core.model import ModelSpec, ShardingType, Stage, TableSpec, UnitSpec
from shardwright.core.option import Option, shard_shapes
from shardwright.core.placement import Flat, Placement, Replicate
from shardwright.cost import constants, dense, embedding

RUNNABLE: tuple[ShardingType, ...] = ("data_parallel", "table_wise", "row_wise", "column_wise")
UNIFORM: tuple[ShardingType, ...] = ("data_parallel", "row_wise")  # shard k lies on rank k


@dataclass(frozen=True, slots=True)
class TableChoice:
    """One way to shard a table, with bytes and seconds of each shard."""

    table: TableSpec
    option: Option
    shard_bytes: tuple[dict[str, int], ...]
    shard_seconds: tuple[dict[str, float], ...]
    request_seconds: float = 0.0  # on every rank
    bytes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """One way to place a dense unit; bytes and seconds are those of every rank."""

    unit: UnitSpec
    placement: Placement
    layout: FlatLayout
    seconds: dict[str, float]

    @property
    def replicated(self) -> bool:
        """Whether every rank keeps the whole unit."""
        return isinstance(self.placement, Replicate)


@dataclass(frozen=True, slots=True)
class Problem:
    """A job on its cluster, and every choice there is."""

    job: Job
    cluster: Cluster
    model: ModelSpec
    batch: Batch
    tables: tuple[tuple[TableChoice, ...], ...]
    units: tuple[tuple[UnitChoice, ...], ...]
    assumptions: tuple[str, ...]
    values: dict[str, float] = field(default_factory=dict)


def make_problem(job: Job, model: ModelSpec) -> Problem:
    """Enumerate once what each table and unit could be."""
    cluster, assumptions = constants.cluster(job.cluster)
    batch = Batch(job.batch.size, job.batch.sequence)
    _check_forced_units(job, model)
    values = {name: constant.value for name, constant in cluster.constants.items()}
    tables = tuple(table_choices(table, batch, cluster, values) for table in model.tables)
    units = tuple(
        unit_choices(unit, _stage(model, unit), job, cluster, values) for unit in model.units
    )
    notes = (
        *assumptions,
        "ids spread evenly over the rows of a row_wise table",
        "phases of a step follow one another: no overlap of communication and compute",
    )
    return Problem(job, cluster, model, batch, tables, units, notes, values)


def _check_forced_units(job: Job, model: ModelSpec) -> None:
    known = [unit.name for unit in model.units]
    for name in job.planner.units:
        if name not in known:
            raise InputError(expected("planner.units", f"units {', '.join(known)}", f"'{name}'"))


def allowed_types(table: TableSpec) -> tuple[ShardingType, ...]:
    """What the runtime can execute for this table and the job allows."""
    types = [t for t in RUNNABLE if not table.sharding_types or t in table.sharding_types]
    if table.optimizer == "rowwise_adagrad":
        types = [t for t in types if t != "column_wise"]
    if not types:
        reason = (
            " (column_wise needs sgd: its row-wise Adagrad sums would span ranks)"
            if table.optimizer == "rowwise_adagrad" and "column_wise" in table.sharding_types
            else ""
        )
        raise InputError(
            expected(
                f"tables '{table.name}'.sharding_types",
                f"one of {', '.join(RUNNABLE)}{reason}",
                ", ".join(table.sharding_types),
            )
        )
    return tuple(types)


def table_choices(
    table: TableSpec, batch: Batch, cluster: Cluster, values: dict[str, float]
) -> tuple[TableChoice, ...]:
    """Every allowed option of a table, its costs evaluated once per distinct shard."""
    choices = []
    for sharding_type in allowed_types(table):
        kernel = "dense" if sharding_type == "data_parallel" else "fused"
        if table.compute_kernels and kernel not in table.compute_kernels:
            continue
        shapes = shard_shapes(table, sharding_type, cluster.world_size)
        if sharding_type == "column_wise" and len(shapes) == 1:
            continue  # one column shard is table_wise
        option = Option(table.name, sharding_type, kernel, shapes)
        choices.append(_choice(table, batch, cluster, values, option))
    if not choices:
        raise InputError(
            expected(
                f"tables '{table.name}'",
                "a sharding type and kernel that this version runs",
                f"types {list(table.sharding_types)}, kernels {list(table.compute_kernels)}",
                "Allow table_wise or row_wise with kernel fused, or data_parallel with dense.",
            )
        )
    return tuple(choices)


def _choice(
    table: TableSpec,
    batch: Batch,
    cluster: Cluster,
    values: dict[str, float],
    option: Option,
) -> TableChoice:
    sharding_type = option.sharding_type
    ids = lookups(table, batch)
    assert table.optimizer is not None
    known: dict[tuple[int, int], tuple[dict[str, int], dict[str, float]]] = {}
    for shape in option.shards:
        key = (shape.rows, shape.columns)
        if key not in known:
            kept = embedding.shard_bytes(*key, table.dtype, table.optimizer, sharding_type)
            spent = embedding.shard_seconds(
                ids, *key, table.dtype, table.optimizer, cluster.world_size, sharding_type, values
            )
            known[key] = kept, spent
    costs = [known[shape.rows, shape.columns] for shape in option.shards]
    return TableChoice(
        table,
        option,
        tuple(kept for kept, _ in costs),
        tuple(spent for _, spent in costs),
        embedding.request_seconds(ids, sharding_type, values)
        if sharding_type != "data_parallel"
        else 0.0,
        tuple(sum(kept.values()) for kept, _ in costs),
        tuple(math.fsum(spent.values()) for _, spent in costs),
    )


def _stage(model: ModelSpec, unit: UnitSpec) -> Stage:
    return next(stage for stage in model.stages if stage.name == unit.name)


def unit_choices(
    unit: UnitSpec, stage: Stage, job: Job, cluster: Cluster, values: dict[str, float]
) -> tuple[UnitChoice, ...]:
    """Replication and flat sharding, or the one that the job forces."""
    forced = job.planner.units.get(unit.name)
    placements: list[Placement] = []
    if forced in (None, "replicate"):  # first: where both cost the same, the simpler one wins
        placements.append(Replicate())
    if forced in (None, "shard"):
        placements.append(Flat())
    choices = []
    for placement in placements:
        layout = unit_layout(unit.tensors, placement, cluster.world_size)
        sharded = not isinstance(placement, Replicate)
        forward, calls, backward, back_calls = dense.stage_flops(stage, job.batch.size)
        traffic = dense.communication_seconds(
            layout.nbytes, cluster.world_size, sharded=sharded, gathers=1, c=values
        )
        seconds = {
            "forward": dense.compute_seconds(forward, calls, values) + traffic["gather"],
            "backward": dense.compute_seconds(backward, back_calls, values) + traffic["gather"],
            "reduce": traffic["reduce"],
            "step": dense.update_seconds(3 * layout.shard_bytes, values),
        }
        choices.append(UnitChoice(unit, placement, layout, seconds))
    return tuple(choices)
