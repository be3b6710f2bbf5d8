"""Public architectures, sharded in every way, train as on one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from combinations import rare, slow
from pool import Pool
from public_model_tasks import WAYS, trained_apart
from public_models import MODELS

FEW = 2  # ways that an architecture is cut in daily, by turns
WIDELY = {("GPT2", 3)}  # and in all of them


def architectures() -> Iterator[Any]:
    """Every one on all ranks in every way, and which of them run daily."""
    for place, (name, world_size) in enumerate(product(MODELS, (1, 2, 3))):
        case = name, world_size, WAYS
        if case[:2] == ("GPT2", 2):
            yield case
        else:
            yield slow(*case) if case[:2] in WIDELY else rare(*case)
        if name != "GPT2" and world_size == 2:
            turn = tuple(WAYS[(place // 3 + 3 * n) % len(WAYS)] for n in range(FEW))
            yield slow(name, world_size, turn)


@pytest.mark.parametrize(("name", "world_size", "ways"), [*architectures()])
def test_trains_as_on_one_process(
    pool: Pool, name: str, world_size: int, ways: tuple[str, ...]
) -> None:
    for found in pool.run(world_size, trained_apart, name=name, ways=ways):
        assert found == {way: {} for way in ways}
