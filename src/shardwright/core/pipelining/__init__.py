"""Which pass a rank of a pipeline runs when: schedules by name, and what they keep in flight."""

from __future__ import annotations

from shardwright.core.pipelining.flight import in_flight, representative
from shardwright.core.pipelining.orders import Pass
from shardwright.core.pipelining.schedules import SCHEDULES, chunk_count, order, stage_of

__all__ = [
    "SCHEDULES",
    "Pass",
    "chunk_count",
    "in_flight",
    "order",
    "representative",
    "stage_of",
]
