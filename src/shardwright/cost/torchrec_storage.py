"""Bytes of a table shard by tier and kind, as TorchRec's storage estimator counts them (1.9.2).

Exact to the byte, its rounding included: sizes are products of doubles rounded up, and shares of a
table are true divisions of whole numbers. Give Python ints, Amounts of them, or object arrays.
"""

from __future__ import annotations

from typing import Any

from shardwright.core.amount import ceil, ceil_div, minimum, named, noted, where
from shardwright.core.cluster import Tier
from shardwright.cost.torchrec import (
    CACHED_KERNELS,
    CACHES,
    HOST_KERNELS,
    QUANTIZED,
    REPLICATED,
    ROW_TYPES,
    Ranks,
    Scheme,
    Shards,
    id_bytes,
    returned_rows,
    served_lookups,
)

SCALE_BYTES = 4  # of a quantised row: fp16 scale and offset
PIPELINED_BATCHES = {  # inputs alive at once: the batch in use and those on their way
    "train_sparse_dist": 2,
    "train_prefetch_sparse_dist": 3,
}


def _home(scheme: Scheme) -> Tier:
    """The tier that holds a table as a whole; a key-value table is counted in HBM first."""
    on_host = scheme.device == "cpu" or scheme.kernel in HOST_KERNELS
    return "ddr" if on_host else "hbm"


def input_bytes(scheme: Scheme, q: Shards, ranks: Ranks, c: Any) -> Any:
    """Bytes of the ids of a step; none for a row shard without rows."""
    size = id_bytes(served_lookups(scheme, q, ranks), c)
    return named("input_bytes", _unless_empty(scheme, q, size), "B")


def output_bytes(scheme: Scheme, q: Shards, ranks: Ranks) -> Any:
    """Bytes of the rows handed out in a step; none for a row shard without rows."""
    rows = returned_rows(scheme, q, ranks)
    size = named("row_output_bytes", ceil(rows * q.columns * q.output_bytes), "B")
    return named("output_bytes", _unless_empty(scheme, q, size), "B")


def _unless_empty(scheme: Scheme, q: Shards, size: Any) -> Any:
    if scheme.sharding_type not in ROW_TYPES:
        return size
    return where(q.rows * q.columns > 0, size, 0)


def rounded(value: Any) -> Any:
    """The nearest whole number, ties to the even one, as an int."""
    value = named("exactly", value)
    low = named("rounded_down", ceil(value // 1))
    rest = named("rest", value - low)
    tie = ceil_div(low, 2) * 2
    return where(rest < 0.5, low, where(rest > 0.5, low + 1, tie))


def table_bytes(scheme: Scheme, q: Shards) -> Any:
    """Bytes of the whole table; a quantised one has a scale and an offset for every row."""
    size = q.table_rows * q.dim * q.element_bytes
    if scheme.kernel in QUANTIZED:
        scale = noted(SCALE_BYTES, "scale_bytes", "B", "fp16 scale and offset", like=q.table_rows)
        size = size + q.table_rows * scale
    return named("table_bytes", size, "B")


def weight_bytes(scheme: Scheme, q: Shards, base: Any, tier: Tier) -> Any:
    """A shard's part of ``base`` bytes that all shards keep in ``tier``; a replica keeps all."""
    name = f"{tier}_weight_bytes"
    if scheme.sharding_type == REPLICATED:
        return named(name, base, "B")
    return named(name, ceil(base * (q.rows * q.columns) / (q.table_rows * q.dim)), "B")


def kept_bytes(scheme: Scheme, q: Shards, base: Any, tier: Tier) -> dict[str, Any]:
    """Weights and optimizer state in ``tier``; weights alone in inference or if quantised."""
    weight = weight_bytes(scheme, q, base, tier)
    if scheme.inference or scheme.kernel in QUANTIZED:
        return {"weight": weight}
    state = named(f"{tier}_optimizer_state_bytes", ceil(weight * q.state), "B")
    return {"weight": weight, "optimizer_state": state}


def bookkeeping_bytes(scheme: Scheme, q: Shards, c: Any) -> dict[str, Any]:
    """What a cache keeps for every row of the shard and every row it can hold."""
    if scheme.inference:
        return {}
    per_row = c["cache_row_bytes"] + c["cache_slot_bytes"] * q.cached_share
    return {"cache": named("bookkeeping_bytes", ceil(q.rows * per_row), "B")}


def key_value_cache_bytes(q: Shards) -> Any:
    """Bytes of a key-value table's cache in HBM, which every shard has for the whole table."""
    wanted = ceil(q.table_rows * q.key_value_share * q.element_bytes * q.dim)
    return named("key_value_cache_bytes", minimum(q.l1_cache_bytes, wanted), "B")


def stored_bytes(scheme: Scheme, q: Shards, c: Any) -> dict[Tier, dict[str, Any]]:
    """Bytes that a shard keeps from step to step, by tier and kind."""
    base = table_bytes(scheme, q)
    if scheme.kernel == "key_value":
        ssd = kept_bytes(scheme, q, base, "ssd") | bookkeeping_bytes(scheme, q, c)
        return {"hbm": {"cache": key_value_cache_bytes(q)}, "ssd": ssd}
    tier = _home(scheme)
    kept = {tier: kept_bytes(scheme, q, base, tier)}
    if scheme.kernel in CACHES:
        cached = named("cached_bytes", rounded(base * q.cached_share), "B")
        in_cache = kept_bytes(scheme, q, cached, "hbm") | bookkeeping_bytes(scheme, q, c)
        return {"hbm": in_cache, **kept}
    return kept


def held_input_bytes(scheme: Scheme, size: Any, passes: Any, c: Any) -> Any:
    """Bytes of all inputs that are alive at once, those of a prefetch included."""
    name = "held_input_bytes"
    if scheme.device == "cpu" or scheme.pipeline not in PIPELINED_BATCHES:
        return named(name, size, "B")
    count = PIPELINED_BATCHES[scheme.pipeline]
    batches = noted(count, "batches", "", f"pipeline {scheme.pipeline}", like=size)
    held = batches * size
    if scheme.pipeline == "train_prefetch_sparse_dist" and scheme.kernel in CACHED_KERNELS:
        inputs = c["prefetch_input_base"] + c["prefetch_input_burst"] / passes
        held = held + named("prefetch_bytes", ceil(inputs * size // 1), "B")
    return named(name, held, "B")


def transient_bytes(scheme: Scheme, q: Shards, ranks: Ranks, c: Any) -> dict[str, Any]:
    """Bytes of a step's inputs and outputs.

    A pipeline keeps several inputs and, unless ``ephemeral``, no outputs at the peak.
    """
    if scheme.inference:
        return {}
    size = input_bytes(scheme, q, ranks, c)
    kinds = {"input": held_input_bytes(scheme, size, q.passes, c)}
    pipelined = scheme.device != "cpu" and scheme.pipeline in PIPELINED_BATCHES
    if scheme.ephemeral or not pipelined:
        kinds["output"] = output_bytes(scheme, q, ranks)
    return kinds


def shard_bytes(scheme: Scheme, q: Shards, ranks: Ranks, c: Any) -> dict[Tier, dict[str, Any]]:
    """Bytes of a shard by tier and kind: weight, optimizer_state, cache, input, output."""
    kinds = stored_bytes(scheme, q, c)
    tier: Tier = "ddr" if scheme.device == "cpu" else "hbm"
    return {**kinds, tier: kinds.get(tier, {}) | transient_bytes(scheme, q, ranks, c)}
