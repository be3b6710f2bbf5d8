"""Layers cut into stretches that repeat."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwright.trace.structure import FEW, LONGEST_PERIOD, PartRange, series_of, stretches


def test_equal_layers_are_one_stretch_of_period_one() -> None:
    assert stretches("aaaaa") == [PartRange(0, 5, 1)]


def test_a_pattern_is_one_stretch_of_its_length() -> None:
    assert stretches("abababa") == [PartRange(0, 7, 2)]
    assert stretches("aaabaaabaaab") == [PartRange(0, 12, 4)]


def test_what_comes_first_and_once_stands_alone() -> None:
    assert stretches("xaaaa") == [PartRange(0, 1, 1), PartRange(1, 4, 1)]
    assert stretches("abc") == [PartRange(0, 1, 1), PartRange(1, 1, 1), PartRange(2, 1, 1)]


def test_three_periods_are_recorded_the_last_and_what_is_over_at_the_end() -> None:
    assert PartRange(0, 10, 1).recorded == [0, 1, 9]
    assert PartRange(2, 9, 2).recorded == [2, 3, 4, 5, 8, 9, 10]
    assert PartRange(0, 3, 1).recorded == [0, 1, 2]
    assert PartRange(0, 10, 1).kept(4) == [0, 1, 2, 9]


@given(st.text("ab", max_size=24))
def test_stretches_hold_every_layer_once_and_repeat_what_they_say(layers: str) -> None:
    found = stretches(layers)
    assert [k for cut in found for k in cut.every] == list(range(len(layers)))
    for cut in found:
        assert 1 <= cut.period <= LONGEST_PERIOD
        assert all(layers[k] == layers[k - cut.period] for k in list(cut.every)[cut.period :])


@given(st.integers(1, 40), st.integers(1, 5))
def test_every_layer_has_a_recorded_one_at_its_place_in_the_pattern(
    length: int, period: int
) -> None:
    cut = PartRange(0, max(length, period), period)
    names = [str(k) for k in cut.every]
    series = series_of(cut, names, [names[k] for k in cut.recorded], "layers")
    templates = [cut.recorded[series.template(k)] for k in cut.every]
    assert all(t % period == k % period for k, t in zip(cut.every, templates, strict=True))
    assert sorted(set(templates)) == cut.recorded
    assert all(a < b for a, b in pairwise(cut.recorded))
    assert len(cut.every) - len(cut.recorded) == cut.left_out * period
    assert cut.left_out == 0 or len(cut.recorded) // period == FEW
