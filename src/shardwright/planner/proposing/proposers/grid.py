"""Every combination of options."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from shardwright.planner.proposing.proposers.proposer import Offer, Proposals


@dataclass(frozen=True, slots=True)
class Grid:
    """All combinations, best options first; none at all if they are more than the cap."""

    max_proposals: int = 10_000
    name: str = "grid"

    def proposals(self, offer: Offer) -> Proposals:
        """The product of all options, the last table's changing fastest."""
        count = math.prod(len(ways) for ways in offer.tables)
        if count > self.max_proposals:
            told = f"{count:,}" if count < 10**9 else f"about 10^{math.log10(count):.0f}"
            return f"{told} combinations, more than max_proposals = {self.max_proposals:,}"
        for proposal in itertools.product(*offer.by_score(use_depth=True)):  # noqa: UP028
            yield proposal  # not "yield from": a product takes no verdicts
        return None
