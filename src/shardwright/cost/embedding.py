"""Bytes and seconds of a table shard, for numbers, arrays or Amounts alike.

Bytes are exact: they equal what the runtime allocates. Seconds are for one training step of one
rank; ``ids`` are those of one rank's batch, so a whole table sees ``ids * ranks`` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.core.amount import named, noted
from shardwright.core.batch import INDEX_BYTES
from shardwright.core.tensor import ELEMENT_BYTES
from shardwright.cost import network, optimizer

ROW_TYPES = ("row_wise",)


def weight_bytes(rows: Any, columns: Any, element_bytes: Any) -> Any:
    """Bytes of a shard's weights."""
    return named("weight_bytes", rows * columns * element_bytes, "B")


def optimizer_state_bytes(rows: Any, kind: str) -> Any:
    """Bytes of a shard's optimizer state: row-wise Adagrad keeps one fp32 per row."""
    per_row = optimizer.TABLE_STATE_BYTES_PER_ROW[kind]
    size = noted(per_row, "state_bytes_per_row", "B", f"optimizer {kind}", like=rows)
    return named("optimizer_state_bytes", rows * size, "B")


def gradient_bytes(rows: Any, columns: Any, element_bytes: Any, sharding_type: str) -> Any:
    """Bytes of a shard's gradient: dense for a replica, fused into the update (none) elsewhere."""
    if sharding_type == "data_parallel":
        return named("gradient_bytes", rows * columns * element_bytes, "B")
    return noted(0, "gradient_bytes", "B", "fused: rows are updated in backward", like=rows)


def shard_bytes(
    rows: Any, columns: Any, dtype: str, kind: str, sharding_type: str
) -> dict[str, Any]:
    """Bytes that a shard keeps, by kind: weight, gradient, optimizer_state."""
    size = noted(ELEMENT_BYTES[dtype], "element_bytes", "B", f"dtype {dtype}", like=rows)
    return {
        "weight": weight_bytes(rows, columns, size),
        "gradient": gradient_bytes(rows, columns, size, sharding_type),
        "optimizer_state": optimizer_state_bytes(rows, kind),
    }


def ids_at_shard(ids: Any, ranks: Any, sharding_type: str) -> Any:
    """Ids that one shard serves per step; row shards share a table's ids evenly (assumed)."""
    if sharding_type in ("data_parallel", *ROW_TYPES):
        return named("ids_at_shard", ids, "ids")
    return named("ids_at_shard", ids * ranks, "ids")


def request_seconds(ids: Any, sharding_type: str, c: Any) -> Any:
    """Seconds that every rank spends to address its own ids of a table, whoever holds it.

    Row-wise ids are sorted by owner; the ids of a whole table all go to one rank as they are.
    """
    cost = c["sort_cost"] if sharding_type in ROW_TYPES else c["index_cost"]
    return named("request_seconds", ids * cost, "s")


def routed_seconds(
    served: Any, columns: Any, element_bytes: Any, ranks: Any, passes: Any, c: Any
) -> dict[str, Any]:
    """Seconds of one routed shard by phase: it serves ``served`` ids of the global batch.

    ``passes`` is how many touches of a row its update costs. ``c`` maps constant names to numbers
    or Amounts. Latencies of collectives are per step and counted by :func:`step_latencies`.
    """
    row = named("row_bytes", columns * element_bytes, "B")
    touch = named("row_seconds", row / c["memory_rate"] + c["row_latency"], "s")
    index = noted(INDEX_BYTES, "index_bytes", "B", "ids travel as int64", like=served)
    moved = network.transfer_seconds("all_to_all", served * row, ranks, c)
    return {
        "exchange_ids": named(
            "exchange_ids_seconds",
            network.transfer_seconds("all_to_all", served * index, ranks, c),
            "s",
        ),
        "lookup": named("lookup_seconds", served * touch, "s"),
        "exchange_rows": named("exchange_rows_seconds", moved, "s"),
        "reduce": named("exchange_gradients_seconds", moved, "s"),
        "step": named("update_seconds", served * touch * passes, "s"),
    }


def replicated_seconds(
    ids: Any, rows: Any, columns: Any, element_bytes: Any, ranks: Any, passes: Any, c: Any
) -> dict[str, Any]:
    """Seconds of one replica by phase: local lookups, a dense all-reduce, a dense update."""
    table = named("table_bytes", rows * columns * element_bytes, "B")
    row = named("row_bytes", columns * element_bytes, "B")
    touch = named("row_seconds", row / c["memory_rate"] + c["row_latency"], "s")
    reduce = network.transfer_seconds("all_reduce", table, ranks, c) + ids * touch
    return {
        "lookup": named("lookup_seconds", ids * touch, "s"),
        "reduce": named("all_reduce_seconds", reduce, "s"),
        "step": named("update_seconds", table * passes / c["memory_rate"], "s"),
    }


def shard_seconds(
    ids: Any,
    rows: Any,
    columns: Any,
    dtype: str,
    kind: str,
    ranks: Any,
    sharding_type: str,
    c: Any,
) -> dict[str, Any]:
    """Seconds per step of one shard by phase, updated by optimizer ``kind``."""
    size = noted(ELEMENT_BYTES[dtype], "element_bytes", "B", f"dtype {dtype}", like=ids)
    passes = c[f"{kind}_passes"]
    if sharding_type == "data_parallel":
        return replicated_seconds(ids, rows, columns, size, ranks, passes, c)
    served = ids_at_shard(ids, ranks, sharding_type)
    return routed_seconds(served, columns, size, ranks, passes, c)


# Collectives and eager operations of a step, whatever the number of tables: counts, ids and rows
# out, gradients back; one dense gradient for all replicas.
ROUTED_COLLECTIVES = {"exchange_ids": 2, "exchange_rows": 1, "reduce": 1}
ROUTED_OPERATIONS = {"exchange_ids": 20, "lookup": 4, "exchange_rows": 4, "reduce": 6, "step": 20}
REPLICATED_COLLECTIVES = {"reduce": 1}
REPLICATED_OPERATIONS = {"lookup": 4, "reduce": 6, "step": 8}


def step_latencies(
    routed: bool, replicated: bool, reduced: bool, ranks: int, c: Any
) -> dict[str, float]:
    """Seconds per step and phase that do not depend on the number of tables.

    ``reduced``: replicas have a collective of their own and do not ride with the row gradients.
    """
    seconds: dict[str, float] = {}

    def add(phase: str, value: float) -> None:
        seconds[phase] = seconds.get(phase, 0.0) + value

    if routed:
        _add_latencies(add, "all_to_all", ROUTED_COLLECTIVES, ROUTED_OPERATIONS, ranks, c)
    if replicated:
        collectives = REPLICATED_COLLECTIVES if reduced else {}
        _add_latencies(add, "all_reduce", collectives, REPLICATED_OPERATIONS, ranks, c)
    return seconds


def _add_latencies(
    add: Callable[[str, float], None],
    collective: network.Collective,
    collectives: dict[str, int],
    operations: dict[str, int],
    ranks: int,
    c: Any,
) -> None:
    for phase, count in operations.items():
        add(phase, count * c["operation_latency"])
    for phase, count in collectives.items():
        add(phase, count * network.latency_seconds(collective, ranks, c))
