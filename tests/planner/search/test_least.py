from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shardwright.planner.search.space import Floats, Item, ItemOption, Space, item_option
from shardwright.planner.search.widening import least_memory

SpaceOf = Callable[..., Space]

# Of 150 spaces of 3 tables, the fullest rank had at most so much more than it must.
WORST_RATIO = 1.25


def _shares(space: Space, storage: Floats) -> Floats:
    """The largest share of a capacity that any rank fills, of each assignment."""
    found: Floats = (storage / np.maximum(np.array(space.capacity, float), 1)).max(axis=(-1, -2))
    return found


def _with_memory(space: Space, hbm: int, ddr: int) -> Space:
    return Space(space.items, space.ranks, space.group, (hbm, ddr, 0), space.constrained)


@pytest.mark.slow
@given(seed=st.integers(0, 10**9), hbm=st.integers(1, 20_000), ddr=st.integers(1, 20_000))
def test_the_share_shown_is_that_of_the_fullest_rank(
    space_of_seed: SpaceOf, totals_of: Callable[..., Any], seed: int, hbm: int, ddr: int
) -> None:
    space = _with_memory(space_of_seed(seed), hbm, ddr)
    found = least_memory(space)
    assert found.best is not None
    _, storage = totals_of(space, found.best)
    assert _shares(space, storage[None])[0] <= found.seconds * (1 + 1e-9)


@pytest.mark.slow
@given(seed=st.integers(0, 10**9), hbm=st.integers(1, 20_000))
def test_a_bound_above_one_proves_that_nothing_fits(
    space_of_seed: SpaceOf, all_of: Callable[..., Any], seed: int, hbm: int
) -> None:
    space = _with_memory(space_of_seed(seed), hbm, 2**40)
    found = least_memory(space)
    if found.bound.usable and found.bound.seconds > 1:
        assert not all_of(space).fitting(space.capacity).any()


@pytest.mark.slow
def test_the_fullest_rank_has_nearly_as_little_as_can_be(
    space_of_seed: SpaceOf, all_of: Callable[..., Any], totals_of: Callable[..., Any]
) -> None:
    ratios = []
    for seed in range(30):
        space = _with_memory(space_of_seed(seed), 1000, 2**40)
        found = least_memory(space)
        assert found.best is not None
        least = _shares(space, all_of(space).storage).min()
        _, storage = totals_of(space, found.best)
        ratios.append(_shares(space, storage[None])[0] / least)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= WORST_RATIO
    assert np.mean(np.array(ratios) < 1.0001) > 0.8


def test_no_rank_has_room_in_one_byte(space_of_seed: SpaceOf) -> None:
    bound = least_memory(_with_memory(space_of_seed(0), 1, 2**40)).bound
    assert bound.usable
    assert bound.seconds > 1


def test_constraints_hold_for_the_least_memory_as_well(space_of_seed: SpaceOf) -> None:
    held = 0
    for seed in range(20):
        space = space_of_seed(seed, constrained=True)
        found = least_memory(space).best
        if found is None:
            continue
        for item, number, slots in zip(space.items, found.options, found.slots, strict=True):
            if item.allowed is not None:
                held += 1
                for slot, width in zip(slots, item.options[number].widths, strict=True):
                    assert item.allowed[slot : slot + width].all()
    assert held > 10


@pytest.mark.slow
@given(seed=st.integers(0, 10**9), factor=st.floats(0, 100))
@settings(max_examples=20)
def test_seconds_do_not_count_for_the_least_memory(
    space_of_seed: SpaceOf, seed: int, factor: float
) -> None:
    space = space_of_seed(seed, memory="tight")
    items = tuple(
        Item(item.tables, tuple(_scaled(o, factor * i, space) for o in item.options))
        for i, item in enumerate(space.items)
    )
    other = Space(items, space.ranks, space.group, space.capacity)
    assert least_memory(space).best == least_memory(other).best


def _scaled(option: ItemOption, factor: float, space: Space) -> ItemOption:
    choices = [
        replace(
            choice,
            costs=tuple(
                replace(cost, total_seconds=cost.total_seconds * factor) for cost in choice.costs
            ),
        )
        for choice in option.choices
    ]
    return item_option(choices, space.ranks, space.group)
