from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.model import TableSpec
from shardwright.core.option import Option, shard_runs
from shardwright.planner.choice import Choice, cost
from shardwright.planner.search import moves
from shardwright.planner.search.moves import (
    EPSILON,
    NEIGHBOURS,
    Stuck,
    exchanges,
    partners,
    singles_of,
    swap_partners,
)
from shardwright.planner.search.space import Item, Space, item_option
from shardwright.planner.search.state import SearchState

SpaceOf = Callable[..., Space]


def _put_anywhere(state: SearchState, item: int, draw: random.Random) -> None:
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
    state = SearchState(space, 1.0)
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


def _whole(number: int, ranks: int, seconds: float, nbytes: int) -> Item:
    table = TableSpec(f"t{number}", 64, 64)
    option = Option(table.name, "table_wise", "fused", shard_runs(table, "table_wise", 1, 1, 64))
    own = cost({"lookup": seconds}, hbm={"weight": nbytes})
    return Item((number,), (item_option([Choice(table, option, (own,))], ranks, ranks),))


@pytest.mark.parametrize("is_full", [False, True])
def test_of_too_many_pairs_those_are_swapped_that_even_two_ranks_out(
    is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all were looked at, in an array that grows with the blocks and not with the pairs."""
    draw, ranks, count = random.Random(3), 3, 90
    times = [1.0 if is_full else draw.uniform(0, 1) for _ in range(count)]
    sizes = [draw.randint(1, 1000) for _ in range(count)]
    items = tuple(_whole(n, ranks, times[n], sizes[n]) for n in range(count))
    even = sum(sizes) // ranks + 1000
    state = SearchState(
        Space(items, ranks, ranks, (even if is_full else 2**40, 0, 0)), sum(times) / 3
    )
    for item in range(count):
        state.put(item, 0, (int(draw.random() ** 1.3 * ranks),))
    costs, every = state.rank_costs(), np.arange(ranks)
    assert state.fits != is_full
    best = exchanges(state, [0, 1], costs, every)
    monkeypatch.setattr(moves, "MOST_PAIRS", 0)
    own, there = singles_of(state, [0, 1]), singles_of(state, [0, 1, 2])
    wanted = ranks * (2 if is_full else 1) * 2 * NEIGHBOURS
    at = partners(state, own, there, every)
    assert at is not None
    assert at.shape == (len(own.items), wanted)
    few = exchanges(state, [0, 1], costs, every)
    for found, known in zip(few, best, strict=True):
        assert found is not None
        assert known is not None
        assert found.change == pytest.approx(known.change, rel=1e-9)
    assert few[0] is not None
    before = costs.sum()
    few[0].apply(state)
    assert state.rank_costs().sum() - before == pytest.approx(few[0].change, rel=1e-6)
