"""Random modules under random habits train as the same ones held whole."""

from __future__ import annotations

import pytest
from pool import Pool
from random_habit_tasks import differing


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("size", "seeds"),
    [
        (2, range(10, 14)),
        (1, range(3)),
        (2, range(14, 19)),
        (3, range(30, 35)),
        pytest.param(1, range(3, 10), marks=pytest.mark.product),
        pytest.param(2, range(19, 30), marks=pytest.mark.product),
        pytest.param(3, range(35, 45), marks=pytest.mark.product),
        pytest.param(4, range(45, 60), marks=pytest.mark.product),
    ],
)
def test_random_habits_change_nothing(pool: Pool, size: int, seeds: range) -> None:
    assert pool.run(size, differing, seeds=list(seeds)) == [[]] * size


def test_a_kept_unit_without_a_backward_follows_freezing(pool: Pool) -> None:
    assert pool.run(1, differing, seeds=[185]) == [[]]  # was trained while frozen, and not after
