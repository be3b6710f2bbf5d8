"""What is proven beyond the relaxation, against every assignment there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.planner.search import proof
from shardwright.planner.search.bound import relaxed
from shardwright.planner.search.proof import facts_of, prove
from shardwright.planner.search.search import search
from shardwright.planner.search.space import Ints, Space

SpaceOf = Callable[..., Space]
AllOf = Callable[..., Any]
MEMORY = st.sampled_from(["plenty", "tight", "short"])
SEEDS = st.integers(0, 10**9)


def _proved(space: Space, seconds: float, *, roomy: bool = False) -> float:
    """Proven against a plan of ``seconds`` that no way improves on."""
    whole = relaxed(space)
    facts = facts_of(whole, roomy=roomy)
    assert facts is not None
    return prove(facts, whole.bound.seconds, seconds, lambda ways: np.inf)


@given(
    seed=SEEDS,
    memory=MEMORY,
    constrained=st.booleans(),
    roomy=st.booleans(),
    above=st.sampled_from([1.0, 1.01, 1.5, 4.0]),
    ways=st.sampled_from([2, 64]),
)
def test_nothing_is_proven_that_an_assignment_beats(
    space_of_seed: SpaceOf,
    all_of: AllOf,
    seed: int,
    memory: str,
    constrained: bool,
    roomy: bool,
    above: float,
    ways: int,
) -> None:
    space = space_of_seed(seed, memory=memory, constrained=constrained)
    best = all_of(space).best(space.capacity)
    assume(0 < best < np.inf)
    before = proof.WAYS
    try:
        proof.WAYS = ways  # few, so that many become one
        proved = _proved(space, best * above, roomy=roomy)
    finally:
        proof.WAYS = before
    assert relaxed(space).bound.seconds <= proved <= best * (1 + 1e-9)


@given(seed=SEEDS, memory=MEMORY)
def test_what_a_search_proves_holds(
    space_of_seed: SpaceOf, all_of: AllOf, seed: int, memory: str
) -> None:
    space = space_of_seed(seed, memory=memory)
    found = search(relaxed(space))
    assert found.proved <= all_of(space).best(space.capacity) * (1 + 1e-9)


def test_more_is_proven_than_the_relaxation_has(space_of_seed: SpaceOf, all_of: AllOf) -> None:
    bounds, proved = [], []
    for seed in range(12):
        space = space_of_seed(seed, memory="tight")
        best = all_of(space).best(space.capacity)
        if not 0 < best < np.inf:
            continue
        bounds.append(relaxed(space).bound.seconds / best)
        proved.append(_proved(space, best) / best)
    assert np.mean(proved) > np.mean(bounds) + 0.01


def test_ways_are_numbers_of_options_that_may_take_so_few_seconds(space_of_seed: SpaceOf) -> None:
    space = space_of_seed(3)
    taken: list[Ints] = []

    def take(ways: Ints) -> float:
        taken.append(ways)
        return np.inf

    whole = relaxed(space)
    found, facts = whole.bound, facts_of(whole)
    assert facts is not None
    prove(facts, found.seconds, found.seconds * 4, take)
    assert taken
    for ways in taken:
        assert ways.shape[1] == len(space.items)
        for way in ways.tolist():
            chosen = [item.options[n] for item, n in zip(space.items, way, strict=True)]
            work = sum(option.total_seconds for option in chosen) / space.ranks
            assert work <= found.seconds * 4 * (1 + 1e-9)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_counts_of_parts_that_fit_a_rank_are_no_more_than_one(count: int) -> None:
    draw = np.random.default_rng(count)
    for _ in range(200):
        parts = draw.random(draw.integers(1, 9))
        shares = parts / parts.sum()
        assert proof._counted(shares, count).sum() <= 1 + 1e-12
    assert proof._counted(np.full(count + 1, 1 / (count + 1)), count).sum() == 0
