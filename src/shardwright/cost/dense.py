"""Bytes and seconds of a dense unit, sharded evenly or replicated."""

from __future__ import annotations

from typing import Any

from shardwright.core.amount import named, where
from shardwright.core.optimizer_states import Elements
from shardwright.cost import network, optimizer


def unit_bytes(
    payload: Any,
    padding: Any,
    kind: str,
    trained: Any,
    trained_padding: Any,
    tensors: int = 1,
    elements: tuple[Elements, Elements] | None = None,
) -> dict[str, Any]:
    """Bytes that a rank keeps of a unit by kind; ``payload`` and ``padding`` are its share.

    What is ``trained`` of it, ``tensors`` to the optimizer, has a gradient and states. Where the
    optimizer quantizes some, ``elements`` are those of tensors and of padding.
    """
    own, rest = elements or (None, None)
    extra = optimizer.dense_padding_state_bytes(trained_padding, kind, rest)
    return {
        "weight": named("weight_bytes", payload, "B"),
        "gradient": named("gradient_bytes", trained, "B"),
        "optimizer_state": optimizer.dense_state_bytes(trained, kind, tensors, own),
        "padding": named("padding_bytes", padding + trained_padding + extra, "B"),
    }


def product_rate(dtype: str, c: Any) -> Any:
    """FLOP/s of products in a dtype: ``compute_rate``, which is fp32's, where the machine has no
    rate of its own for it."""
    name = f"{dtype}_compute_rate"
    return c[name if name in c else "compute_rate"]


def compute_seconds(calls: Any, flops: Any, moved: Any, c: Any, dtype: str = "fp32") -> Any:
    """Seconds of ``calls`` of operators: the FLOPs of products in ``dtype``, bytes ``moved`` by all
    others."""
    products = flops / product_rate(dtype, c)
    # What arrays of 64 MiB reach says little of a job whose tensors fit a cache.
    rate = c["elementwise_rate" if "elementwise_rate" in c else "memory_rate"]
    return products + moved / rate + calls * c["operation_latency"]


def fresh_seconds(nbytes: Any, c: Any, what: str = "buffer") -> Any:
    """Seconds to touch a new buffer for the first time; ``what`` it holds names the result.

    Smaller buffers are memory that an earlier one left behind. Above ``fresh_memory_bytes`` the
    allocator asks the system for every buffer and gives it back after use, so each use maps and
    clears all of its pages anew. This is why large units of several layers can be slower than
    their layers alone.
    """
    touched = where(nbytes > c["fresh_memory_bytes"], nbytes / c["fresh_memory_rate"], 0.0)
    return named(f"fresh_{what}_seconds", touched, "s")


def communication_seconds(
    buffer_bytes: Any,
    shard_bytes: Any,
    ranks: Any,
    *,
    sharded: bool,
    stays: bool = False,
    c: Any,
    local: Any = None,
) -> dict[str, Any]:
    """Seconds of one ``gather`` and one ``reduce`` of a unit, with the buffers that they fill.

    A gather fills the whole buffer, a new one unless it ``stays``. A reduce-scatter fills as much
    with the parts of all ranks, and a shard with their sum; an all-reduce works in place. ``local``
    of the ranks are on each host; None where all are on one.
    """
    if not sharded:
        c = network.among_replicas(c, ranks, local)
        reduced = network.collective_seconds("all_reduce", buffer_bytes, ranks, c, local)
        return {"gather": 0.0, "reduce": named("all_reduce_seconds", reduced, "s")}
    whole = fresh_seconds(buffer_bytes, c)
    gathered = network.collective_seconds("all_gather", buffer_bytes, ranks, c, local)
    # Parameters that stay are gathered into the buffer that they were in; others get a new one each
    # time, whose pages have to be mapped first.
    if not stays:
        gathered = gathered + whole
    scattered = network.collective_seconds("reduce_scatter", buffer_bytes, ranks, c, local) + whole
    return {
        "gather": named("gather_seconds", gathered, "s"),
        "reduce": named(
            "reduce_scatter_seconds", scattered + fresh_seconds(shard_bytes, c, "shard"), "s"
        ),
    }


def replica_seconds(
    kept_bytes: Any, reduced_bytes: Any, replicas: Any, *, twice: bool, c: Any, local: Any = None
) -> dict[str, Any]:
    """Seconds beside those of :func:`communication_seconds` among shards: replicas of a shard add
    up its gradient, of ``reduced_bytes``. Where these cut it again, each sums a part, and before
    the first ``gather`` of a step they send each other the parts of ``kept_bytes`` that they
    updated. ``local`` of them are on each host."""
    c = network.among_replicas(c, replicas, local)
    if not twice:
        summed = network.collective_seconds("all_reduce", reduced_bytes, replicas, c, local)
        return {"gather": 0.0, "reduce": named("replicas_reduced_seconds", summed, "s")}
    filled = network.collective_seconds("all_gather", kept_bytes, replicas, c, local)
    summed = network.collective_seconds("reduce_scatter", reduced_bytes, replicas, c, local)
    return {
        "gather": named("replicas_gathered_seconds", filled, "s"),
        "reduce": named("replicas_reduced_seconds", summed, "s"),
    }


def gradient_seconds(buffer_bytes: Any, c: Any) -> Any:
    """Seconds to clear the buffer of a unit's gradient and to add up the gradient in it."""
    seconds = buffer_bytes / c["memory_rate"] + fresh_seconds(buffer_bytes, c, "gradient")
    return named("gradient_seconds", seconds, "s")


def copy_seconds(nbytes: Any, c: Any, *, away: bool) -> Any:
    """Seconds to copy a share between host memory and that of the device, which is another one
    where it is ``away``."""
    rate = c["host_link_rate" if away else "memory_rate"]
    return named("host_copy_seconds", nbytes / rate, "s")


def update_seconds(state_bytes: Any, c: Any, *, away: bool = False) -> Any:
    """Seconds of the optimizer over ``state_bytes`` (weights, gradients and states together), which
    are ``away`` in the host's memory."""
    rate = c["ddr_rate" if away else "memory_rate"]
    return named("update_seconds", state_bytes / rate + c["operation_latency"], "s")
