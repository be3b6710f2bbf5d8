"""Gradients are right in and after unusual steps, and afterwards a unit owns its shard only."""

from __future__ import annotations

import pytest
import step_tasks as tasks
from pool import Pool

TOLERANCE = 1e-6


def hold(results: list[list[tuple[float, bool]]]) -> None:
    for found in results:
        for number, (error, resting) in enumerate(found):
            assert error <= TOLERANCE, f"case {number}"
            assert resting, f"case {number}"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("what", tasks.LOSSES)
def test_blocks_may_be_recomputed_in_the_backward(pool: Pool, what: str, world_size: int) -> None:
    hold(pool.run(world_size, tasks.recomputed, what=what))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("what", tasks.FORWARDS)
def test_forwards_may_come_in_any_number_and_order(pool: Pool, what: str, world_size: int) -> None:
    hold(pool.run(world_size, tasks.odd_forwards, what=what))


BACKWARDS = ("backward twice", "two losses", "create graph", "input with gradient")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("what", [*BACKWARDS, "no_sync, then another order"])
def test_backwards_may_come_in_any_number(pool: Pool, what: str, world_size: int) -> None:
    hold(pool.run(world_size, tasks.odd_backwards, what=what))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("place", tasks.PLACES)
def test_after_an_exception_the_next_step_is_right(pool: Pool, place: str, when: str) -> None:
    hold(pool.run(2, tasks.exceptions, place=place, when=when))


def test_after_an_exception_the_next_step_is_right_without_a_forward_of_the_root(
    pool: Pool,
) -> None:
    hold(pool.run(2, tasks.exception_without_root))


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_what_a_module_returns_never_points_into_its_units_memory(pool: Pool, kind: str) -> None:
    for found in pool.run(2, tasks.exposed, kind=kind):
        for error, same, outside in found:
            assert error <= TOLERANCE
            assert same
            assert outside
