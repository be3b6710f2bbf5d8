from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.sharding import ShardingType
from shardwright.planner.search import moves
from shardwright.planner.search.placing import spread
from shardwright.planner.search.reoption import (
    cheapest_changes,
    promising,
    weigh,
)
from shardwright.planner.search.space import Space
from shardwright.planner.search.state import SearchState, restored

SpaceOf = Callable[..., Space]
ManyRanks = Callable[[ShardingType, int, int], Space]
Totals = Callable[..., Any]


def _somewhere(draw: random.Random, space: Space, item: int, option: int) -> tuple[int, ...]:
    return tuple(
        draw.randrange(space.ranks // width) * width
        for width in space.items[item].options[option].widths
    )


def _wandered(space: Space, seed: int, steps: int) -> SearchState:
    """A state after random moves: items put, taken off, put elsewhere, blocks moved."""
    draw = random.Random(seed)
    state = SearchState(space, 1.0)
    for item, entry in enumerate(space.items):
        option = draw.randrange(len(entry.options))
        state.put(item, option, _somewhere(draw, space, item, option))
    for _ in range(steps):
        item = draw.randrange(len(space.items))
        if draw.random() < 0.4:
            state.take(item)
            option = draw.randrange(len(space.items[item].options))
            state.put(item, option, _somewhere(draw, space, item, option))
        else:
            blocks = state.blocks(item)
            number = draw.randrange(len(blocks))
            width = blocks[number].width
            if width == space.ranks:
                continue  # there is nowhere else
            state.move(item, number, draw.randrange(space.ranks // width) * width)
        if draw.random() < 0.5:
            state.singles(draw.randrange(space.ranks))  # kept from here on
    return state


@given(seed=st.integers(0, 10**9), steps=st.integers(0, 60))
def test_loads_and_bytes_are_those_of_the_shards_whatever_was_moved(
    space_of_seed: SpaceOf, totals_of: Totals, seed: int, steps: int
) -> None:
    space = space_of_seed(seed)
    state = _wandered(space, seed, steps)
    seconds, storage = totals_of(space, state.assignment())
    assert state.load == pytest.approx(seconds, rel=1e-9)
    assert state.memory.tolist() == storage.tolist()


@given(seed=st.integers(0, 10**9), steps=st.integers(0, 60))
def test_a_state_knows_what_lies_on_every_rank(
    space_of_seed: SpaceOf, seed: int, steps: int
) -> None:
    space = space_of_seed(seed)
    state = _wandered(space, seed, steps)
    again = restored(space, 1.0, 8.0, state.assignment())
    assert (state.on_rank, state.uniform) == (again.on_rank, again.uniform)
    for kept, made in zip(_rows(state), _rows(again), strict=True):
        assert kept == made


def _rows(state: SearchState) -> list[tuple[Any, ...]]:
    singles = [state.singles(rank) for rank in range(state.space.ranks)]
    return [(own.items, own.seconds.tolist(), own.storage.tolist()) for own in singles]


@given(seed=st.integers(0, 10**9))
def test_a_state_fits_exactly_up_to_its_capacity(space_of_seed: SpaceOf, seed: int) -> None:
    space = space_of_seed(seed)
    found = _wandered(space, seed, 5).assignment()
    fullest = [int(size) for size in restored(space, 1.0, 8.0, found).memory.max(axis=0)]
    for tier in range(3):
        for spare in (-1, 0):
            capacity = list(fullest)
            capacity[tier] += spare
            if capacity[tier] >= 0:
                tight = Space(space.items, space.ranks, space.group, (*capacity,))  # type: ignore[arg-type]
                assert restored(tight, 1.0, 8.0, found).fits == (spare == 0)


def test_a_state_does_not_fit_while_an_item_lies_nowhere(space_of_seed: SpaceOf) -> None:
    state = SearchState(space_of_seed(0), 1.0)
    assert not state.fits


def test_a_state_that_fitted_does_not_once_an_item_is_dropped(space_of_seed: SpaceOf) -> None:
    state = _wandered(space_of_seed(0), 0, 0)
    assert state.fits
    state.drop(0)
    assert not state.fits


@given(seed=st.integers(0, 10**9), memory=st.sampled_from(["tight", "plenty"]))
def test_blocks_are_spread_to_where_they_add_least(
    space_of_seed: SpaceOf, seed: int, memory: str
) -> None:
    """Every other place of all blocks that are alike costs as much or more."""
    space = space_of_seed(seed, memory=memory)
    state = _wandered(space, seed, 5)
    for item, entry in enumerate(space.items):
        old = state.options[item], state.slots[item]
        for option, way in enumerate(entry.options):
            state.take(item)
            slots = spread(state, item, option)
            assert slots is not None
            state.put(item, option, slots)
            least = float(state.rank_costs().sum())
            if state.blocks(item)[0] is state.blocks(item)[-1]:
                places = range(0, space.ranks, way.widths[0])
                for other in itertools.combinations_with_replacement(places, len(way.widths)):
                    state.take(item)
                    state.put(item, option, other)
                    assert float(state.rank_costs().sum()) >= least * (1 - 1e-9)
        state.take(item)
        state.put(item, *old)


@given(seed=st.integers(0, 10**9))
def test_spread_keeps_to_the_rules(space_of_seed: SpaceOf, seed: int) -> None:
    space = space_of_seed(seed, constrained=True)
    state = SearchState(space, 1.0)
    for item, entry in enumerate(space.items):
        for option in range(len(entry.options)):
            told = spread(state, item, option)
            mask = state.allowed(item)
            open_ranks = np.ones(space.ranks, bool) if mask is None else mask
            if told is not None:
                widths = entry.options[option].widths
                for slot, width in zip(told, widths, strict=True):
                    assert slot % width == 0
                    assert open_ranks[slot : slot + width].all()
        if told is not None:
            state.put(item, option, told)


def test_a_byte_too_many_costs_more_than_the_slowest_rank(space_of_seed: SpaceOf) -> None:
    space = space_of_seed(3)
    state = SearchState(Space(space.items, space.ranks, space.group, (64,) * 3), 1.0)
    state.load[:] = 3.0
    for power in (6.0, 16.0, 64.0):
        state.sharpen(power)
        full, over = np.full((1, 3), 64.0), np.array([[65.0, 0.0, 0.0]])
        assert state.cost(np.zeros(1), over)[0] > state.cost(np.full(1, 3.0), full)[0]


@given(seed=st.integers(0, 10**9))
def test_what_is_weighed_is_what_put_brings(space_of_seed: SpaceOf, seed: int) -> None:
    space = space_of_seed(seed, memory="tight")
    state = _wandered(space, seed, 5)
    ways = [(i, o) for i, item in enumerate(space.items) for o in range(len(item.options))]
    weighed = weigh(state, ways)
    middle = float(np.median(weighed[1].sum(axis=1)))
    pruned = weigh(state, ways, middle)[1].sum(axis=1)
    for (item, option), load, costs, kept in zip(ways, *weighed, pruned, strict=True):
        other = state.copy()
        other.take(item)
        slots = spread(other, item, option)
        if slots is None:
            assert np.isinf(costs).all()
            continue
        other.put(item, option, slots)
        assert sorted(load) == pytest.approx(sorted(other.load))  # of equal places, either
        assert costs.sum() == pytest.approx(other.rank_costs().sum())
        assert kept in (np.inf, pytest.approx(costs.sum()))
        assert kept < np.inf or costs.sum() >= middle * (1 - 1e-9)


@given(seed=st.integers(0, 10**9), memory=st.sampled_from(["tight", "plenty"]))
@settings(deadline=None, max_examples=20)
def test_no_tier_that_can_overflow_is_left_out_of_the_costs(
    space_of_seed: SpaceOf, seed: int, memory: str
) -> None:
    space = space_of_seed(seed, memory=memory)
    state = _wandered(space, seed, 10)
    over = np.maximum(state.memory / space.capacity_array - 1, 0).sum(axis=1)
    expected = state.time_cost(state.load) + over * state.penalty
    assert state.rank_costs() == pytest.approx(expected)


@given(seed=st.integers(0, 10**9), memory=st.sampled_from(["tight", "plenty"]))
@settings(deadline=None, max_examples=20)
def test_nothing_costs_less_than_what_a_change_and_a_move_promise(
    space_of_seed: SpaceOf, seed: int, memory: str
) -> None:
    state = _wandered(space_of_seed(seed, memory=memory), seed, 5)
    ways = cheapest_changes(state)
    promised = {way: least for least, way in promising(state, ways, np.inf)}
    for item, option in ways:
        other = state.copy()
        other.take(item)
        slots = spread(other, item, option)
        if slots is None:
            assert (item, option) not in promised
            continue
        other.put(item, option, slots)
        costs = other.rank_costs()
        move = moves.relocation(other, int(costs.argmax()), costs, np.arange(len(costs)))
        if move is not None:
            move.apply(other)
            least = promised[item, option]
            assert least <= other.rank_costs().sum() * (1 + 1e-9)


@given(seed=st.integers(0, 10**9))
@settings(deadline=None, max_examples=20)
def test_a_copy_moves_alone(space_of_seed: SpaceOf, seed: int) -> None:
    space = space_of_seed(seed)
    state = _wandered(space, seed, 5)
    before, held = state.assignment(), [set(own) for own in state.on_rank]
    other = state.copy()
    for item in range(len(space.items)):
        other.take(item)
    assert other.load == pytest.approx(0, abs=1e-9)
    assert not any(other.on_rank)
    assert (state.assignment(), state.on_rank) == (before, held)


@given(seed=st.integers(0, 10**9))
def test_what_is_reached_somewhere_is_what_putting_an_item_there_reaches(
    space_of_seed: SpaceOf, seed: int
) -> None:
    space = space_of_seed(seed, memory="short")
    state, draw = _wandered(space, seed, 5), random.Random(seed)
    for item, entry in enumerate(space.items):
        option = draw.randrange(len(entry.options))
        slots = _somewhere(draw, space, item, option)
        with state.without(item):
            seconds, fits = state.reached(item, option, slots)
        other = state.copy()
        other.take(item)
        others_fit = bool((other.memory <= other.limits).all())
        other.put(item, option, slots)
        assert seconds == pytest.approx(other.worst)
        assert (fits and others_fit) == other.fits


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "table_row_wise", "grid_shard"])
@pytest.mark.parametrize("full", ["none", "some", "the least busy"])
@pytest.mark.parametrize("seed", range(5))
def test_of_many_ranks_the_least_busy_ones_are_looked_at_first(
    many_ranks: ManyRanks,
    kind: ShardingType,
    full: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, group = 4096, 4
    draw = np.random.default_rng(seed)
    space = many_ranks(kind, ranks, group)
    state = SearchState(space, 10 * space.items[0].options[0].largest)
    busy = draw.uniform(0.2, 1, ranks // group).repeat(group) + draw.uniform(0, 0.02, ranks)
    state.load[:] = busy * state.target
    filled = {"none": busy < 0, "some": draw.random(ranks) < 0.5, "the least busy": busy < 0.5}[
        full
    ]
    state.memory[:, 0] = np.where(filled, space.capacity[0], 0)

    def found() -> float:
        slots = spread(state, 0, 0)
        assert slots is not None
        other = state.copy()
        other.put(0, 0, slots)
        return float(other.rank_costs().sum())

    few = found()
    monkeypatch.setattr("shardwright.planner.search.state.NEAR_SLOTS", ranks)
    assert few == pytest.approx(found(), rel=1e-9)


def test_of_ranks_that_are_equally_busy_the_first_are_idle(many_ranks: ManyRanks) -> None:
    state = SearchState(many_ranks("table_wise", 4096, 4), 1.0)
    state.load[:] = np.arange(4096) % 5 + 1.0
    state.load[7] = 0.5
    idle, others = state.idle
    assert idle.tolist() == [0, 5, 7, *range(10, 155, 5)]
    assert others == 1.0
