"""A unit's views are made once, lie in its memory, and go with it."""

from __future__ import annotations

import pytest
import view_tasks as tasks
from pool import Pool


@pytest.mark.parametrize("way", tasks.WAYS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_use_the_views_that_are_there(pool: Pool, world_size: int, way: str) -> None:
    for said, _, sane in pool.run(world_size, tasks.kept, way=way):
        first, *later = said
        assert sane
        assert all(views.outside == () for views in first)
        assert all(views.invalidations == 0 for views in first)
        assert all(row == first for row in later)


@pytest.mark.parametrize("way", ["flat", "flat zero 2", "per_param", "param_boundary"])
def test_a_gather_makes_no_view_and_takes_no_tensor(pool: Pool, way: str) -> None:
    for _, made, _ in pool.run(2, tasks.kept, way=way):
        assert made == []


@pytest.mark.parametrize("what", tasks.MOVES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_other_memory_has_views_of_its_own(pool: Pool, world_size: int, what: str) -> None:
    for before, after, new, shown in pool.run(world_size, tasks.stale, what=what):
        assert before.invalidations == 0
        assert after.invalidations == 1
        assert after.outside == before.outside == ()
        assert after.entries == before.entries
        assert new
        assert shown


def test_a_view_of_other_memory_is_told(pool: Pool) -> None:
    for found in pool.run(2, tasks.displaced):
        assert found.outside == ("part of first.weight",)
