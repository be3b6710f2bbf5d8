"""How much data a rank sees in a step, and how many rows of each table that touches."""

from __future__ import annotations

import math

import msgspec

from shardwright.core.model import TableSpec

INDEX_BYTES = 8  # ids travel and are stored as int64


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``size`` samples per rank and step; ``sequence`` tokens per sample where that applies."""

    size: int
    sequence: int = 1


def lookups(table: TableSpec, batch: Batch) -> float:
    """Ids that one rank's batch holds for ``table``; an int where that is a whole number."""
    ids = sum(
        length * poolings * size
        for length, poolings, size in zip(
            table.pooling_factors, table.poolings, feature_batches(table, batch), strict=True
        )
    )
    return int(ids) if float(ids).is_integer() else ids


def outputs(table: TableSpec, batch: Batch) -> float:
    """Rows that one rank's batch gets back from ``table`` after pooling."""
    if not table.pooled:
        return lookups(table, batch)
    return sum(
        min(1.0, length) * poolings * size
        for length, poolings, size in zip(
            table.pooling_factors, table.poolings, feature_batches(table, batch), strict=True
        )
    )


def feature_batches(table: TableSpec, batch: Batch) -> tuple[int, ...]:
    """Samples of one rank for each feature of ``table``."""
    return table.batch_sizes or (batch.size,) * len(table.pooling_factors)


def expected_distinct(ids: int, rows: int) -> int:
    """Different rows among ``ids`` even draws from ``rows``, rounded."""
    return round(rows * -math.expm1(-ids / rows)) if rows else 0
