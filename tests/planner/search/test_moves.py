from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from shardwright.planner.search.moves import EPSILON, Stuck, swap_partners
from shardwright.planner.search.space import Space
from shardwright.planner.search.state import State

SpaceOf = Callable[..., Space]


def _put_anywhere(state: State, item: int, draw: random.Random) -> None:
    option = draw.randrange(len(state.space.items[item].options))
    widths = state.space.items[item].options[option].widths
    slots = tuple(draw.randrange(state.space.ranks // width) * width for width in widths)
    state.put(item, option, slots)


@given(seed=st.integers(0, 10**9), constrained=st.booleans())
def test_a_rank_that_was_stuck_is_helped_as_if_it_were_looked_at_for_the_first_time(
    space_of_seed: SpaceOf, seed: int, constrained: bool
) -> None:
    space = space_of_seed(seed, memory="tight", constrained=constrained)
    draw = random.Random(seed)
    state = State(space, 1.0)
    for item in range(len(space.items)):
        _put_anywhere(state, item, draw)
    stuck = Stuck()
    for _ in range(12):
        costs = state.rank_costs()
        enough = -EPSILON * costs.sum()
        for rank in range(space.ranks):
            near = swap_partners(costs)
            found = stuck.helped(state, [rank], costs, near, enough)
            first = Stuck().helped(state, [rank], costs, near, enough)
            assert (found is None) == (first is None)
            if found is not None and first is not None:
                assert found.change == first.change
            elif found is None:  # nothing changed since: nothing is left to look at
                assert stuck.helped(state, [rank], costs, near, enough) is None
        item = draw.randrange(len(space.items))
        state.take(item)
        _put_anywhere(state, item, draw)
