"""Whatever the widths, cuts, units and settings: the numbers of the unsharded model."""

from __future__ import annotations

import pytest
import random_tasks as tasks
from pool import Pool


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "seeds"), [(2, range(15)), (3, range(15, 40))])
def test_random_models_cut_at_random_train_as_the_unsharded_one(
    pool: Pool, world_size: int, seeds: range
) -> None:
    for furthest in pool.run(world_size, tasks.furthest_of_random_models, seeds=seeds):
        assert furthest < 1e-11
