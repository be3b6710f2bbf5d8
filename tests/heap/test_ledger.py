from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.recording import Piece
from shardwright.core.timeline import Kind
from shardwright.heap.ledger import Ledger, Scene, Summary


def test_a_phase_keeps_the_kinds_at_its_highest_total() -> None:
    heap = Ledger(fine=True)
    heap.take("w", "weight", 100)
    with heap.during("forward"):
        heap.take("a", "activation", 30)
        heap.take("b", "activation", 20)
        heap.free("a")
        heap.take("t", "temporary", 5)
    assert heap.peaks["forward"] == {"weight": 100, "activation": 50}


def test_kinds_at_a_peak_come_in_the_order_in_which_they_were_there() -> None:
    heap = Ledger(fine=True)
    kinds: list[Kind] = ["weight", "buffer", "input", "output", "cache", "gradient", "activation"]
    for kind in kinds:
        heap.take(kind, kind, 1)
    new: dict[Kind, int] = {"temporary": 5, "communication": 5}
    with heap.during("forward"):
        heap.run(Summary({}, new, 0, 10, {}), Scene(Piece("leave", "unit", ()), "unit"), "stays")
    assert list(heap.peaks["forward"]) == [*kinds, *new]


def test_a_phase_starts_with_what_is_live() -> None:
    heap = Ledger(fine=True)
    heap.take("w", "weight", 100)
    with heap.during("load"):
        heap.free("w")
    assert heap.peaks["load"] == {"weight": 100}


def test_a_phase_that_comes_back_keeps_the_higher_peak() -> None:
    heap = Ledger(fine=True)
    for size in (10, 40, 20):
        with heap.during("reduce"):
            heap.take("g", "gradient", size)
            heap.free("g")
    assert heap.peaks["reduce"] == {"gradient": 40}


def test_bytes_that_pass_leave_nothing_but_a_peak() -> None:
    heap = Ledger(fine=True)
    with heap.during("lookup"), heap.passing("communication", 64):
        heap.take("r", "communication", 6)
    assert heap.peaks["lookup"] == {"communication": 70}
    assert heap.live["communication"] == heap.total == 6


def test_freeing_what_was_never_taken_is_nothing() -> None:
    heap = Ledger(fine=True)
    heap.take("w", "weight", 100)
    heap.free("x")
    assert heap.total == 100


def test_a_name_is_held_once() -> None:
    heap = Ledger(fine=True)
    heap.take("w", "weight", 100)
    with pytest.raises(AssertionError, match="w is held already"):
        heap.take("w", "weight", 1)


def test_a_name_may_be_taken_again_after_it_was_freed() -> None:
    heap = Ledger(fine=True)
    heap.take("w", "weight", 100)
    heap.free("w")
    heap.take("w", "gradient", 7)
    assert (heap.total, heap.live["weight"], heap.live["gradient"]) == (7, 0, 7)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), max_size=40))
def test_the_total_is_what_is_held_and_the_peak_its_maximum(
    changes: list[tuple[int, int]],
) -> None:
    heap, held = Ledger(fine=True), dict[int, int]()
    highest = 0
    with heap.during("forward"):
        for name, size in changes:
            if name in held:
                del held[name]
                heap.free(str(name))
            else:
                held[name] = size
                heap.take(str(name), "activation", size)
            highest = max(highest, sum(held.values()))
            assert heap.total == sum(held.values())
    assert sum(heap.peaks["forward"].values()) == highest
