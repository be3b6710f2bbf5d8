"""Public architectures, sharded in every way, train as on one process."""

from __future__ import annotations

import pytest
from pool import Pool
from public_model_tasks import WAYS, trained_apart
from public_models import MODELS


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_on_one_process(pool: Pool, name: str, world_size: int) -> None:
    for found in pool.run(world_size, trained_apart, name=name):
        assert found == {way: {} for way in WAYS}
