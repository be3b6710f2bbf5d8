"""Seconds of a collective from its latency (alpha) and rate (beta), for n ranks of one group.

Every rank keeps its own share, so (n - 1)/n of the bytes cross a link and one rank pays nothing.
``nbytes`` is what one rank's full buffer holds. An all-reduce is a reduce-scatter followed by an
all-gather and moves its bytes twice. Each collective has constants of its own, for backends differ
more between collectives than between sizes. All functions take numbers, arrays or Amounts.
"""

from __future__ import annotations

from typing import Any, Literal

from shardwright.core.amount import minimum

Collective = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce"]

CROSSINGS: dict[Collective, int] = {
    "all_to_all": 1,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_reduce": 2,
}


def transfer_seconds(collective: Collective, nbytes: Any, ranks: Any, c: Any) -> Any:
    """Seconds for the bytes alone; a part of a larger exchange pays no latency of its own."""
    crossing = nbytes if CROSSINGS[collective] == 1 else nbytes * CROSSINGS[collective]
    return crossing * (ranks - 1) / ranks / c[f"{collective}_rate"]


def latency_seconds(collective: Collective, ranks: Any, c: Any) -> Any:
    """Seconds of a collective of no bytes; nothing for a single rank."""
    return minimum(ranks - 1, 1) * c[f"{collective}_latency"]


def collective_seconds(collective: Collective, nbytes: Any, ranks: Any, c: Any) -> Any:
    """Seconds of one whole collective."""
    return latency_seconds(collective, ranks, c) + transfer_seconds(collective, nbytes, ranks, c)
