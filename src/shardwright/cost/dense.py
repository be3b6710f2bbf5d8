"""Bytes and seconds of a dense unit, sharded evenly or replicated."""

from __future__ import annotations

from typing import Any

from shardwright.core.amount import named
from shardwright.core.model import Stage
from shardwright.cost import network, optimizer


def unit_bytes(payload: Any, padding: Any, kind: str) -> dict[str, Any]:
    """Bytes that a rank keeps of a unit by kind; ``payload`` and ``padding`` are its share."""
    padded = padding + padding + optimizer.dense_padding_state_bytes(padding, kind)
    return {
        "weight": named("weight_bytes", payload, "B"),
        "gradient": named("gradient_bytes", payload, "B"),
        "optimizer_state": optimizer.dense_state_bytes(payload, kind),
        "padding": named("padding_bytes", padded, "B"),
    }


def compute_seconds(flops: Any, operations: Any, c: Any) -> Any:
    """Seconds of ``flops`` in ``operations`` eager calls."""
    return flops / c["compute_rate"] + operations * c["operation_latency"]


def communication_seconds(
    buffer_bytes: Any, ranks: Any, *, sharded: bool, gathers: int, c: Any, local: Any = None
) -> dict[str, Any]:
    """Seconds of a unit's collectives by direction: ``gather`` (one) and ``reduce``.

    ``local`` of the ranks are on each host; None where all are on one.
    """
    if not sharded:
        reduced = network.collective_seconds("all_reduce", buffer_bytes, ranks, c, local)
        return {"gather": 0.0, "reduce": named("all_reduce_seconds", reduced, "s")}
    gathered = network.collective_seconds("all_gather", buffer_bytes, ranks, c, local)
    scattered = network.collective_seconds("reduce_scatter", buffer_bytes, ranks, c, local)
    return {
        "gather": named("gather_seconds", gathered * gathers, "s"),
        "reduce": named("reduce_scatter_seconds", scattered, "s"),
    }


def update_seconds(state_bytes: Any, c: Any) -> Any:
    """Seconds of the optimizer over ``state_bytes`` (weights, gradients and states together)."""
    return named("update_seconds", state_bytes / c["memory_rate"] + c["operation_latency"], "s")


def stage_flops(stage: Stage, batch_size: int) -> tuple[int, int, int, int]:
    """FLOPs and operation counts of a stage: forward FLOPs and calls, backward FLOPs and calls."""
    forward = sum(work.flops_per_sample for work in stage.forward) * batch_size
    backward = sum(work.flops_per_sample for work in stage.backward) * batch_size
    return forward, len(stage.forward), backward, len(stage.backward)
