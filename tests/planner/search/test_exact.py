from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardwright.core.errors import UnsupportedError
from shardwright.planner.search.bound import relaxed
from shardwright.planner.search.exact import MAX_VARIABLES, RELATIVE_GAP, solve
from shardwright.planner.search.search import SearchOutcome, search
from shardwright.planner.search.space import Assignment, Space

SpaceOf = Callable[..., Space]
SECONDS = 60.0  # far more than a solution takes


def _solved(space: Space, start: SearchOutcome) -> tuple[Assignment | None, float]:
    """What ``solve`` brings, or a failure where it does not keep to its time."""
    brought: list[tuple[Assignment | None, float] | BaseException] = []

    def run() -> None:
        try:
            brought.append(solve(space, start, SECONDS))
        except BaseException as error:
            brought.append(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    worker.join(10 * SECONDS)
    if not brought:
        pytest.fail(f"no end after {10 * SECONDS:g} s where {SECONDS:g} s are given")
    (found,) = brought
    if isinstance(found, BaseException):
        raise found
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("memory", ["plenty", "tight", "short"])
@pytest.mark.parametrize("seed", range(8))
def test_the_exact_search_finds_the_best_of_all(
    space_of_seed: SpaceOf,
    all_of: Callable[..., Any],
    totals_of: Callable[..., Any],
    seed: int,
    memory: str,
    constrained: bool,
) -> None:
    space = space_of_seed(seed, memory=memory, constrained=constrained)
    best = all_of(space).best(space.capacity)
    start = search(relaxed(space))
    found, proved = _solved(space, start)
    assert proved <= best * (1 + 1e-9)
    if best == np.inf:
        assert found is None
        return
    seconds = start.seconds
    if found is not None:
        loads, storage = totals_of(space, found)
        assert (storage <= np.array(space.capacity, float)).all()
        seconds = min(seconds, loads.max())
    assert seconds <= best * (1 + 2 * RELATIVE_GAP)
    assert proved >= best * (1 - 2 * RELATIVE_GAP)


def test_more_variables_than_can_be_solved_are_refused(space_of_seed: SpaceOf) -> None:
    space = space_of_seed(0)
    wide = Space(space.items, MAX_VARIABLES, 1, space.capacity)
    with pytest.raises(UnsupportedError) as caught:
        solve(wide, search(relaxed(space)), SECONDS)
    message = str(caught.value)
    assert message.startswith("planner.search 'exact': expected at most 500,000 variables, got ")
    assert message.endswith("Use 'bounded', which proves a bound as well.")
