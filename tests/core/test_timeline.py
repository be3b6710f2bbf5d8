from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.timeline import (
    PEAK,
    Event,
    EventRun,
    decode,
    encode,
    exact_bytes,
    phase_peaks,
    phase_seconds,
)

EVENTS = st.builds(
    Event,
    rank=st.integers(0, 4),
    step=st.integers(0, 1),
    phase=st.sampled_from(["setup", "forward"]),
    kind=st.sampled_from(["weight", "time"]),
    name=st.sampled_from(["a", PEAK]),
    bytes=st.integers(-2, 2),
    duration=st.sampled_from([0.0, 0.5]),
)


@given(st.lists(EVENTS, max_size=30))
def test_every_event_comes_back_as_often_as_it_was_there(events: list[Event]) -> None:
    assert sorted(map(repr, decode(encode(events)))) == sorted(map(repr, events))


@given(st.lists(EVENTS, max_size=8), st.integers(1, 64))
def test_ranks_with_equal_events_keep_their_order(template: list[Event], ranks: int) -> None:
    unique = list(dict.fromkeys(Event(0, e.step, e.phase, e.kind, e.name) for e in template))
    events = [Event(rank, e.step, e.phase, e.kind, e.name) for rank in range(ranks) for e in unique]
    runs = encode(events)
    assert len(runs) == len(unique)
    assert decode(runs) == events


def test_a_gap_between_ranks_ends_a_run() -> None:
    events = [Event(rank, 1, "load", "time", "load") for rank in (0, 1, 3)]
    assert encode(events) == (EventRun(events[0], 2), EventRun(events[2], 1))


def test_exact_bytes_add_up_by_rank_phase_kind_and_name() -> None:
    events = [
        Event(0, 0, "setup", "weight", "a", 8),
        Event(0, 0, "setup", "weight", "a", -3),
        Event(1, 0, "setup", "weight", "a", 7),
        Event(0, 1, "forward", "weight", PEAK, 100),
        Event(0, 1, "forward", "activation", "b", 9),
    ]
    assert exact_bytes(events) == {
        (0, "setup", "weight", "a"): 5,
        (1, "setup", "weight", "a"): 7,
    }


def test_peaks_are_shown_by_rank_and_phase() -> None:
    events = [
        Event(0, 1, "forward", "weight", PEAK, 100),
        Event(0, 1, "forward", "activation", PEAK, 20),
        Event(0, 1, "backward", "weight", PEAK, 60),
        Event(0, 0, "setup", "weight", "a", 8),
    ]
    assert phase_peaks(events) == {
        (0, "forward"): {"weight": 100, "activation": 20},
        (0, "backward"): {"weight": 60},
    }


def test_seconds_add_up_by_rank_and_phase() -> None:
    events = [
        Event(0, 1, "forward", "time", "a", 0, 0.0, 0.25),
        Event(0, 1, "forward", "time", "b", 0, 0.0, 0.5),
        Event(1, 1, "forward", "time", "a", 0, 0.0, 2.0),
        Event(0, 1, "forward", "weight", "a", 8),
    ]
    assert phase_seconds(events) == {(0, "forward"): 0.75, (1, "forward"): 2.0}
