"""Formulas evaluated for many shards as arrays, and for one as a derivation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.core.amount import ceil_div, leaf, maximum, minimum, named, total
from shardwright.core.batch import feature_batches
from shardwright.core.cluster import TIERS, Cluster, Tier
from shardwright.core.model import TableSpec
from shardwright.core.option import Option
from shardwright.core.sums import Lift
from shardwright.planner.choice import Cost, cost
from shardwright.planner.pricing.context import PricingContext

Tiers = Mapping[Tier, Mapping[str, Any]]


def constants_of(cluster: Cluster) -> dict[str, Any]:
    """A cluster's constants as leaves of a derivation."""
    return {
        name: leaf(c.value, name, c.unit, f"{c.source}, {c.date}")
        for name, c in cluster.constants.items()
    }


def costs(
    seconds: Mapping[str, Any], storage: Tiers, count: int, hidden: Mapping[str, Any] | None = None
) -> list[Cost]:
    """The costs of ``count`` shards out of arrays; kinds without bytes are left out."""
    tiers = [_records(storage.get(tier, {}), count) for tier in TIERS]
    spent = _records(seconds, count), _records(hidden or {}, count)
    return [
        cost(parts, hbm=_held(hbm), ddr=_held(ddr), ssd=_held(ssd), hidden=untold)
        for parts, untold, hbm, ddr, ssd in zip(*spent, *tiers, strict=True)
    ]


def _records(columns: Mapping[str, Any], count: int) -> Sequence[dict[str, Any]]:
    if not columns:
        return [{}] * count
    lists = [np.broadcast_to(np.asarray(values), count).tolist() for values in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def _held(kinds: dict[str, int]) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in kinds.items() if nbytes} if kinds else kinds


def tier_totals(storage: Tiers) -> dict[Tier, Any]:
    """The bytes of every tier as derivations."""
    return {tier: _tier_total(tier, storage.get(tier, {})) for tier in TIERS}


def _tier_total(tier: Tier, kinds: Mapping[str, Any]) -> Any:
    name = f"{tier}_bytes"
    if not kinds:
        return leaf(0, name, "B", "nothing is kept there")
    return named(name, total(kinds.values()), "B")


def traffic(context: PricingContext, table: TableSpec, lift: Lift) -> tuple[Any, Any]:
    """Ids of one rank's batch for ``table``, and the rows it gets back for them."""
    where = f"tables.{table.name}"
    sizes = feature_batches(table, context.batch)
    origin = f"{where}.batch_sizes" if table.batch_sizes else "batch.size"
    ids, bags = [], []
    features = zip(table.pooling_factors, table.poolings, sizes, strict=True)
    for number, (length, poolings, size) in enumerate(features):
        factor = lift(length, f"pooling_factor_{number}", "ids", f"{where}.pooling_factors")
        count = lift(poolings, f"num_poolings_{number}", "bags", f"{where}.num_poolings")
        samples = lift(size, f"batch_size_{number}", "samples", origin)
        ids.append(factor * count * samples)
        bags.append(minimum(1.0, factor) * count * samples)
    asked = named("ids_of_one_rank", total(ids), "ids")
    return asked, named("bags_of_one_rank", total(bags), "rows") if table.pooled else asked


def shard_shape(table: TableSpec, option: Option, run_index: int, parts: Any) -> tuple[Any, Any]:
    """Rows and columns of a run's first shard as derivations; ``parts`` share the table's rows."""
    run = option.runs[run_index]
    kind = option.sharding_type
    rows = leaf(table.rows, "table_rows", "rows", f"tables.{table.name}.rows")
    columns = leaf(table.dim, "dim", "columns", f"tables.{table.name}.dim")
    if option.traits.cuts_rows:
        chunk = named("rows_per_part", ceil_div(rows, parts), "rows")
        first = leaf(run.row, "first_row", "rows", f"{kind}: the shard's first row")
        rows = named("rows_of_shard", minimum(chunk, maximum(rows - first, 0)), "rows")
    if run.columns != columns.value:
        blocks = leaf(table.dim // run.columns, "column_blocks", "", f"{kind}: of equal width")
        columns = named("columns_of_shard", columns // blocks, "columns")
    assert (rows.value, columns.value) == (run.rows, run.columns)
    return rows, columns
