"""Prices as TorchRec 1.9.2 has them.

Shards that one set of formulas serves are priced together: their seconds as arrays of doubles,
their bytes as arrays of Python ints. An explanation calls the same formulas on Amounts.
"""

# Formulas are those of storage.py and times.py; here is where their quantities come from: what
# TorchRec would read off a table's constraint, its sharder's fused parameters or a codec. Where
# TorchRec has a quirk (fp32 codecs count as none, only pooled tables are reduced, a load factor of
# 0 means "not given" for bytes and 0 for times) it is kept and named at its place.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.core.amount import Lift, bare, ceil_div, leaf, minimum, named
from shardwright.core.batch import features
from shardwright.core.cluster import Cluster
from shardwright.core.model import CacheSpec, TableSpec
from shardwright.core.option import Option
from shardwright.core.sharding import traits
from shardwright.core.tensor import ELEMENT_BYTES, element_bytes
from shardwright.cost.embedding import Demand
from shardwright.planner.choice import Choice, Cost
from shardwright.planner.pricing.evaluate import (
    Derived,
    PricingContext,
    constants_of,
    costs,
    faster_kernels,
    priced,
    tier_totals,
)
from shardwright.torchrec import storage, times
from shardwright.torchrec.storage import MeshSizes, Shards, ShardScheme

MIB = 2**20
REDUCED = {"fp8": "fp16"}  # what TorchRec reduces in instead of a dtype that cannot be summed


def price(context: PricingContext, cases: Sequence[tuple[TableSpec, Option]]) -> list[Choice]:
    """What each option costs, in the order of ``cases``."""
    ranks, c = _ranks(context.cluster, bare), context.values

    def costs_of(scheme: ShardScheme, exact: list[Any]) -> list[Cost]:
        # Seconds from doubles, as TorchRec has them, and bytes from the exact columns: one set of
        # arrays could serve only one of the two to the last digit.
        fast = Shards(*(np.asarray(values, dtype=np.float64) for values in exact))
        seconds = times.shard_seconds(scheme, fast, ranks, c)
        # Shown and in no total, as in TorchRec: a plan that counted it would rank options
        # otherwise.
        hidden = {"input_dist": seconds.pop("input_dist")}
        kept = storage.shard_bytes(scheme, Shards(*exact), ranks, c)
        return costs(seconds, kept, len(exact[0]), hidden)

    found = priced(
        cases,
        lambda table: _facts(context, table, c, bare),
        lambda table, option, _: _scheme(
            context, table, option.sharding_type, option.compute_kernel
        ),
        costs_of,
    )
    return [
        Choice(table, option, each)
        for (table, option), (_, _, each) in zip(cases, found, strict=True)
    ]


def faster(
    context: PricingContext, cases: Sequence[tuple[TableSpec, Option]], kernels: Sequence[str]
) -> set[tuple[int, str]]:
    """Cases of which some shard takes less time with one of ``kernels``: number and kernel."""
    ranks, c = _ranks(context.cluster, bare), context.values

    def seconds(scheme: ShardScheme, columns: Sequence[Any]) -> Any:
        parts = times.shard_seconds(scheme, Shards(*columns), ranks, c)
        return sum(parts[part] for part in times.PARTS)

    return faster_kernels(
        cases,
        kernels,
        lambda table: _facts(context, table, c, bare),
        lambda table, sharding_type, kernel: _scheme(context, table, sharding_type, kernel),
        seconds,
    )


def exchange_bytes(
    cluster: Cluster, pooled: bool, sharding_type: str, demand: Demand, size: Any, lift: Lift
) -> tuple[Any, Any]:
    """Bytes of the ids that reach a shard in one step, and of the rows it hands out, whose elements
    take ``size`` bytes."""
    scheme = ShardScheme(sharding_type, "", cluster.compute_device, pooled=pooled)
    q = Shards(*[0] * len(Shards._fields))._replace(
        rows=demand.rows,
        columns=demand.columns,
        lookups=demand.ids,
        outputs=demand.bags,
        output_bytes=size,
    )
    world = lift(cluster.world_size, "ranks", "", "cluster.world_size")
    host = lift(cluster.local_world_size, "ranks_of_host", "", "cluster.local_world_size")
    ranks = MeshSizes(world, host, host)
    index = cluster.constants["index_bytes"]
    source = f"{index.source}, {index.date}"
    c = {"index_bytes": lift(index.value, "index_bytes", index.unit, source)}
    return storage.input_bytes(scheme, q, ranks, c), storage.output_bytes(scheme, q, ranks)


def derive(context: PricingContext, table: TableSpec, option: Option, run_index: int) -> Derived:
    """The price of one shard of a run as derivations, by the formulas that priced it."""
    c = constants_of(context.cluster)
    ranks = _ranks(context.cluster, leaf)
    facts = _facts(context, table, c, leaf)
    q = Shards(None, None, *facts)
    rows, columns = _sizes(option, run_index, q, ranks)
    q = q._replace(rows=rows, columns=columns)
    scheme = _scheme(context, table, option.sharding_type, option.compute_kernel)
    seconds = times.total_seconds(times.shard_seconds(scheme, q, ranks, c))
    return Derived(seconds, tier_totals(storage.shard_bytes(scheme, q, ranks, c)))


def _sizes(option: Option, run_index: int, q: Shards, ranks: MeshSizes) -> tuple[Any, Any]:
    """Rows and columns of a run's first shard, from the table's own."""
    run = option.runs[run_index]
    rows, columns = q.table_rows, q.dim
    if traits(option.sharding_type).cuts_rows:
        parts = traits(option.sharding_type).row_parts(ranks.world, ranks.group)
        chunk = named("rows_per_part", ceil_div(rows, parts), "rows")
        first = leaf(run.row, "first_row", "", f"{option.sharding_type}: the shard's first row")
        rows = named("rows_of_shard", minimum(chunk, rows - first), "rows")
    if run.columns != columns.value:
        source = f"{option.sharding_type}: a width that divides dim"
        columns = leaf(run.columns, "columns_of_shard", "columns", source)
    # An explanation works sizes out again from the table's: it must come to the shard that was
    # priced.
    assert (rows.value, columns.value) == (run.rows, run.columns)
    return rows, columns


def _ranks(cluster: Cluster, lift: Lift) -> MeshSizes:
    world = lift(cluster.world_size, "ranks", "", "cluster.world_size")
    local = lift(cluster.local_world_size, "ranks_of_host", "", "cluster.local_world_size")
    return MeshSizes(world, local, lift(cluster.group, "ranks_of_group", "", "cluster.group"))


def _flags(context: PricingContext, table: TableSpec) -> tuple[bool, bool, bool, bool]:
    """What a table adds to a scheme: pooled, weighted, prefetched, counted."""
    cache = table.cache
    # Where TorchRec looks: at the module of a pooled table, at the constraint of another one.
    weighted = table.module_weighted if table.pooled else table.constraint_weighted
    if cache is None:
        return table.pooled, weighted, bool(context.estimator.prefetch_pipeline), False
    prefetched = bool(cache.prefetch_pipeline or context.estimator.prefetch_pipeline)
    counted = cache.stats is not None and _load_factor(context, table)[0] is not None
    return table.pooled, weighted, prefetched, counted


def _scheme(
    context: PricingContext, table: TableSpec, sharding_type: str, kernel: str
) -> ShardScheme:
    estimator = context.estimator
    return ShardScheme(
        sharding_type,
        kernel,
        context.cluster.compute_device,
        *_flags(context, table),
        pipeline=estimator.pipeline_type,
        ephemeral=estimator.count_ephemeral,
        inference=estimator.is_inference,
    )


def _load_factor(context: PricingContext, table: TableSpec) -> tuple[float | None, str]:
    """The cached share of a table's rows that somebody asked for, and where."""
    if table.cache is not None and table.cache.load_factor is not None:
        return table.cache.load_factor, f"tables.{table.name}.cache.load_factor"
    return context.estimator.cache_load_factor, "planner.estimator.cache_load_factor"


def _facts(context: PricingContext, table: TableSpec, c: Any, lift: Lift) -> tuple[Any, ...]:
    """The quantities of a table, as in Shards after rows and columns."""
    where = f"tables.{table.name}"
    dim = lift(table.dim, "dim", "columns", f"{where}.dim")
    size = element_bytes(table.dtype)
    element = lift(size, "element_bytes", "B", f"{where}.dtype {table.dtype}")
    output = element
    if table.output_dtype:
        source = f"{where}.output_dtype {table.output_dtype}"
        output = lift(element_bytes(table.output_dtype), "output_element_bytes", "B", source)
    return (
        lift(table.rows, "rows", "rows", f"{where}.rows"),
        dim,
        *_traffic(context, table, lift),
        element,
        output,
        *_wire(context, table, element, lift),
        storage.state_share(table.optimizer or "none", dim, c),
        *_cache(context, table, c, lift),
    )


def _traffic(context: PricingContext, table: TableSpec, lift: Lift) -> tuple[Any, Any]:
    """Lookups and outputs of one rank's batch."""
    where = f"tables.{table.name}"
    origin = f"{where}.batch_sizes" if table.batch_sizes else "batch.size"
    bagged = f"{where}.num_poolings" if table.num_poolings else "one bag where nothing is said"
    lengths, poolings, sizes = [], [], []
    for number, (length, bags, size) in enumerate(features(table, context.batch)):
        source = f"{where}.pooling_factors"
        lengths.append(lift(length, f"pooling_factor_{number}", "ids", source))
        poolings.append(lift(bags, f"num_poolings_{number}", "bags", bagged))
        sizes.append(lift(size, f"batch_size_{number}", "samples", origin))
    lookups = storage.batch_lookups(lengths, poolings, sizes)
    if not table.pooled:
        return lookups, lookups
    return lookups, storage.batch_outputs(lengths, poolings, sizes)


def _wire(context: PricingContext, table: TableSpec, element: Any, lift: Lift) -> tuple[Any, ...]:
    """Bytes of an element in the exchange, forward and backward, and in the reduce-scatter.

    TorchRec has no codecs for fp32 both ways: rows travel in the table's own dtype. Only pooled
    tables are reduced.
    """
    dtypes = context.estimator.communication
    if dtypes is None or set(dtypes) == {"fp32"}:
        return (element,) * 4
    there, back = dtypes
    exchange = (
        _wire_bytes("forward_wire_bytes", there, there, lift),
        _wire_bytes("backward_wire_bytes", back, back, lift),
    )
    if not table.pooled:
        return (*exchange, element, element)
    return (
        *exchange,
        _wire_bytes("forward_reduce_wire_bytes", there, REDUCED.get(there, there), lift),
        _wire_bytes("backward_reduce_wire_bytes", back, REDUCED.get(back, back), lift),
    )


def _wire_bytes(name: str, asked: str, used: str, lift: Lift) -> Any:
    note = asked if used == asked else f"{asked}, reduced in {used}"
    return lift(ELEMENT_BYTES[used], name, "B", f"planner.estimator.communication {note}")


def _cache(context: PricingContext, table: TableSpec, c: Any, lift: Lift) -> tuple[Any, ...]:
    """Load factors by times, by bytes and of a key-value cache, its size, passes, statistics."""
    where = f"tables.{table.name}"
    cache = table.cache or CacheSpec()
    share, source = _load_factor(context, table)
    default = c["cache_load_factor"]
    asked = default if share is None else lift(share, "load_factor", "", source)
    shared = context.estimator.cache_load_factor
    origin = "planner.estimator.cache_load_factor"
    lookups, _, misses = cache.stats or (0.0, 0.0, 0.0)
    return (
        asked,
        # Bytes take 0 for "not given", times take it as it is: so in TorchRec.
        asked if share else default,
        lift(shared, "key_value_share", "", origin) if shared else c["kv_cache_load_factor"],
        lift((table.kv_l1_mb or 0) * MIB, "l1_cache_bytes", "B", f"{where}.kv_l1_mb"),
        lift(cache.passes or 1, "prefetch_passes", "", f"{where}.cache.passes"),
        lift(lookups, "expected_lookups", "ids", f"{where}.cache.stats"),
        lift(misses, "misses_without_cache", "", f"{where}.cache.stats"),
    )
