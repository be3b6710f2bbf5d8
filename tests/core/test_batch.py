from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.batch import Batch, expected_distinct, feature_batches, lookups, outputs
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
        (_table(pooling_factors=(0.0, 2.0)), 16, 8),
        (_table(pooling_factors=(3.0, 0.5), batch_sizes=(4, 100)), 62, 54),
        (_table(pooling_factors=(2.0,), num_poolings=(3.0,), batch_sizes=(5,)), 30, 15),
    ],
)
def test_a_batch_brings_ids_and_takes_rows(table: TableSpec, ids: float, rows: float) -> None:
    assert lookups(table, Batch(8)) == ids
    assert outputs(table, Batch(8)) == rows


def test_ids_are_a_whole_number_where_they_are_one() -> None:
    assert isinstance(lookups(_table(pooling_factors=(0.5,)), Batch(8)), int)
    assert lookups(_table(pooling_factors=(0.3,)), Batch(1)) == 0.3


def test_a_feature_has_the_batch_of_the_job_where_it_has_none_of_its_own() -> None:
    factors = (1.0, 1.0)
    assert feature_batches(_table(pooling_factors=factors), Batch(8)) == (8, 8)
    given_sizes = _table(pooling_factors=factors, batch_sizes=(3, 4))
    assert feature_batches(given_sizes, Batch(8)) == (3, 4)


@given(st.integers(0, 10**6), st.integers(1, 10**9))
def test_different_rows_are_never_more_than_the_ids_or_the_table(ids: int, rows: int) -> None:
    assert min(ids, 1) <= expected_distinct(ids, rows) <= min(ids, rows)


def test_even_draws_meet_two_thirds_of_a_table_of_as_many_rows() -> None:
    assert expected_distinct(1000, 1000) == 632  # 1 - 1/e


@given(st.integers(0, 10**6), st.integers(1, 10**9))
def test_popular_ids_repeat_more_than_even_ones(ids: int, rows: int) -> None:
    assert expected_distinct(ids, rows, zipf=1.2) <= expected_distinct(ids, rows) + 1


def test_parts_of_a_table_share_its_different_rows() -> None:
    whole = expected_distinct(800, 50_000, zipf=1.2)
    assert 4 * expected_distinct(200, 12_500, zipf=1.2, parts=4) == pytest.approx(whole, abs=4)
    assert expected_distinct(200, 12_500, parts=4) == expected_distinct(200, 12_500)


def test_an_empty_table_has_no_different_rows() -> None:
    assert expected_distinct(5, 0) == 0
