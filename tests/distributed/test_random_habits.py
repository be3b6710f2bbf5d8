"""Random modules under random habits train as the same ones held whole."""

from __future__ import annotations

import pytest
from pool import Pool
from random_habit_tasks import differing


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("size", "seeds"),
    [
        (1, range(10)),
        (2, range(10, 30)),
        (3, range(30, 45)),
        (4, range(45, 60)),
    ],
)
def test_random_habits_change_nothing(pool: Pool, size: int, seeds: range) -> None:
    assert pool.run(size, differing, seeds=list(seeds)) == [[]] * size


def test_a_kept_unit_without_a_backward_follows_freezing(pool: Pool) -> None:
    assert pool.run(1, differing, seeds=[185]) == [[]]  # was trained while frozen, and not after
