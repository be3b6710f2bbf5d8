"""A unit's views are made once, lie in its memory, and go with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import view_tasks as tasks
from pool import Pool

Kept = Callable[[int, str], list[Any]]


@pytest.fixture(scope="module")
def kept(pool: Pool) -> Kept:
    """What ranks find that take steps in a way; two tests look at it."""
    return cache(lambda ranks, way: pool.run(ranks, tasks.kept, way=way))


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        *((2, way) for way in tasks.WAYS),
        *(pytest.param(3, way, marks=pytest.mark.slow) for way in ("flat", "mixture")),
    ],
)
def test_steps_use_the_views_that_are_there(kept: Kept, ranks: int, way: str) -> None:
    for said, _, sane in kept(ranks, way):
        first, *later = said
        assert sane
        assert all(views.outside == () for views in first)
        assert all(views.invalidations == 0 for views in first)
        assert all(row == first for row in later)


@pytest.mark.parametrize("way", ["flat", "flat zero 2", "per_param", "param_boundary"])
def test_a_gather_makes_no_view_and_takes_no_tensor(kept: Kept, way: str) -> None:
    for _, made, _ in kept(2, way):
        assert made == []


@pytest.mark.parametrize("what", tasks.MOVES)
def test_other_memory_has_views_of_its_own(pool: Pool, what: str) -> None:
    for before, after, new, shown in pool.run(2, tasks.stale, what=what):
        assert before.invalidations == 0
        assert after.invalidations == 1
        assert after.outside == before.outside == ()
        assert after.entries == before.entries
        assert new
        assert shown


def test_a_view_of_other_memory_is_told(pool: Pool) -> None:
    for found in pool.run(2, tasks.displaced):
        assert found.outside == ("part of first.weight",)
