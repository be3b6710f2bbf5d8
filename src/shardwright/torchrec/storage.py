"""What one rank's batch asks of a table shard, and its bytes by tier and kind, as TorchRec's
storage estimator counts them (1.9.2).

Numbers, arrays and Amounts alike. All that a formula branches on is in a :class:`ShardScheme` of
names and flags; all that it computes with is in :class:`Shards` and :class:`MeshSizes`. Bytes are
exact, the estimator's rounding included: sizes are products of doubles rounded up, and shares of a
table are true divisions of whole numbers. They need Python ints, Amounts of them, or object arrays.
"""

# Bytes are compared with TorchRec's estimator one by one, so its roundings are part of the
# formulas: ceil of a product of doubles here, `//` of whole numbers there, never the other way
# round. That is why bytes want Python ints or object arrays: int64 overflows for tables that
# TorchRec plans, and float64 misses by a byte. A term that TorchRec leaves out is left out, too,
# however real it is.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwright.core.amount import ceil, minimum, named, noted, rounded, total, where
from shardwright.core.cluster import Device, Tier, decisive
from shardwright.core.model import QUANTIZED
from shardwright.core.sharding import Traits, traits

CACHES = ("fused_uvm_caching", "quant_uvm_caching")  # in HBM, of a table in host memory
CACHED_KERNELS = (*CACHES, "key_value")
HOST_KERNELS = ("fused_uvm", "quant_uvm", *CACHES)
SCALE_BYTES = 4  # of a quantised row: fp16 scale and offset
PIPELINED_BATCHES = {  # inputs alive at once: the batch in use and those on their way
    "train_sparse_dist": 2,
    "train_prefetch_sparse_dist": 3,
}


class ShardScheme(NamedTuple):
    """How shards are kept and used: the names and flags that formulas branch on.

    ``prefetched``: rows are in HBM before a step asks for them. ``counted``: the cache's load
    factor and statistics are known. ``ephemeral``: outputs count at the peak of memory.
    """

    sharding_type: str
    kernel: str
    device: Device
    pooled: bool = True
    weighted: bool = False
    prefetched: bool = False
    counted: bool = False
    pipeline: str = "none"
    ephemeral: bool = False
    inference: bool = False

    @property
    def traits(self) -> Traits:
        """What the sharding type does to a table."""
        return traits(self.sharding_type)


class Shards(NamedTuple):
    """The quantities of a shard, or of many as arrays.

    ``rows`` and ``columns`` are the shard's; ``lookups`` are ids and ``outputs`` are rows out of
    one rank's batch. ``table_bytes``, ``output_bytes`` and the four of the wire are bytes of an
    element. ``load_factor`` is the cached share of rows that times rest on, ``cached_share`` the
    one that bytes rest on. ``misses`` is the miss rate of an empty cache.
    """

    rows: Any
    columns: Any
    table_rows: Any
    dim: Any
    lookups: Any
    outputs: Any
    element_bytes: Any
    output_bytes: Any
    forward_bytes: Any
    backward_bytes: Any
    forward_reduce_bytes: Any
    backward_reduce_bytes: Any
    state: Any
    load_factor: Any
    cached_share: Any
    key_value_share: Any
    l1_cache_bytes: Any
    passes: Any
    expected_lookups: Any
    misses: Any


class MeshSizes(NamedTuple):
    """All ranks, those of a host, and those linked as closely as a host's."""

    world: Any
    local: Any
    group: Any


def batch_lookups(lengths: Sequence[Any], poolings: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Ids that one rank's batch holds for a table: ids per bag, bags per sample, samples."""
    ids = [a * b * c for a, b, c in zip(lengths, poolings, sizes, strict=True)]
    return named("lookups", total(ids), "ids")


def batch_outputs(lengths: Sequence[Any], poolings: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Rows that one rank's batch gets back from a pooled table: at most one for a bag."""
    rows = [minimum(1.0, a) * b * c for a, b, c in zip(lengths, poolings, sizes, strict=True)]
    return named("outputs", total(rows), "rows")


def state_share(optimizer: str, dim: Any, c: Any) -> Any:
    """Optimizer state by weight; row-wise Adagrad's is spread over the columns of the table."""
    match optimizer:
        # By class as TorchRec goes: of an optimizer that it does not know it assumes one state as
        # large as the table, and so do we in this profile.
        case "none" | "sgd":
            return noted(0, "state_share", "", f"optimizer {optimizer} keeps nothing", like=dim)
        case "adam":
            return named("state_share", c["adam_state"])
        case "rowwise_adagrad":
            return named("state_share", c["rowwise_state_elements"] / dim)
        case _:
            return named("state_share", c["other_state"])


def served_lookups(scheme: ShardScheme, q: Shards, ranks: MeshSizes) -> Any:
    """Ids that a shard serves in a step: a replica its own rank's, another those of all ranks.

    Shards cut by rows share them evenly.
    """
    if scheme.traits.replicated:
        return named("served_lookups", q.lookups, "ids")
    # Shards cut by columns each see all ids of their table; shards cut by rows each get their part.
    ids = q.lookups
    if scheme.traits.cuts_rows:
        ids = ids / scheme.traits.row_parts(ranks.world, ranks.group)
    return named("served_lookups", ids * ranks.world, "ids")


def returned_rows(scheme: ShardScheme, q: Shards, ranks: MeshSizes) -> Any:
    """Rows that a shard hands out in a step.

    Each shard of a pooled table that is cut by rows hands out a partial sum for every bag.
    """
    if scheme.traits.replicated:
        return named("returned_rows", q.outputs, "rows")
    # Sums of a pooled table are partial: every shard hands out a row for every bag, whether or not
    # it has any of the bag's ids.
    rows = q.outputs
    if scheme.traits.cuts_rows and not scheme.pooled:
        rows = rows / scheme.traits.row_parts(ranks.world, ranks.group)
    return named("returned_rows", rows * ranks.world, "rows")


def id_bytes(lookups: Any, c: Any) -> Any:
    """Whole bytes of so many ids."""
    return named("id_bytes", ceil(lookups * c["index_bytes"]), "B")


def _home(scheme: ShardScheme) -> Tier:
    """The tier that holds a table as a whole; a key-value table is counted in HBM first."""
    on_host = scheme.device == "cpu" or scheme.kernel in HOST_KERNELS
    return "ddr" if on_host else "hbm"


def input_bytes(scheme: ShardScheme, q: Shards, ranks: MeshSizes, c: Any) -> Any:
    """Bytes of the ids of a step; none for a row shard without rows."""
    size = id_bytes(served_lookups(scheme, q, ranks), c)
    return named("input_bytes", _unless_empty(scheme, q, size), "B")


def output_bytes(scheme: ShardScheme, q: Shards, ranks: MeshSizes) -> Any:
    """Bytes of the rows handed out in a step; none for a row shard without rows."""
    rows = returned_rows(scheme, q, ranks)
    size = named("row_output_bytes", ceil(rows * q.columns * q.output_bytes), "B")
    return named("output_bytes", _unless_empty(scheme, q, size), "B")


def _unless_empty(scheme: ShardScheme, q: Shards, size: Any) -> Any:
    # TorchRec gives empty row shards no inputs and no outputs, and other shards that are empty
    # some.
    if not scheme.traits.cuts_rows:
        return size
    return where(q.rows * q.columns > 0, size, 0)


def table_bytes(scheme: ShardScheme, q: Shards) -> Any:
    """Bytes of the whole table; a quantised one has a scale and an offset for every row."""
    size = q.table_rows * q.dim * q.element_bytes
    if scheme.kernel in QUANTIZED:
        scale = noted(SCALE_BYTES, "scale_bytes", "B", "fp16 scale and offset", like=q.table_rows)
        size = size + q.table_rows * scale
    return named("table_bytes", size, "B")


def weight_bytes(scheme: ShardScheme, q: Shards, base: Any, tier: Tier) -> Any:
    """A shard's part of ``base`` bytes that all shards keep in ``tier``; a replica keeps all."""
    name = f"{tier}_weight_bytes"
    if scheme.traits.replicated:
        return named(name, base, "B")
    # A true division of whole numbers, as in TorchRec: one that is floored first would round shards
    # otherwise. A product comes before it, so that a shard of everything is everything.
    return named(name, ceil(base * (q.rows * q.columns) / (q.table_rows * q.dim)), "B")


def kept_bytes(scheme: ShardScheme, q: Shards, base: Any, tier: Tier) -> dict[str, Any]:
    """Weights and optimizer state in ``tier``; weights alone in inference or if quantised."""
    weight = weight_bytes(scheme, q, base, tier)
    if scheme.inference or scheme.kernel in QUANTIZED:
        return {"weight": weight}
    state = named(f"{tier}_optimizer_state_bytes", ceil(weight * q.state), "B")
    return {"weight": weight, "optimizer_state": state}


def bookkeeping_bytes(scheme: ShardScheme, q: Shards, c: Any) -> dict[str, Any]:
    """What a cache keeps for every row of the shard and every row it can hold."""
    if scheme.inference:
        return {}
    per_row = c["cache_row_bytes"] + c["cache_slot_bytes"] * q.cached_share
    return {"cache": named("bookkeeping_bytes", ceil(q.rows * per_row), "B")}


def key_value_cache_bytes(q: Shards) -> Any:
    """Bytes of a key-value table's cache in HBM, which every shard has for the whole table."""
    wanted = ceil(q.table_rows * q.key_value_share * q.element_bytes * q.dim)
    return named("key_value_cache_bytes", minimum(q.l1_cache_bytes, wanted), "B")


def stored_bytes(scheme: ShardScheme, q: Shards, c: Any) -> dict[Tier, dict[str, Any]]:
    """Bytes that a shard keeps from step to step, by tier and kind."""
    base = table_bytes(scheme, q)
    if scheme.kernel == "key_value":
        ssd = kept_bytes(scheme, q, base, "ssd") | bookkeeping_bytes(scheme, q, c)
        return {"hbm": {"cache": key_value_cache_bytes(q)}, "ssd": ssd}
    tier = _home(scheme)
    kept = {tier: kept_bytes(scheme, q, base, tier)}
    if scheme.kernel in CACHES:
        # The cache lies in HBM beside the whole table on the host, not instead of a part of it.
        cached = named("cached_bytes", rounded(base * q.cached_share), "B")
        in_cache = kept_bytes(scheme, q, cached, "hbm") | bookkeeping_bytes(scheme, q, c)
        return {"hbm": in_cache, **kept}
    return kept


def held_input_bytes(scheme: ShardScheme, size: Any, passes: Any, c: Any) -> Any:
    """Bytes of all inputs that are alive at once, those of a prefetch included."""
    name = "held_input_bytes"
    if scheme.device == "cpu" or scheme.pipeline not in PIPELINED_BATCHES:
        return named(name, size, "B")
    count = PIPELINED_BATCHES[scheme.pipeline]
    batches = noted(count, "batches", "", f"pipeline {scheme.pipeline}", like=size)
    held = batches * size
    if scheme.pipeline == "train_prefetch_sparse_dist" and scheme.kernel in CACHED_KERNELS:
        inputs = c["prefetch_input_base"] + c["prefetch_input_burst"] / passes
        # TorchRec truncates here and rounds up elsewhere.
        held = held + named("prefetch_bytes", ceil(inputs * size // 1), "B")
    return named(name, held, "B")


def transient_bytes(scheme: ShardScheme, q: Shards, ranks: MeshSizes, c: Any) -> dict[str, Any]:
    """Bytes of a step's inputs and outputs.

    A pipeline keeps several inputs and, unless ``ephemeral``, no outputs at the peak.
    """
    if scheme.inference:
        return {}
    size = input_bytes(scheme, q, ranks, c)
    kinds = {"input": held_input_bytes(scheme, size, q.passes, c)}
    pipelined = scheme.device != "cpu" and scheme.pipeline in PIPELINED_BATCHES
    # In a pipeline the outputs are gone when the next inputs are there, in TorchRec's count.
    if scheme.ephemeral or not pipelined:
        kinds["output"] = output_bytes(scheme, q, ranks)
    return kinds


def shard_bytes(
    scheme: ShardScheme, q: Shards, ranks: MeshSizes, c: Any
) -> dict[Tier, dict[str, Any]]:
    """Bytes of a shard by tier and kind: weight, optimizer_state, cache, input, output."""
    kinds = stored_bytes(scheme, q, c)
    tier = decisive(scheme.device)
    return {**kinds, tier: kinds.get(tier, {}) | transient_bytes(scheme, q, ranks, c)}
