"""The fastest layout of a model on a cluster that fits."""

from __future__ import annotations

from shardwright.estimate.advise.search import Wanted, advise, fewest_ranks

__all__ = ["Wanted", "advise", "fewest_ranks"]
