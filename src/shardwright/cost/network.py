"""Seconds of a collective from its latency (alpha) and rate (beta), for n ranks of one group.

Every rank keeps its own share, so (n - 1)/n of the bytes cross a link and one rank pays nothing.
``nbytes`` is what one rank's full buffer holds. An all-reduce is a reduce-scatter followed by an
all-gather and moves its bytes twice. Each collective has constants of its own, for backends differ
more between collectives than between sizes. All functions take numbers, arrays or Amounts.

Of n ranks, ``local`` are on each host, and all on one where it is None. Bytes to ranks of the same
host go at the collective's rate, bytes to other hosts at the rank's share of the network, one
after the other: the seconds add up. In an exchange everything that is for another host leaves this
one. The other collectives take two stages, within hosts and between them, so of what one host's
ranks have in common only a part of 1/local leaves through each; on a machine with a clock
(:mod:`shardwright.cost.clock`) they are one ring, whose neighbours carry that part at once.
"""

from __future__ import annotations

from typing import Any, Literal

from shardwright.core.amount import minimum, root

Collective = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce"]

CROSSINGS: dict[Collective, int] = {
    "all_to_all": 1,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_reduce": 2,
}
RING = "collective_latency"  # a constant of machines with a clock


def transfer_seconds(
    collective: Collective, nbytes: Any, ranks: Any, c: Any, local: Any = None
) -> Any:
    """Seconds for the bytes alone; a part of a larger exchange pays no latency of its own."""
    crossing = nbytes if CROSSINGS[collective] == 1 else nbytes * CROSSINGS[collective]
    rate = c[f"{collective}_rate"]
    if local is None:
        return crossing * (ranks - 1) / ranks / rate
    # Every rank sends a part to each other one: of n parts, local - 1 stay on the host and n -
    # local leave it, all through this rank's share of the network.
    if collective == "all_to_all":
        near = crossing * (local - 1) / ranks
        far = crossing * (ranks - local) / ranks
    elif RING in c:
        return crossing * (ranks - 1) / ranks / minimum(c["inter_host_rate"] * local, rate)
    else:
        # In two stages: within the host each rank gets a part of 1/local of the bytes in common,
        # and only that part goes to its twins on other hosts.
        near = crossing * (local - 1) / local
        far = crossing * (ranks - local) / ranks / local
    return near / rate + far / c["inter_host_rate"]


def latency_seconds(collective: Collective, ranks: Any, c: Any, local: Any = None) -> Any:
    """Seconds of a collective of no bytes; nothing for a single rank."""
    # As a minimum, not a branch: ranks may be an Amount, and one rank then derives to 0 by the same
    # formula.
    latency = minimum(ranks - 1, 1) * c[f"{collective}_latency"]
    if local is None:
        return latency
    if RING in c and collective != "all_to_all":
        return latency * (1 + root(ranks / local))
    return latency + minimum(ranks - local, 1) * c["inter_host_latency"]


def among_replicas(c: Any, ranks: Any, local: Any = None) -> Any:
    """Constants ``c`` for ``ranks`` that have the same parameters, ``local`` of them on each host.

    On the network of a machine with a clock a sum begins when the last of them has its gradients,
    and crosses switches that others use: of more hosts the last is later, by the root of them.
    """
    if RING not in c or local is None:
        return c
    return {**c, "inter_host_rate": c["replica_rate"] / root(ranks / local)}


def collective_seconds(
    collective: Collective, nbytes: Any, ranks: Any, c: Any, local: Any = None
) -> Any:
    """Seconds of one whole collective."""
    alpha = latency_seconds(collective, ranks, c, local)
    return alpha + transfer_seconds(collective, nbytes, ranks, c, local)
