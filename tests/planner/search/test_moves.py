from __future__ import annotations

import random

import numpy as np
import pytest

from shardwright.core.model import TableSpec
from shardwright.core.option import Option, shard_runs
from shardwright.planner.choice import Choice, cost
from shardwright.planner.search import moves
from shardwright.planner.search.moves import (
    NEIGHBOURS,
    exchanges,
    partners,
    singles_of,
)
from shardwright.planner.search.space import Item, Space, item_option
from shardwright.planner.search.state import SearchState


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
