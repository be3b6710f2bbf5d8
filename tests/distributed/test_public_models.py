"""Public architectures, sharded in every way, train as on one process."""

from __future__ import annotations

import pytest
from pool import Pool
from public_model_tasks import WAYS, trained_apart
from public_models import MODELS

QUICK = {"GPT2", "T5", "ResNet", "DLRM"}
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_trains_as_on_one_process(pool: Pool, name: str, world_size: int) -> None:
    for found in pool.run(world_size, trained_apart, name=name):
        assert found == {way: {} for way in WAYS}
