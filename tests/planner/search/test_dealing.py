from __future__ import annotations

import random

import numpy as np
import pytest

from shardwright.planner.search.placing import Lots, at_least, deal
from shardwright.planner.search.space import Bools, Floats, Ints, OptionBlock, Space
from shardwright.planner.search.state import SearchState

GROUP = 4


def _state(draw: random.Random, ranks: int, space: Space) -> SearchState:
    """Ranks that have something to do already; memory is short on some."""
    space = Space(space.items, ranks, GROUP, (1000, 1000, 1000))
    state = SearchState(space, target=1.0, power=draw.choice([8.0, 16.0, 64.0]))
    state.load = np.array([draw.choice([0.0, draw.uniform(0, 1.5)]) for _ in range(ranks)])
    state.memory = np.array([[draw.randint(0, 1200), draw.randint(0, 1200), 0] for _ in state.load])
    state.memory = state.memory.astype(float)
    return state


def _block(draw: random.Random, width: int) -> OptionBlock:
    storage = [[float(draw.randint(0, 90)), float(draw.randint(0, 90)), 0.0] for _ in range(width)]
    return OptionBlock(
        width, np.array([draw.uniform(0.01, 0.2) for _ in range(width)]), np.array(storage)
    )


def _lots(*dealt: tuple[SearchState, OptionBlock, int, Bools]) -> Lots:
    width = dealt[0][1].width
    return Lots(
        np.array([count for _, _, count, _ in dealt]),
        np.array([block.seconds for _, block, _, _ in dealt]),
        np.array([block.storage for _, block, _, _ in dealt]),
        np.array([state.load.reshape(-1, width) for state, _, _, _ in dealt]),
        np.array([state.memory.reshape(-1, width, 3) for state, _, _, _ in dealt]),
        np.array([closed for _, _, _, closed in dealt]),
    )


def _cost(state: SearchState, block: OptionBlock, counts: Ints) -> float:
    """Of all ranks, with so many blocks on each slot."""
    load = state.load + (counts[:, None] * block.seconds).reshape(-1)
    memory = state.memory + (counts[:, None, None] * block.storage).reshape(-1, 3)
    return float(state.cost(load, memory).sum())


def _greedily(
    state: SearchState, block: OptionBlock, count: int, closed: Bools
) -> tuple[list[int], Floats]:
    """One after the other, each where it adds least; and what the ranks cost then."""
    load, memory, width = state.load.copy(), state.memory.copy(), block.width
    slots = []
    for _ in range(count):
        added = []
        for slot in range(0, len(load), width):
            ranks = slice(slot, slot + width)
            before = state.cost(load[ranks], memory[ranks]).sum()
            after = state.cost(load[ranks] + block.seconds, memory[ranks] + block.storage).sum()
            added.append(np.inf if closed[slot // width] else after - before)
        slot = int(np.argmin(added)) * width
        load[slot : slot + width] += block.seconds
        memory[slot : slot + width] += block.storage
        slots.append(slot)
    return slots, state.cost(load, memory)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("count", [1, 2, 7, 64, 200])
@pytest.mark.parametrize("width", [1, GROUP])
@pytest.mark.parametrize("seed", range(4))
def test_like_blocks_lie_as_if_placed_one_after_the_other(
    space: Space, seed: int, width: int, count: int
) -> None:
    draw = random.Random(f"{seed} {width} {count}")
    state = _state(draw, draw.choice([GROUP, 3 * GROUP, 10 * GROUP]), space)
    closed = np.array([draw.random() < 0.3 for _ in range(state.space.ranks // width)])
    closed[draw.randrange(len(closed))] = False
    block = _block(draw, width)
    slots, costs = _greedily(state, block, count, closed)
    (counts,), (opened,), _ = deal(_lots((state, block, count, closed)), state.cost)
    assert opened
    assert np.repeat(np.arange(len(counts)) * width, counts).tolist() == sorted(slots)
    assert _cost(state, block, counts) == pytest.approx(costs.sum(), rel=1e-9)


@pytest.mark.parametrize("width", [1, GROUP])
@pytest.mark.parametrize("seed", range(4))
def test_lots_are_dealt_as_each_is_alone_and_cost_no_less_than_is_said(
    space: Space, seed: int, width: int
) -> None:
    draw = random.Random(f"{seed} {width}")
    state = _state(draw, 3 * GROUP, space)
    closed = np.array([draw.random() < 0.3 for _ in range(3 * GROUP // width)])
    dealt = [(state, _block(draw, width), count, closed) for count in (1, 3, 30)]
    together, opened, _ = deal(_lots(*dealt), state.cost)
    assert opened.tolist() == [not closed.all()] * 3
    least = at_least(_lots(*dealt), state.cost)
    for one, counts, bound in zip(dealt, together, least, strict=True):
        assert deal(_lots(one), state.cost)[0].tolist() == [counts.tolist()]
        if not closed.all():
            assert bound <= _cost(state, one[1], counts) * (1 + 1e-12)


def test_blocks_find_no_place_where_all_slots_are_closed(space: Space) -> None:
    state = _state(random.Random(0), 8, space)
    block = OptionBlock(1, np.ones(1), np.zeros((1, 3)))
    assert not deal(_lots((state, block, 3, np.ones(8, bool))), state.cost)[1].any()


def test_blocks_that_cost_nothing_are_dealt_as_well(space: Space) -> None:
    state = _state(random.Random(0), 8, space)
    block = OptionBlock(1, np.zeros(1), np.zeros((1, 3)))
    for count in (3, 128):
        (counts,), *_ = deal(_lots((state, block, count, np.zeros(8, bool))), state.cost)
        assert counts.sum() == count


def test_thousands_of_blocks_on_few_ranks_are_dealt(space: Space) -> None:
    state = _state(random.Random(1), 4, space)
    state.load[:], state.memory[:] = 0, 0
    closed = np.array([False, True, False, False])
    (counts,), *_ = deal(_lots((state, _block(random.Random(2), 1), 4000, closed)), state.cost)
    assert counts.sum() == 4000
    assert counts[1] == 0
    assert np.ptp(counts[[0, 2, 3]]) <= 1


@pytest.fixture
def space(space_of_seed: object) -> Space:
    """Any space whose options fill two tiers."""
    assert callable(space_of_seed)
    found: Space = next(
        s for s in map(space_of_seed, range(100)) if [t for t, _ in s.used_tiers] == [0, 1]
    )
    return found
