from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.imbalance import imbalance

LOADS = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=40).filter(any)


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_even_ranks_have_no_imbalance(ranks: int) -> None:
    found = imbalance([3.5] * ranks)
    assert found is not None
    measures = (found.total_variation, found.total_distance, found.chi, found.kl)
    assert measures == pytest.approx((0, 0, 0, 0), abs=1e-15)


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_one_rank_with_everything_is_the_most_there_can_be(ranks: int) -> None:
    found = imbalance([0.0] * (ranks - 1) + [8.0])
    assert found is not None
    assert found.total_variation == pytest.approx((ranks - 1) / ranks)
    assert found.total_distance == pytest.approx(2 * (ranks - 1) / ranks)
    assert (found.chi, found.kl) == pytest.approx((1, 1))


def test_ranks_without_any_load_have_no_measure() -> None:
    assert imbalance([0.0, 0.0]) is None


def test_the_measures_of_one_to_three_are_those_worked_out_by_hand() -> None:
    found = imbalance([1.0, 3.0])
    assert found is not None
    assert (found.total_variation, found.total_distance) == (0.25, 0.5)
    assert found.chi == pytest.approx(0.25)
    assert found.kl == pytest.approx(0.25 * math.log2(0.5) + 0.75 * math.log2(1.5))


@given(LOADS, st.floats(1e-3, 1e3))
def test_measures_keep_their_ranges_and_know_no_unit(loads: list[float], unit: float) -> None:
    found, scaled = imbalance(loads), imbalance([load * unit for load in loads])
    assert found is not None
    assert scaled is not None
    assert found.total_variation <= found.total_distance + 1e-12 < 2 + 1e-9
    assert -1e-12 <= found.chi <= 1 + 1e-12
    assert -1e-12 <= found.kl <= 1 + 1e-12
    for name in ("total_variation", "total_distance", "chi", "kl"):
        assert getattr(scaled, name) == pytest.approx(getattr(found, name), abs=1e-9)
