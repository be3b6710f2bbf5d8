"""Sharded tensors answer as the whole tensor would, whatever the cut."""

from __future__ import annotations

import pytest
from pool import Pool
from shard_tensor_tasks import differing, of_memory, says


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("ranks", "every"),
    [
        *((2, 4), (3, 3), (1, 4)),
        *(pytest.param(ranks, 1, marks=pytest.mark.product) for ranks in (1, 2, 3)),
    ],
)
def test_every_operator_is_that_of_the_whole_tensor(pool: Pool, ranks: int, every: int) -> None:
    assert pool.run(ranks, differing, every=every) == [[]] * ranks


def test_it_shows_its_part_and_its_whole(pool: Pool) -> None:
    first, second = pool.run(2, says)
    assert "(2, 2) from (0, 0) of (3, 2) on rank 0 of 2, w" in first
    assert "(1, 2) from (2, 0) of (3, 2) on rank 1 of 2, w" in second


def test_who_wants_its_memory_is_told_what_to_ask_for(pool: Pool) -> None:
    found, other = pool.run(2, of_memory)
    assert found == other
    for name, text in found.items():
        assert text.startswith("UnsupportedError: w: expected a use that a sharded tensor has"), (
            name
        )
        assert "\n" not in text
        assert ("Clone it first." in text) == ("view" in name)
