"""How much data a rank sees in a step, and how many rows of each table that touches."""

# How many different rows a batch touches decides caches, dense gradients and exchanges with dedup.
# Popularity is Zipf's; its sum over millions of ranks is taken exactly for the head, where single
# ids matter, and in stretches after it. A plan would change with sampling, so nothing is drawn.

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import msgspec
from msgspec import UNSET

from shardwright.core.model import TableSpec

INDEX_BYTES = 8  # ids travel and are stored as int64
MADE_UP_ZIPF = 1.2  # of made-up click logs: the exponent of the popularity of ids
_HEAD, _GROWTH = 100, 1.02  # ranks of popularity that count one by one, and stretches after them


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``size`` samples per rank and step; ``sequence`` tokens per sample where that applies.
    ``zipf`` is the exponent of the popularity of ids where it is known, 0 where all are alike."""

    size: int
    sequence: int = 1
    zipf: float = 0.0

    def zipf_of(self, table: TableSpec) -> float:
        """The exponent of the popularity of a table's ids: its own, or that of the data."""
        return self.zipf if table.zipf is UNSET else table.zipf


def lookups(table: TableSpec, batch: Batch) -> float:
    """Ids that one rank's batch holds for ``table``; an int where that is a whole number."""
    # An int where it is one: bytes are made of it, and a product with a float would be a float,
    # which plans write and compare otherwise.
    ids = sum(length * poolings * size for length, poolings, size in features(table, batch))
    return int(ids) if float(ids).is_integer() else ids


def outputs(table: TableSpec, batch: Batch) -> float:
    """Rows that one rank's batch gets back from ``table`` after pooling."""
    if not table.pooled:
        return lookups(table, batch)
    return sum(
        # A bag of less than one id on average is often empty, and an empty bag gives no row of its
        # own to look up: so many rows at most come back.
        min(1.0, length) * poolings * size
        for length, poolings, size in features(table, batch)
    )


def features(table: TableSpec, batch: Batch) -> Iterator[tuple[float, float, int]]:
    """Of each feature of ``table`` ids per bag, bags per sample and samples of one rank."""
    sizes = feature_batches(table, batch)
    return zip(table.pooling_factors, table.poolings, sizes, strict=True)


def feature_batches(table: TableSpec, batch: Batch) -> tuple[int, ...]:
    """Samples of one rank for each feature of ``table``."""
    return table.batch_sizes or (batch.size,) * len(table.pooling_factors)


def distinct_rows(table: TableSpec, batch: Batch) -> int:
    """Different rows of ``table`` among one rank's ids, expected."""
    return expected_distinct(round(lookups(table, batch)), table.rows, batch.zipf_of(table))


@lru_cache(maxsize=4096)
def expected_distinct(ids: int, rows: int, zipf: float = 0.0, parts: int = 1) -> int:
    """Different rows among ``ids`` draws from ``rows``, rounded: those of one of ``parts`` of a
    table, which are alike. Of the whole table rank r, from 1, is drawn in proportion to the
    integral of x^-zipf over [r, r + 1)."""
    whole, found = rows * parts, 0.0
    if not zipf:
        return round(rows * -math.expm1(-ids / rows)) if rows else 0
    # Of an id drawn with chance p among n draws, 1 - (1 - p)^n is expected; with e^(-n p) in its
    # place rare ids lose nothing that can be seen and frequent ones are there in any case.
    power = 1.0 - zipf or 1e-9  # not 0
    for begin, end in _stretches(whole):
        share = ((end + 1) ** power - (begin + 1) ** power) / ((whole + 1) ** power - 1)
        found += (end - begin) * -math.expm1(-ids * parts * share / (end - begin))
    return round(found / parts)


def _stretches(rows: int) -> Iterator[tuple[int, int]]:
    """Ranks of popularity from 0, cut where those in between are as good as alike."""
    begin = 0
    while begin < rows:
        end = min(rows, begin + 1 if begin < _HEAD else math.ceil(begin * _GROWTH))
        yield begin, end
        begin = end
