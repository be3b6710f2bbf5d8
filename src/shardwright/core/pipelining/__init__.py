"""Which pass a rank of a pipeline runs when: schedules by name; how few microbatches show them."""

from __future__ import annotations

from shardwright.core.pipelining.flight import representative
from shardwright.core.pipelining.orders import Pass, Run, expanded
from shardwright.core.pipelining.schedules import (
    SCHEDULES,
    chunk_count,
    order,
    order_in_runs,
    stage_of,
)

__all__ = [
    "SCHEDULES",
    "Pass",
    "Run",
    "chunk_count",
    "expanded",
    "order",
    "order_in_runs",
    "representative",
    "stage_of",
]
