from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import highspy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.planner.search.bound import Bound, cheapest, lower_bound, table
from shardwright.planner.search.space import Floats, Space

SpaceOf = Callable[..., Space]
MEMORY = st.sampled_from(["plenty", "tight", "short"])


def _bound(space: Space) -> Bound:
    return lower_bound(space, table(space))


@given(seed=st.integers(0, 10**9), memory=MEMORY, constrained=st.booleans())
def test_no_assignment_beats_the_bound(
    space_of_seed: SpaceOf, all_of: Callable[..., Any], seed: int, memory: str, constrained: bool
) -> None:
    space = space_of_seed(seed, memory=memory, constrained=constrained)
    found = _bound(space)
    best = all_of(space).best(space.capacity)
    if found.usable:
        assert 0 <= found.seconds <= best * (1 + 1e-9)
    else:
        assert best == np.inf


@given(seed=st.integers(0, 10**9))
def test_with_memory_to_spare_the_bound_is_the_relaxed_optimum(
    space_of_seed: SpaceOf, seed: int
) -> None:
    space = space_of_seed(seed)
    best = np.inf
    for chosen in itertools.product(*(item.options for item in space.items)):
        work = sum(option.total_seconds for option in chosen) / space.ranks
        best = min(best, max(work, *(option.largest for option in chosen)))
    found = _bound(space)
    assert found.seconds == pytest.approx(best, rel=1e-12)
    assert not found.prices.any()


@given(seed=st.integers(0, 10**9), factor=st.floats(0.4, 1.5))
def test_with_one_scarce_memory_the_bound_is_that_of_the_linear_program(
    space_of_seed: SpaceOf, seed: int, factor: float
) -> None:
    space = space_of_seed(seed)
    options = table(space)
    limit = _least_work_bytes(space) * factor
    space = Space(
        space.items, space.ranks, space.group, (max(int(limit / space.ranks), 1), 2**50, 0)
    )
    wanted = _linear_bound(space)
    found = lower_bound(space, table(space))
    assert len(options.seconds) == sum(len(item.options) for item in space.items)
    if wanted is None:
        assert not found.usable
    else:
        assert found.usable
        assert found.seconds == pytest.approx(wanted, rel=1e-6)


def _least_work_bytes(space: Space) -> int:
    return sum(
        min(item.options, key=lambda option: option.total_seconds).total_storage[0]
        for item in space.items
    )


def _linear_bound(space: Space) -> float | None:
    """The smallest T for which options with no shard above T have a fractional choice of at most
    ranks * T seconds and ranks * capacity bytes; None if there is none."""
    options = [
        (item, option)
        for item, entry in enumerate(space.items)
        for option in entry.options
        if all(s <= c for s, c in zip(option.largest_storage, space.capacity, strict=True))
    ]
    found = [
        max(level, work / space.ranks)
        for level in sorted({option.largest for _, option in options})
        if (work := _least_work(space, [o for o in options if o[1].largest <= level])) is not None
    ]
    return min(found, default=None)


def _least_work(space: Space, options: list[tuple[int, Any]]) -> float | None:
    if {item for item, _ in options} != set(range(len(space.items))):
        return None
    solver = highspy.Highs()
    solver.silent()
    limit = space.ranks * space.capacity[0]
    for column, (_, option) in enumerate(options):
        solver.addVar(0.0, highspy.kHighsInf)
        solver.changeColCost(column, option.total_seconds)
    everything = np.arange(len(options), dtype=np.int32)
    sizes = np.array([option.total_storage[0] / limit for _, option in options])
    solver.addRow(-highspy.kHighsInf, 1.0, len(options), everything, sizes)
    for item in range(len(space.items)):
        own = np.array([c for c, (other, _) in enumerate(options) if other == item], np.int32)
        solver.addRow(1.0, 1.0, len(own), own, np.ones(len(own)))
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return float(solver.getInfo().objective_function_value)


@given(seed=st.integers(0, 10**9), memory=MEMORY)
def test_prices_are_valid_prices(space_of_seed: SpaceOf, seed: int, memory: str) -> None:
    space = space_of_seed(seed, memory=memory)
    found = _bound(space)
    assert (found.prices >= 0).all()
    assert np.isfinite(found.prices).all()


def test_a_larger_memory_never_raises_the_bound(space_of_seed: SpaceOf) -> None:
    for seed in range(20):
        space = space_of_seed(seed, memory="short")
        bounds = []
        for factor in (1, 2, 4, 64):
            capacity = tuple(size * factor for size in space.capacity)
            found = _bound(Space(space.items, space.ranks, space.group, capacity))  # type: ignore[arg-type]
            bounds.append(found.seconds if found.usable else np.inf)
        for before, after in itertools.pairwise(bounds):
            assert after <= before * (1 + 1e-9)


def test_a_shard_that_fits_no_rank_rules_its_option_out(space_of_seed: SpaceOf) -> None:
    space = space_of_seed(0, memory="tight")
    found = table(space)
    options = [option for item in space.items for option in item.options]
    for option, fits in zip(options, found.fits, strict=True):
        within = [s <= c for s, c in zip(option.largest_storage, space.capacity, strict=True)]
        assert fits == all(within)


def test_no_bound_is_usable_where_a_table_has_no_shard_that_fits(space_of_seed: SpaceOf) -> None:
    space = space_of_seed(0)
    found = _bound(Space(space.items, space.ranks, space.group, (1, 1, 0)))
    assert not found.usable


def test_the_first_of_equally_cheap_options_is_taken(space_of_seed: SpaceOf) -> None:
    options = table(space_of_seed(0))
    same: Floats = np.ones(len(options.seconds))
    assert cheapest(same, options).tolist() == options.starts.tolist()
