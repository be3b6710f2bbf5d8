"""Rows of a slower memory cached in a faster one: how many, their bytes, and how often they miss.

All functions take numbers, arrays or Amounts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.core.amount import ceil, maximum, minimum, named, noted
from shardwright.core.model import INDEX_BYTES_PER_ROW, STATE_BYTES_PER_SLOT


@dataclass(frozen=True, slots=True)
class Cache:
    """A shard's cache: the rows it holds, the miss rate of one that holds none, and the different
    rows that a step of all ranks asks of the whole table."""

    rows: Any
    miss_rate: Any
    distinct: Any


def cached_rows(rows: Any, load_factor: Any, limit: Any) -> Any:
    """Rows that are cached of a shard's ``rows``: a share of them, at most ``limit``."""
    return named("cached_rows", minimum(ceil(rows * load_factor), limit), "rows")


def cache_bytes(rows: Any, cached: Any, row_bytes: Any) -> Any:
    """Bytes of ``cached`` rows and of what finds them among a shard's ``rows``."""
    source = "slot of a row, int32"
    index = noted(INDEX_BYTES_PER_ROW, "index_bytes_per_row", "B", source, like=rows)
    source = "row and last use of a slot, int64"
    state = noted(STATE_BYTES_PER_SLOT, "state_bytes_per_slot", "B", source, like=rows)
    return named("cache_bytes", cached * (row_bytes + state) + rows * index, "B")


def fetched_rows(served: Any, rows: Any, parts: Any, cache: Cache) -> Any:
    """Rows that a shard of ``rows`` rows, one of ``parts``, brings into its cache per step.

    The miss rate falls linearly to none where the cache holds every row.
    """
    share = named("cached_share", cache.rows / maximum(rows, 1))
    missing = named("miss_rate", cache.miss_rate * (1 - share))
    return named("fetched_rows", minimum(served, missing * cache.distinct / parts), "rows")
