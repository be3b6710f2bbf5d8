"""What a partitioner is, how its placements are rated, and how it says that there is no room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwright.core.cluster import Cluster
from shardwright.planner.proposing.candidate import MS_PER_SECOND, Bytes, Candidate, in_turn

Ranks = Sequence[int]  # the rank of each shard of one candidate


class OutOfTimeError(Exception):
    """The deadline passed while shards were being placed."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A shard, or all shards of a table for one host, that found no room.

    ``ranks`` is the rank or the host that came closest: it had ``available`` bytes by tier left of
    the ``needed`` ones.
    """

    table: str
    sharding_type: str
    ranks: tuple[int, ...]
    needed: Bytes
    available: Bytes

    @property
    def missing(self) -> Bytes:
        """Bytes by tier that were not there."""
        a, b, c = (max(0, n - a) for n, a in zip(self.needed, self.available, strict=True))
        return a, b, c


class NoRoomError(Exception):
    """A proposal does not fit."""

    def __init__(self, shortfall: Shortfall) -> None:
        super().__init__(f"no room for {shortfall.table}")
        self.shortfall = shortfall


class Partitioner(Protocol):
    """A way to place."""

    def place(
        self,
        proposal: Sequence[Candidate],
        cluster: Cluster,
        capacities: Sequence[Bytes],
        deadline: float,
    ) -> list[Ranks]:
        """The ranks of every candidate's shards, in the order of the proposal.

        :raises NoRoomError: they do not fit into ``capacities``, the bytes of each rank.
        :raises OutOfTimeError: ``deadline``, a moment of ``time.monotonic``, has passed.
        """
        ...


def rank_ms(proposal: Sequence[Candidate], placed: Sequence[Ranks], world_size: int) -> list[float]:
    """Milliseconds of each rank: the totals of its shards in the order of the proposal."""
    found = [0.0] * world_size
    for candidate, ranks in zip(proposal, placed, strict=True):
        if candidate.same_times and len(ranks) == world_size and candidate.partition == "uniform":
            total = candidate.runs[0][1].total
            found = [ms + total for ms in found]
        else:
            for load, rank in zip(candidate.loads, ranks, strict=True):
                found[rank] += load.total
    shared = in_turn(candidate.choice.everywhere for candidate in proposal) * MS_PER_SECOND
    return [ms + shared for ms in found] if shared else found
