"""One sharding type for all tables."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.sharding import ShardingType
from shardwright.planner.proposing.candidate import Candidate
from shardwright.planner.proposing.proposers.proposer import Offer, Proposals


@dataclass(frozen=True, slots=True)
class Uniform:
    """For each sharding type that every table has: the best option of that type of each."""

    use_depth: bool = True
    name: str = "uniform"

    def proposals(self, offer: Offer) -> Proposals:
        """One for each type, in the order in which the types first appear."""
        best: dict[ShardingType, list[Candidate]] = {}
        for ways in offer.by_score(self.use_depth):
            seen = set()
            for candidate in ways:
                sharding_type = candidate.choice.option.sharding_type
                if sharding_type not in seen:
                    seen.add(sharding_type)
                    best.setdefault(sharding_type, []).append(candidate)
        for sharding_type in _in_order(offer):
            if len(best[sharding_type]) == len(offer.tables):
                yield tuple(best[sharding_type])
        return None


def _in_order(offer: Offer) -> dict[ShardingType, None]:
    return dict.fromkeys(c.choice.option.sharding_type for ways in offer.tables for c in ways)
