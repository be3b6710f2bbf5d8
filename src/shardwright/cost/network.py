"""Seconds of a collective from a latency (alpha) and a rate (beta), for n ranks of one group.

Every rank keeps its own share, so (n - 1)/n of the bytes cross a link and one rank pays nothing.
``nbytes`` is what one rank's full buffer holds. All functions take numbers, arrays or Amounts.
"""

from __future__ import annotations

from typing import Any

from shardwright.core.amount import minimum


def exchange_seconds(nbytes: Any, ranks: Any, latency: Any, rate: Any) -> Any:
    """All-to-all, all-gather or reduce-scatter of a full buffer of ``nbytes`` per rank."""
    hops = minimum(ranks - 1, 1)
    return hops * latency + nbytes * (ranks - 1) / ranks / rate


def all_reduce_seconds(nbytes: Any, ranks: Any, latency: Any, rate: Any) -> Any:
    """Reduce-scatter followed by all-gather."""
    hops = minimum(ranks - 1, 1)
    return hops * latency + 2 * nbytes * (ranks - 1) / ranks / rate
