"""Bytes and seconds of a shard that depend on no other shard: the cost of sharding studies.

Rows are read in forward and, counted twice, in backward; they go through the network in forward
and back in backward. Nothing has a latency, and one rank exchanges nothing. Numbers, arrays or
Amounts alike.
"""

from __future__ import annotations

from typing import Any

from shardwright.core.amount import named
from shardwright.core.sharding import TYPES, traits

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
