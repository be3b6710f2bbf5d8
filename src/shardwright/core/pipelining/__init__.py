"""Which pass a rank of a pipeline runs when: schedules by name; how few microbatches show them."""

from __future__ import annotations

from shardwright.core.pipelining.flight import representative
from shardwright.core.pipelining.orders import Pass
from shardwright.core.pipelining.schedules import SCHEDULES, chunk_count, order, stage_of

__all__ = [
    "SCHEDULES",
    "Pass",
    "chunk_count",
    "order",
    "representative",
    "stage_of",
]
