"""Public architectures, sharded in every way, train as on one process."""

from __future__ import annotations

import pytest
from architecture_tasks import WAYS, trained_apart
from architectures import ARCHITECTURES
from pool import Pool


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_as_on_one_process(pool: Pool, name: str, world_size: int) -> None:
    for found in pool.run(world_size, trained_apart, name=name):
        assert found == {way: {} for way in WAYS}
