"""Everything but the table and the option that a price depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from shardwright.core.amount import Amount
from shardwright.core.batch import Batch
from shardwright.core.cluster import Cluster, Tier
from shardwright.core.planning import EstimatorSection


@dataclass(frozen=True)
class PricingContext:
    """The machine, the batch of one rank, and what a step keeps alive."""

    cluster: Cluster
    batch: Batch
    estimator: EstimatorSection = field(default_factory=EstimatorSection)

    @cached_property
    def values(self) -> dict[str, float]:
        """The cluster's constants by name."""
        return self.cluster.values


@dataclass(frozen=True, slots=True)
class Derived:
    """One shard's price as derivations: seconds per step, and bytes by tier."""

    seconds: Amount
    storage: dict[Tier, Amount]
