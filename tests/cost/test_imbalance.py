from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.amount import Amount, Step, derivation, leaf, plain
from shardwright.planner.statistics.ranks import RankGroup, each_rank, mean, unevenness
from shardwright.planner.statistics.records import Unevenness

LOADS = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=40).filter(any)
MEASURES = ("largest_deviation", "total_distance", "chi", "relative_entropy")


def _found(loads: Sequence[float]) -> Unevenness:
    found = unevenness("seconds", each_rank(loads))
    assert found is not None
    return found


def _measures(loads: Sequence[float]) -> list[float]:
    found = _found(loads)
    return [getattr(found, name) for name in MEASURES]


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_even_ranks_have_no_imbalance(ranks: int) -> None:
    assert _measures([3.5] * ranks) == pytest.approx([0, 0, 0, 0], abs=1e-15)


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_one_rank_with_everything_is_the_most_there_can_be(ranks: int) -> None:
    found = _found([0.0] * (ranks - 1) + [8.0])
    most = (ranks - 1) / ranks
    assert (found.highest_deviation, found.highest_distance) == (most, 2 * most)
    assert (found.largest_deviation, found.total_distance) == pytest.approx((most, 2 * most))
    assert (found.chi, found.relative_entropy) == pytest.approx((1, 1))


def test_ranks_without_any_load_have_no_measure() -> None:
    assert unevenness("seconds", each_rank([0.0, 0.0])) is None


def test_the_measures_of_one_to_three_are_those_worked_out_by_hand() -> None:
    entropy = 0.25 * math.log2(0.5) + 0.75 * math.log2(1.5)
    assert _measures([1.0, 3.0]) == pytest.approx([0.25, 0.5, 0.25, entropy])


@given(LOADS, st.floats(1e-3, 1e3))
def test_measures_keep_their_ranges_and_know_no_unit(loads: list[float], unit: float) -> None:
    largest, total, chi, entropy = found = _measures(loads)
    assert largest <= total + 1e-12 < 2 + 1e-9
    assert -1e-12 <= chi <= 1 + 1e-12
    assert 0 <= entropy <= 1 + 1e-12
    assert _measures([load * unit for load in loads]) == pytest.approx(found, abs=1e-9)


def _as_amounts(groups: Sequence[RankGroup]) -> list[RankGroup]:
    return [
        group._replace(value=leaf(group.value, f"load[{number}]", "s"), label=f"{number}")
        for number, group in enumerate(groups)
    ]


GROUPS = st.lists(
    st.tuples(st.floats(0, 1e6, allow_subnormal=False), st.integers(1, 5)), min_size=1, max_size=40
).filter(lambda pairs: any(value for value, _ in pairs))


@pytest.mark.slow
@given(GROUPS)
def test_numbers_and_amounts_give_one_result_which_is_derived(
    reevaluate: Callable[[Sequence[Step]], None], pairs: list[tuple[float, int]]
) -> None:
    groups = [RankGroup(value, range(count)) for value, count in pairs]
    amounts = _as_amounts(groups)
    numbers, derived = unevenness("seconds", groups), unevenness("seconds", amounts)
    assert numbers is not None
    assert derived is not None
    few = len(pairs) <= 16  # more are added part by part, and round otherwise
    for name in MEASURES:
        found, amount = getattr(numbers, name), getattr(derived, name)
        assert type(found) is float
        assert isinstance(amount, Amount)
        assert amount.value == (found if few else pytest.approx(found, rel=1e-9, abs=1e-12))
        reevaluate(derivation(amount))
    usual = mean("load", amounts, "s")
    assert usual.value == pytest.approx(mean("load", groups, "s"), rel=1e-13)
    reevaluate(derivation(usual))


@given(GROUPS)
def test_ranks_counted_together_are_as_uneven_as_one_by_one(pairs: list[tuple[float, int]]) -> None:
    together = unevenness("seconds", [RankGroup(value, range(count)) for value, count in pairs])
    alone = unevenness("seconds", each_rank(v for v, count in pairs for _ in range(count)))
    for name in MEASURES:
        assert plain(getattr(together, name)) == pytest.approx(getattr(alone, name), abs=1e-9)
