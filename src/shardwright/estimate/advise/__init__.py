"""The fastest layout of a model on a cluster that fits."""

from __future__ import annotations

from shardwright.estimate.advise.search import advise, fewest_ranks, job_of

__all__ = ["advise", "fewest_ranks", "job_of"]
