"""Chooses a placement for every table and unit inside one memory budget per rank."""

from __future__ import annotations

from shardwright.planner.planner import plan

__all__ = ["plan"]
