from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from shardwright.planner.search.placing import longest_first
from shardwright.planner.search.space import Space


@pytest.mark.parametrize("memory", ["plenty", "tight"])
def test_a_quick_placement_is_given_up_only_where_a_rank_takes_too_long(
    space_of_seed: Callable[..., Space], memory: str
) -> None:
    """What is looked up on the way to it rules out nothing that it would have ended with."""
    placed = 0
    for seed in range(40):
        space, draw = space_of_seed(seed, memory=memory), random.Random(seed)
        options = [draw.randrange(len(item.options)) for item in space.items]
        whole = longest_first(space, options)
        if whole is None:
            continue
        placed += 1
        assert longest_first(space, options, math.nextafter(whole[0], math.inf)) == whole
        assert longest_first(space, options, whole[0]) is None
    assert placed > 1
