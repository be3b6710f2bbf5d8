"""Raw gradients of sharded modules are the mean of the unsharded ones over ranks."""

from __future__ import annotations

from typing import Any

import gradient_tasks as tasks
import probe_tasks
import pytest
from pool import Pool

BF16 = 2.0**-6  # a few roundings of 8 bits, where bf16 is summed over more than two ranks


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", tasks.STRATEGIES)
def test_raw_gradients_are_the_unsharded_mean(pool: Pool, strategy: str, world_size: int) -> None:
    _hold(world_size, pool.run(world_size, tasks.raw_gradients, strategy=strategy))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("strategy", tasks.STRATEGIES)
def test_so_they_are_where_replicas_cut_them_again(pool: Pool, strategy: str, rows: int) -> None:
    pool.run(4, probe_tasks.make_grids)
    found = pool.run(2 * rows, tasks.raw_gradients, strategy=strategy, replicas=2)
    _hold(2 * rows, found)


def _hold(world_size: int, ranks: Any) -> None:
    for found in ranks:
        assert len(found) == {1: 36, 2: 36, 3: 18, 4: 18}[world_size]
        for case, differences in found.items():
            assert len(differences) == 4 + 3 * 8
            for name, (error, equal) in differences.items():
                loose = "bf16 beside" in case and "down" in name
                assert error <= (BF16 if loose else 1e-6), f"{case}: {name} is {error} off"
                assert equal or world_size > 2, f"{case}: {name} is {error} off"
