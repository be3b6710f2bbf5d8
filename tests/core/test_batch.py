from __future__ import annotations

import pytest

from shardwright.core.batch import Batch, lookups, outputs
from shardwright.core.model import TableSpec


def _table(**changes: object) -> TableSpec:
    return TableSpec("t", 10, 4, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "ids", "rows"),
    [
        (_table(), 8, 8),
        (_table(pooling_factors=(3.0,)), 24, 8),
        (_table(pooling_factors=(0.5,)), 4, 4),
        (_table(pooling_factors=(3.0,), pooled=False), 24, 24),
        (_table(pooling_factors=(3.0, 2.0), num_poolings=(1.0, 4.0)), 88, 40),
        (_table(pooling_factors=()), 0, 0),
    ],
)
def test_a_batch_brings_ids_and_takes_rows(table: TableSpec, ids: float, rows: float) -> None:
    assert lookups(table, Batch(8)) == ids
    assert outputs(table, Batch(8)) == rows
