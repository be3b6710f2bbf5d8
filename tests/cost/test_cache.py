from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost import embedding as cache
from shardwright.cost.embedding import Cache

CASES: dict[str, Callable[[Any], Any]] = {
    "cached_rows": lambda v: cache.cached_rows(v.rows, v.share, v.limit),
    "cache_bytes": lambda v: cache.cache_bytes(v.rows, v.limit, v.row),
    "fetched_rows": lambda v: cache.fetched_rows(
        v.served, v.rows, v.parts, Cache(cache.cached_rows(v.rows, v.share, v.rows), v.miss, v.ids)
    ),
}
SAMPLES = st.lists(
    st.fixed_dictionaries(
        {
            "rows": st.integers(0, 2**40),
            "share": st.floats(0, 1),
            "limit": st.integers(0, 2**32),
            "row": st.integers(1, 4096),
            "served": st.integers(0, 2**32),
            "parts": st.integers(1, 4096),
            "miss": st.floats(0, 1),
            "ids": st.integers(0, 2**32),
        }
    ),
    min_size=1,
    max_size=3,
)


def test_every_function_is_evaluated_in_three_ways(
    public_functions: Callable[[ModuleType], set[str]],
) -> None:
    assert {name for name in public_functions(cache) if "cache" in name or "fetched" in name} == {
        *CASES
    }


@pytest.mark.parametrize("name", CASES)
@given(samples=SAMPLES)
def test_numbers_arrays_and_amounts_agree(
    agree: Callable[..., None], name: str, samples: list[dict[str, float]]
) -> None:
    agree(CASES[name], samples, "h100-8")


def test_a_share_of_the_rows_is_cached_and_rounded_up() -> None:
    assert cache.cached_rows(11, 0.2, 11) == 3


def test_a_cache_has_a_largest_size() -> None:
    assert cache.cached_rows(1000, 0.2, 7) == 7


def test_a_cache_keeps_rows_their_slots_and_an_index_of_all_rows() -> None:
    assert cache.cache_bytes(100, 20, 64) == 20 * 64 + 20 * 16 + 100 * 4


def test_misses_fall_linearly_to_none() -> None:
    fetched = [cache.fetched_rows(80, 100, 1, Cache(n, 0.5, 80)) for n in (0, 50, 100)]
    assert fetched == [40, 20, 0]


def test_parts_of_a_table_share_what_is_fetched() -> None:
    assert cache.fetched_rows(80, 100, 4, Cache(0, 1.0, 80)) == 20


@given(
    served=st.integers(0, 2**32),
    rows=st.integers(0, 2**32),
    share=st.floats(0, 1),
    miss=st.floats(0, 100),
    ids=st.integers(0, 2**32),
)
def test_no_more_is_fetched_than_is_asked_for(
    served: int, rows: int, share: float, miss: float, ids: int
) -> None:
    held = cache.cached_rows(rows, share, rows)
    assert 0 <= held <= rows
    assert 0 <= cache.fetched_rows(served, rows, 1, Cache(held, miss, ids)) <= served
