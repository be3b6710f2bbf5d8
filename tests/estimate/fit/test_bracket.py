"""The border between what fits and what does not, on needs made up."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.footprint import Largest
from shardwright.estimate.fit.search import largest, smallest

MOST = 60
STEPS = st.lists(st.integers(0, 50), min_size=MOST, max_size=MOST)


def _needs(steps: list[int]) -> list[int]:
    """The need of every size from 1 on, never less than that of the size before."""
    return list(itertools.accumulate(steps))


class Counted:
    """A need that knows how often it was asked for."""

    def __init__(self, slope: int, fixed: int) -> None:
        self.slope, self.fixed, self.times = slope, fixed, 0

    def __call__(self, size: int) -> int:
        self.times += 1
        return self.fixed + self.slope * size


@given(STEPS, st.integers(0, 1500), st.integers(1, MOST))
def test_the_largest_fits_and_the_next_does_not(steps: list[int], limit: int, hint: int) -> None:
    needs = _needs(steps)
    found = largest(lambda size: needs[size - 1], limit, MOST, hint)
    assert found.even
    assert found.size == sum(need <= limit for need in needs)
    assert found.or_more == (found.size == MOST)


@given(STEPS, st.integers(0, 1500), st.integers(1, MOST))
def test_the_smallest_fits_and_the_one_before_does_not(
    steps: list[int], limit: int, hint: int
) -> None:
    needs = [need + size for size, need in enumerate(_needs(steps))][::-1]  # falls with every size
    found = smallest(lambda size: needs[size - 1], limit, MOST, hint)
    fitting = [size for size in range(1, MOST + 1) if needs[size - 1] <= limit]
    assert found == (fitting[0] if fitting else 0)


@given(st.integers(1, 10**9), st.integers(0, 10**11), st.integers(1, 500), st.integers(1, 64))
def test_a_straight_line_takes_few_questions(slope: int, fixed: int, size: int, hint: int) -> None:
    need = Counted(slope, fixed)
    assert largest(need, fixed + slope * size, 2**16, hint) == Largest(size)
    assert need.times <= 8


def test_more_than_was_looked_at_is_said() -> None:
    assert largest(lambda size: 7, 10, 4096) == Largest(4096, or_more=True)
    assert largest(lambda size: size, 4096, 4096) == Largest(4096, or_more=True)


def test_nothing_fits_is_zero() -> None:
    assert largest(lambda size: 11, 10, 4096) == Largest(0)
    assert smallest(lambda size: 11, 10, 4096) == 0


def test_the_first_border_is_found_where_a_larger_size_needs_less() -> None:
    needs = {1: 50, 2: 60, 3: 70, 4: 120, 5: 40, 6: 45, 7: 200, 8: 300}
    asked: list[int] = []

    def need(size: int) -> int:
        asked.append(size)
        return needs[size]

    assert largest(need, 100, 8) == Largest(3, even=False)
    assert len(asked) == len(set(asked))


def test_sizes_that_are_no_order_anyway_are_not_scanned() -> None:
    needs = [10, 90, 20, 95, 30, 99, 101, 102]
    found = largest(lambda size: needs[size - 1], 100, 8, hint=2, steady=False)
    assert found == Largest(6)


def test_ranks_are_not_raised_for_ever_where_padding_grows_with_them() -> None:
    asked: list[int] = []

    def need(size: int) -> int:
        asked.append(size)
        return 1000 // size + 10 * size

    assert smallest(need, 150, 2**20) == 0
    assert max(asked) < 200
    assert smallest(need, 250, 2**20) == 5


def test_a_hint_beyond_the_last_size_is_no_size() -> None:
    assert largest(lambda size: size, 3, 2, hint=9) == Largest(2, or_more=True)
    assert smallest(lambda size: 10 - size, 8, 2, hint=9) == 2
