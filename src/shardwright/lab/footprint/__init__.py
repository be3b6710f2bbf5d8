"""From a job to the memory of every class of its ranks, without running it."""

from __future__ import annotations

from shardwright.lab.footprint.estimate import footprint

__all__ = ["footprint"]
