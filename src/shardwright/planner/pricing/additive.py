"""Prices by the additive cost: what a shard costs depends on no other shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.core.amount import Lift, bare, leaf, named, total
from shardwright.core.cluster import Tier
from shardwright.core.errors import UnsupportedError
from shardwright.core.model import TableSpec
from shardwright.core.option import Option
from shardwright.core.sharding import TYPES, traits
from shardwright.core.tensor import ELEMENT_BYTES
from shardwright.planner.choice import Choice, Cost, cost
from shardwright.planner.pricing.evaluate import (
    Derived,
    PricingContext,
    constants_of,
    shard_shape,
    tier_totals,
    traffic,
)


def price(context: PricingContext, cases: Sequence[tuple[TableSpec, Option]]) -> list[Choice]:
    """What each option costs, in the order of ``cases``."""
    choices = []
    for table, option in cases:
        _check(table, option)
        known: dict[tuple[int, int], Cost] = {}
        for run in option.runs:
            shape = run.rows, run.columns
            if shape not in known:
                seconds, storage = _evaluate(context, table, *shape, context.values, bare)
                known[shape] = cost(seconds, **storage)
        costs = tuple([known[run.rows, run.columns] for run in option.runs])
        choices.append(Choice(table, option, costs))
    return choices


def derive(context: PricingContext, table: TableSpec, option: Option, run_index: int) -> Derived:
    """The price of one shard of a run as derivations, by the formulas that priced it."""
    _check(table, option)
    c = constants_of(context.cluster)
    rows, columns = shard_shape(table, option, run_index, None)
    seconds, storage = _evaluate(context, table, rows, columns, c, leaf)
    spent = named("seconds_per_step", total(seconds.values()), "s")
    return Derived(spent, tier_totals(storage))


def _check(table: TableSpec, option: Option) -> None:
    if option.sharding_type not in SHARDING_TYPES:
        where = f"tables '{table.name}'.sharding_types"
        wanted = f"one of {', '.join(SHARDING_TYPES)} for the additive cost"
        raise UnsupportedError(where, wanted, option.sharding_type)


def _evaluate(
    context: PricingContext, table: TableSpec, rows: Any, columns: Any, c: Any, lift: Lift
) -> tuple[dict[str, Any], dict[Tier, dict[str, Any]]]:
    """Seconds of a shard by part, and its bytes by tier and kind."""
    cluster = context.cluster
    tier = cluster.decisive_tier
    where = f"tables.{table.name}"
    size = lift(ELEMENT_BYTES[table.dtype], "element_bytes", "B", f"{where}.dtype {table.dtype}")
    ranks = lift(cluster.world_size, "ranks", "", "cluster.world_size")
    samples = lift(context.batch.size, "samples", "samples", "batch.size")
    ids, _ = traffic(context, table, lift)
    seconds = shard_seconds(ids, samples, columns, size, ranks, c)
    return seconds, {tier: {"weight": weight_bytes(rows, columns, size)}}


# Of whole rows, each on any rank.
SHARDING_TYPES = tuple(t for t in TYPES if traits(t).partition == "device")


def weight_bytes(rows: Any, columns: Any, element_bytes: Any) -> Any:
    """Bytes of a shard: its weights alone."""
    return named("weight_bytes", rows * columns * element_bytes, "B")


def shard_seconds(
    ids: Any, samples: Any, columns: Any, element_bytes: Any, ranks: Any, c: Any
) -> dict[str, Any]:
    """Seconds of a shard by phase, for ``ids`` and ``samples`` of one rank's batch.

    The shard looks up the ids of all ranks, and sends one row per sample to each of the others.
    """
    row = named("row_bytes", columns * element_bytes, "B")
    read = named("bytes_read", c["passes"] * ids * ranks * row, "B")
    sent = named("bytes_exchanged", c["directions"] * samples * (ranks - 1) * row, "B")
    return {
        "lookup": named("lookup_seconds", read / c["lookup_rate"], "s"),
        "exchange_rows": named("exchange_rows_seconds", sent / c["exchange_rate"], "s"),
    }
