"""What one rank's batch asks of a table shard, by TorchRec's planner (release 1.9.2).

Numbers, arrays and Amounts alike. All that a formula branches on is in a :class:`Scheme` of names
and flags; all that it computes with is in :class:`Shards` and :class:`Ranks`. Bytes need exact
Python numbers: ints, Amounts of ints, or object arrays of ints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwright.core.amount import ceil, minimum, named, noted, total

REPLICATED = "data_parallel"
ROW_TYPES = ("row_wise", "table_row_wise", "grid_shard")
QUANTIZED = ("quant", "quant_uvm", "quant_uvm_caching")  # in inference only
CACHES = ("fused_uvm_caching", "quant_uvm_caching")  # in HBM, of a table in host memory
CACHED_KERNELS = (*CACHES, "key_value")
HOST_KERNELS = ("fused_uvm", "quant_uvm", *CACHES)


class Scheme(NamedTuple):
    """How shards are kept and used: the names and flags that formulas branch on.

    ``prefetched``: rows are in HBM before a step asks for them. ``counted``: the cache's load
    factor and statistics are known. ``ephemeral``: outputs count at the peak of memory.
    """

    sharding_type: str
    kernel: str
    device: str
    pooled: bool = True
    weighted: bool = False
    prefetched: bool = False
    counted: bool = False
    pipeline: str = "none"
    ephemeral: bool = False
    inference: bool = False


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


class Ranks(NamedTuple):
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
        case "none" | "sgd":
            return noted(0, "state_share", "", f"optimizer {optimizer} keeps nothing", like=dim)
        case "adam":
            return named("state_share", c["adam_state"])
        case "rowwise_adagrad":
            return named("state_share", c["rowwise_state_elements"] / dim)
        case _:
            return named("state_share", c["other_state"])


def row_parts(scheme: Scheme, ranks: Ranks) -> Any:
    """How many shards share the ids of a table that is cut by rows."""
    return ranks.world if scheme.sharding_type == "row_wise" else ranks.group


def served_lookups(scheme: Scheme, q: Shards, ranks: Ranks) -> Any:
    """Ids that a shard serves in a step: a replica its own rank's, another those of all ranks.

    Shards cut by rows share them evenly.
    """
    if scheme.sharding_type == REPLICATED:
        return named("served_lookups", q.lookups, "ids")
    ids = q.lookups
    if scheme.sharding_type in ROW_TYPES:
        ids = ids / row_parts(scheme, ranks)
    return named("served_lookups", ids * ranks.world, "ids")


def returned_rows(scheme: Scheme, q: Shards, ranks: Ranks) -> Any:
    """Rows that a shard hands out in a step.

    Each shard of a pooled table that is cut by rows hands out a partial sum for every bag.
    """
    if scheme.sharding_type == REPLICATED:
        return named("returned_rows", q.outputs, "rows")
    rows = q.outputs
    if scheme.sharding_type in ROW_TYPES and not scheme.pooled:
        rows = rows / row_parts(scheme, ranks)
    return named("returned_rows", rows * ranks.world, "rows")


def id_bytes(lookups: Any, c: Any) -> Any:
    """Whole bytes of so many ids."""
    return named("id_bytes", ceil(lookups * c["index_bytes"]), "B")
