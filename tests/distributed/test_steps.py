"""Gradients are right in and after unusual steps, and afterwards a unit owns its shard only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import step_tasks as tasks
from pool import Pool

TOLERANCE = 1e-6


def hold(results: list[list[tuple[float, bool]]]) -> None:
    for found in results:
        for number, (error, resting) in enumerate(found):
            assert error <= TOLERANCE, f"case {number}"
            assert resting, f"case {number}"


def _halves(names: Iterable[str]) -> Any:
    """Each name with the ways of sharding of one half, in turn."""
    return pytest.mark.parametrize(
        ("what", "half"), [(n, (i + i // 2) % 2) for i, n in enumerate(names)]
    )


@pytest.mark.slow_after(2)
@_halves(tasks.LOSSES)
def test_blocks_may_be_recomputed_in_the_backward(pool: Pool, what: str, half: int) -> None:
    hold(pool.run(2, tasks.recomputed, what=what, half=half))


@pytest.mark.slow_after(2)
@_halves(tasks.FORWARDS)
def test_forwards_may_come_in_any_number_and_order(pool: Pool, what: str, half: int) -> None:
    hold(pool.run(2, tasks.odd_forwards, what=what, half=half))


BACKWARDS = ("backward twice", "two losses", "create graph", "input with gradient")
BACKWARDS += ("no_sync, then another order",)


@pytest.mark.slow_after(2)
@_halves(BACKWARDS)
def test_backwards_may_come_in_any_number(pool: Pool, what: str, half: int) -> None:
    hold(pool.run(2, tasks.odd_backwards, what=what, half=half))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("place", "when", "half"),
    [
        *((place, "backward", i % 2) for i, place in enumerate(tasks.PLACES)),
        *((place, "forward", 1 - i % 2) for i, place in enumerate(tasks.PLACES)),
    ],
)
def test_after_an_exception_the_next_step_is_right(
    pool: Pool, place: str, when: str, half: int
) -> None:
    hold(pool.run(2, tasks.exceptions, place=place, when=when, half=half))


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_after_an_exception_the_next_step_is_right_without_a_forward_of_the_root(
    pool: Pool, half: int
) -> None:
    hold(pool.run(2, tasks.exception_without_root, half=half))


@pytest.mark.product
@pytest.mark.parametrize("world_size", [1, 2])
def test_so_it_is_in_every_way(pool: Pool, world_size: int) -> None:
    for what in tasks.LOSSES:
        hold(pool.run(world_size, tasks.recomputed, what=what, half=None))
    for what in tasks.FORWARDS:
        hold(pool.run(world_size, tasks.odd_forwards, what=what, half=None))
    for what in BACKWARDS:
        hold(pool.run(world_size, tasks.odd_backwards, what=what, half=None))
    for place, when in itertools.product(tasks.PLACES, ("forward", "backward")):
        hold(pool.run(world_size, tasks.exceptions, place=place, when=when, half=None))


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_what_a_module_returns_never_points_into_its_units_memory(pool: Pool, kind: str) -> None:
    for found in pool.run(2, tasks.exposed, kind=kind):
        for error, same, outside in found:
            assert error <= TOLERANCE
            assert same
            assert outside
