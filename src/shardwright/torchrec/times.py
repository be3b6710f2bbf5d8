"""Seconds of a table shard in one step, as TorchRec's perf estimator counts them (1.9.2).

Bytes over bandwidth: no latencies, no overlap; what a rank sends to itself counts. Bandwidths
are bytes per millisecond and times are milliseconds until :func:`shard_seconds`.
"""

# This is what TorchRec believes and not what a machine does: sharding plans made under this profile
# are compared with those of its own planner, so that nobody has to trust another model of costs to
# switch. Its peculiarities (a replica reduced over one network card, narrow rows that are
# penalised, an input exchange that is shown and not counted) are kept, each where it is.

from __future__ import annotations

from typing import Any, NamedTuple

from shardwright.core.amount import maximum, minimum, named, noted, total, where
from shardwright.core.errors import InputError
from shardwright.core.model import QUANTIZED
from shardwright.core.timeline import Phase
from shardwright.torchrec.storage import (
    MeshSizes,
    Shards,
    ShardScheme,
    id_bytes,
    returned_rows,
    served_lookups,
)

MS_PER_SECOND = 1000
RING_PASSES = 2  # a ring all-reduce moves a gradient once to reduce it, once to spread the sum

# The parts of a step as TorchRec lists them, and the phase in which each passes.
PHASE_OF_PART: dict[str, Phase] = {
    "fwd_compute": "lookup",
    "fwd_comms": "exchange_rows",
    "bwd_compute": "backward",
    "bwd_comms": "reduce",
    "prefetch": "load",
}
PARTS = tuple(PHASE_OF_PART)


class MovedBytes(NamedTuple):
    """Bytes out of a shard, bytes of their gradients, and bytes per millisecond of its memory."""

    forward: Any
    backward: Any
    rate: Any


def memory_rate(scheme: ShardScheme, q: Shards, c: Any) -> Any:
    """Bytes per millisecond at which a kernel reads its table."""
    hbm, host = c["hbm_mem_bw"], c["hbm_to_ddr_mem_bw"]
    match scheme.device, scheme.kernel:
        case "cpu", "dense":
            rate = c["ddr_mem_bw"] * c["dense_share"]
        case "cpu", "fused" | "quant":
            rate = c["ddr_mem_bw"]
        case "cuda", "dense":
            rate = hbm * c["dense_share"]
        case "cuda", "fused" | "quant":
            rate = hbm
        case "cuda", "fused_uvm" | "quant_uvm":
            rate = host / c["uvm_divisor"]
        # Before the general case: rows that are prefetched are in HBM when the kernel reads them.
        case "cuda", "fused_uvm_caching" if scheme.prefetched:
            rate = hbm
        case "cuda", "fused_uvm_caching" | "quant_uvm_caching":
            mixed = q.load_factor * hbm + (1 - q.load_factor) * host
            rate = mixed / c["uvm_divisor"]
        case "cuda", "key_value":
            rate = c["ssd_mem_bw"]
        case _:
            wanted = "a kernel whose bandwidth TorchRec knows"
            raise InputError(f"kernel on {scheme.device}", wanted, f"'{scheme.kernel}'")
    return named("memory_rate", rate, "B/ms")


def link_rate(name: str, ranks: Any, close: Any, c: Any) -> Any:
    """Bytes per millisecond between ``ranks`` of which ``close`` are on one host."""
    return named(name, where(ranks <= close, c["intra_host_bw"], c["inter_host_bw"]), "B/ms")


def all_reduce_rate(ranks: MeshSizes, c: Any) -> Any:
    """Bytes per millisecond of an all-reduce: one network card per rank, even on one host."""
    return named("all_reduce_rate", c["inter_host_bw"] * ranks.local, "B/ms")


def block_penalty(columns: Any, c: Any) -> Any:
    """How much longer the lookup of a whole table's narrow rows takes."""
    narrow = where(columns >= c["medium_columns"], c["medium_penalty"], c["narrow_penalty"])
    penalty = where(columns >= c["wide_columns"], c["wide_penalty"], narrow)
    return named("block_penalty", penalty)


def flow(scheme: ShardScheme, q: Shards, ranks: MeshSizes, c: Any) -> MovedBytes:
    """What moves through a shard, in the dtypes of the collectives that move it.

    Partial sums of rows meet in a reduce-scatter; single rows are exchanged as they are. Quantised
    tables are sharded without codecs: their rows travel in the table's own dtype.
    """
    rows = named("returned_elements", returned_rows(scheme, q, ranks) * q.columns, "elements")
    forward, backward = q.forward_bytes, q.backward_bytes
    if scheme.traits.replicated or scheme.kernel in QUANTIZED:
        forward = backward = q.element_bytes
    elif scheme.traits.cuts_rows and (scheme.pooled or scheme.traits.rows_over == "host"):
        forward, backward = q.forward_reduce_bytes, q.backward_reduce_bytes
    return MovedBytes(
        named("forward_output_bytes", rows * forward, "B"),
        named("backward_output_bytes", rows * backward, "B"),
        memory_rate(scheme, q, c),
    )


def compute_times(
    scheme: ShardScheme, q: Shards, ranks: MeshSizes, moved: MovedBytes, c: Any
) -> dict[str, Any]:
    """Milliseconds of the kernels: read ids, read rows, write outputs; backward is a multiple."""
    served = served_lookups(scheme, q, ranks)
    ids = id_bytes(served, c)
    if scheme.weighted:
        ids = ids * c["weighted_input_multiplier"]
    # TorchRec widens narrow lookups and penalises narrow blocks for types that keep rows together,
    # and for no other.
    whole_rows = not (scheme.traits.replicated or scheme.traits.cuts_rows)
    width = maximum(q.columns, c["lookup_columns"]) if whole_rows else q.columns
    rows = named("lookup_bytes", served * width * q.element_bytes, "B")
    touched = ids + rows + moved.forward
    if whole_rows:
        touched = touched * block_penalty(q.columns, c)
    forward = named("fwd_compute_ms", touched / moved.rate, "ms")
    if scheme.inference:
        return {"fwd_compute": forward, "bwd_compute": _nothing("bwd_compute_ms", forward)}
    backward = forward * c["bwd_compute_multiplier"]
    if scheme.weighted:
        backward = backward * c["weighted_feature_bwd_compute_multiplier"]
        # After the multipliers: the gradient of weights is a kernel of its own, and not a longer
        # one.
        backward = backward + c["weighted_kernel_multiplier"] * forward
    return {"fwd_compute": forward, "bwd_compute": named("bwd_compute_ms", backward, "ms")}


def replica_times(q: Shards, ranks: MeshSizes, moved: MovedBytes, c: Any) -> dict[str, Any]:
    """Milliseconds of a replica's collectives: its gradient is all-reduced in backward.

    Hosts count up to a limit, beyond which the time is a multiple. Element-wise kernels that work
    on the gradient are counted here.
    """
    hosts = named("hosts", minimum(ranks.world / ranks.local, c["counted_hosts"]), "hosts")
    gradient = named("gradient_bytes", q.rows * q.columns * q.element_bytes, "B")
    # In TorchRec's own grouping: (2h - 1) / h and not 2 (h - 1) / h, which a ring would take.
    sent = gradient * (RING_PASSES * hosts - 1) / hosts
    many = ranks.world > c["counted_hosts"] * ranks.local
    crowd = named("crowd_multiplier", where(many, c["many_hosts_multiplier"], 1))
    reduce = named("all_reduce_ms", sent / all_reduce_rate(ranks, c) * crowd, "ms")
    kernels = c["element_wise_factor"] * gradient / moved.rate
    backward = named("bwd_comms_ms", reduce + kernels, "ms")
    return {"fwd_comms": _nothing("fwd_comms_ms", gradient), "bwd_comms": backward}


def exchange_times(
    scheme: ShardScheme, q: Shards, ranks: MeshSizes, moved: MovedBytes, c: Any
) -> dict[str, Any]:
    """Milliseconds of the collectives that move outputs forward and their gradients backward.

    Shards cut by rows copy gradients once more; those cut by rows of a group reduce inside the
    group first and then exchange sums between groups.
    """
    grouped = scheme.traits.rows_over == "host"
    # Shards within a group first reduce inside of it; what goes between groups is added below.
    width = ranks.group if grouped else ranks.world
    # A pod may be larger than a host, but its links count as a host's only up to the host.
    close = minimum(ranks.group, ranks.local) if grouped else ranks.local
    rate = link_rate("exchange_rate", width, close, c)
    there, back = moved.forward / rate, moved.backward / rate
    if scheme.traits.cuts_rows:
        back = back + c["batched_copy_factor"] * moved.backward / moved.rate
    if grouped:
        spent = between_groups(q, ranks, c)
        there, back = there + spent["forward"], back + spent["backward"]
    return {
        "fwd_comms": named("fwd_comms_ms", there, "ms"),
        "bwd_comms": named("bwd_comms_ms", back, "ms"),
    }


def between_groups(q: Shards, ranks: MeshSizes, c: Any) -> dict[str, Any]:
    """Milliseconds to exchange a batch's sums between groups, forward and backward."""
    groups = named("groups", maximum(1, ranks.world // ranks.group), "groups")
    sums = named("exchanged_sums", q.outputs * groups * q.columns, "elements")
    spent = {}
    for direction, size in ("forward", q.forward_bytes), ("backward", q.backward_bytes):
        time = where(groups > 1, sums * size / c["inter_host_bw"], 0.0)
        spent[direction] = named(f"{direction}_between_groups_ms", time, "ms")
    return spent


def communication_times(
    scheme: ShardScheme, q: Shards, ranks: MeshSizes, moved: MovedBytes, c: Any
) -> dict[str, Any]:
    """Milliseconds of a shard's collectives, forward and backward."""
    if scheme.traits.replicated:
        spent = replica_times(q, ranks, moved, c)
    else:
        spent = exchange_times(scheme, q, ranks, moved, c)
    if scheme.inference:
        spent["bwd_comms"] = _nothing("bwd_comms_ms", spent["fwd_comms"])
    return spent


def prefetch_time(scheme: ShardScheme, q: Shards, ranks: MeshSizes, c: Any) -> Any:
    """Milliseconds to fetch the rows that a cache misses; its miss rate falls linearly.

    Unknown, and counted as nothing, without a load factor and statistics.
    """
    # Zero and not an estimate: TorchRec has no time for a prefetch whose statistics nobody gave it.
    fetching = scheme.kernel == "fused_uvm_caching" and scheme.counted
    if not fetching or scheme.traits.replicated:
        return _nothing("prefetch_ms", q.columns)
    rate = named("miss_rate", q.misses * (1 - q.load_factor))
    rows = rate * q.expected_lookups
    if scheme.traits.cuts_rows:
        rows = rows / scheme.traits.row_parts(ranks.world, ranks.group)
    fetched = named("fetched_rows", rows, "rows")
    spent = fetched * q.columns * q.element_bytes / c["hbm_to_ddr_mem_bw"]
    return named("prefetch_ms", spent, "ms")


def input_dist_time(scheme: ShardScheme, q: Shards, ranks: MeshSizes, c: Any) -> Any:
    """Milliseconds to send a batch's ids to all ranks' shards; shown, but part of no total."""
    if scheme.traits.replicated:
        return _nothing("input_dist_ms", q.lookups)
    sent = id_bytes(q.lookups * ranks.world, c)
    rate = link_rate("input_dist_rate", ranks.world, ranks.local, c)
    return named("input_dist_ms", sent / rate, "ms")


def _nothing(name: str, like: Any) -> Any:
    return noted(0.0, name, "ms", "nothing to do", like=like)


def shard_seconds(scheme: ShardScheme, q: Shards, ranks: MeshSizes, c: Any) -> dict[str, Any]:
    """Seconds of a shard in one step by part, in the order of PARTS, then input_dist."""
    moved = flow(scheme, q, ranks, c)
    spent = {
        **compute_times(scheme, q, ranks, moved, c),
        **communication_times(scheme, q, ranks, moved, c),
        "prefetch": prefetch_time(scheme, q, ranks, c),
        "input_dist": input_dist_time(scheme, q, ranks, c),
    }
    scale = noted(MS_PER_SECOND, "ms_per_second", "ms", "unit", like=q.columns)
    return {part: named(part, spent[part] / scale, "s") for part in (*PARTS, "input_dist")}


def total_seconds(parts: dict[str, Any]) -> Any:
    """Seconds of a shard in one step; input_dist is no part of them."""
    return named("seconds", total(parts[part] for part in PARTS), "s")
