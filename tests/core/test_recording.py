"""Recordings of a few blocks, unfolded to many."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.recording import Blocks, Piece, RecordedUnit, Recording, Series, moments


def recording(*counts: tuple[int, int], turns: bool = False) -> Recording:
    """Forward and backward through stretches of so many blocks of so long a period, of which three
    periods are recorded; one after the other, or block by block in ``turns``."""
    series = []
    for place, (count, period) in enumerate(counts):
        names = [f"s{place}.{k}" for k in range(count)]
        few = min(count, 3 * period + count % period)
        head = 2 * period if few < count else few
        recorded = [*names[:head], *names[len(names) - (few - head) :]]
        series.append(Series(f"s{place}", tuple(names), tuple(recorded), period))
    every = [each.recorded for each in series]
    order = list(chain(*zip(*every, strict=True)) if turns else chain(*every))
    forward = [Piece(point, unit, ()) for unit in order for point in ("enter", "leave")]
    backward = [
        Piece(point, unit, ())
        for unit in reversed(order)
        for point in ("enter_backward", "leave_backward")
    ]
    ends = (Piece("begin", "", ()), Piece("backward", "", ()))
    units = tuple(RecordedUnit(unit, ()) for unit in order)
    return Recording((ends[0], *forward, ends[1], *backward), units, tuple(series))


def order_of(found: Recording, point: str) -> list[str]:
    return [m.unit for m in moments(found, Blocks(found)) if m.piece.point == point]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=3))
def test_every_block_runs_forward_in_order_and_backward_in_reverse(
    counts: list[tuple[int, int]],
) -> None:
    found = recording(*counts)
    names = [name for series in found.series for name in series.names]
    for point in ("enter", "leave"):
        assert order_of(found, point) == names
    for point in ("enter_backward", "leave_backward"):
        assert order_of(found, point) == names[::-1]


def test_blocks_that_take_turns_go_on_doing_so() -> None:
    found = recording((6, 1), (6, 1), turns=True)
    names = [f"s{place}.{k}" for k in range(6) for place in range(2)]
    assert order_of(found, "enter") == names
    assert order_of(found, "leave_backward") == names[::-1]


@given(st.integers(1, 20), st.integers(1, 3))
def test_every_unit_stands_once_beside_one_of_its_place_in_the_pattern(
    count: int, period: int
) -> None:
    found = recording((count, period))
    pairs = list(Blocks(found).unfolded())
    assert [name for name, _ in pairs] == list(found.series[0].names)
    for name, unit in pairs:
        assert int(name.split(".")[1]) % period == int(unit.name.split(".")[1]) % period


def test_a_block_beside_another_is_as_far_from_it_as_when_it_was_recorded() -> None:
    found = recording((10, 1))
    blocks = Blocks(found)
    entered = [m for m in moments(found, blocks) if m.piece.point == "enter"]
    before = [blocks.beside(_before(m.piece.unit), m) for m in entered[1:]]
    assert before == [f"s0.{k}" for k in range(9)]


def _before(recorded: str) -> str:
    order = ["s0.0", "s0.1", "s0.9"]
    return order[order.index(recorded) - 1]
