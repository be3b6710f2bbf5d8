from __future__ import annotations

from itertools import count, islice

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.data.reading import DealtRows, deal, split


def taken(dealt: tuple[DealtRows, ...], batch: int, counts: list[int]) -> list[list[int]]:
    """So many rows of each rank."""
    ranks = range(len(counts))
    return [list(islice(deal(count, dealt, batch, r, len(counts)), counts[r])) for r in ranks]


def after(dealt: tuple[DealtRows, ...], batch: int, counts: list[int]) -> tuple[DealtRows, ...]:
    before, own = split(dealt, batch, len(counts))
    return (*before, DealtRows(batch, tuple(a + b for a, b in zip(own, counts, strict=True))))


LIVES = st.lists(
    st.integers(1, 3).flatmap(
        lambda batch: st.tuples(st.just(batch), st.lists(st.integers(0, 9), min_size=1, max_size=4))
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(LIVES)
def test_no_row_is_dealt_twice_or_lost_however_often_the_number_of_ranks_changes(
    lives: list[tuple[int, list[int]]],
) -> None:
    dealt: tuple[DealtRows, ...] = ()
    seen: list[int] = []
    for batch, counts in lives:
        seen += [row for rows in taken(dealt, batch, counts) for row in rows]
        dealt = after(dealt, batch, counts)
    left = list(islice(deal(count, dealt, 7, 0, 1), 200))
    assert len(set(seen)) == len(seen)
    everything = sorted(seen + left)
    assert everything == list(range(len(everything)))


@settings(deadline=None)
@given(LIVES, st.integers(1, 20))
def test_as_many_ranks_go_on_as_if_nothing_had_ended(
    lives: list[tuple[int, list[int]]], more: int
) -> None:
    dealt: tuple[DealtRows, ...] = ()
    for batch, counts in lives:
        before, dealt = dealt, after(dealt, batch, counts)
    whole = taken(before, batch, [c + more for c in counts])
    again = taken(dealt, batch, [more] * len(counts))
    assert again == [rows[c:] for rows, c in zip(whole, counts, strict=True)]


def test_after_even_batches_the_stream_is_asked_for_its_next_row_at_once() -> None:
    asked = []

    def stream(start: int) -> count[int]:
        asked.append(start)
        return count(start)

    dealt = (DealtRows(4, (12, 12)), DealtRows(5, (10,)))
    assert next(deal(stream, dealt, 2, 1, 3)) == 24 + 10 + 2
    assert asked == [34]
