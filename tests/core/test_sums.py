from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.amount import (
    TERMS,
    Step,
    alike,
    bare,
    derivation,
    largest,
    leaf,
    smallest,
    sum_of,
    summed,
)

NUMBERS = st.lists(st.integers(0, 2**70), min_size=1, max_size=60)


@pytest.mark.slow
@given(NUMBERS)
def test_numbers_and_amounts_have_one_sum_and_the_same_extremes(
    reevaluate: Callable[[Sequence[Step]], None], numbers: list[int]
) -> None:
    amounts = [leaf(number, f"n{index}") for index, number in enumerate(numbers)]
    for fold in (summed, largest, smallest):
        found = fold("found", amounts, "B")
        assert found.value == fold("found", numbers, "B")
        reevaluate(derivation(found))


def test_many_terms_are_added_by_parts_that_fit_a_line() -> None:
    terms = [leaf(1, f"n{index}") for index in range(TERMS**2 + 1)]
    steps = [step for step in derivation(summed("all", terms, "B")) if step.formula]
    assert steps[-1].name == "all"
    assert all(step.formula.count("+") < TERMS for step in steps)


def test_the_sum_of_nothing_is_0() -> None:
    assert summed("all", [], "B") == 0
    assert sum_of("all", {}, "B", "tables", bare) == 0
    assert derivation(sum_of("all", {}, "B", "tables"))[0].source == "nothing adds to it"


def test_plain_numbers_may_be_added_without_rounding() -> None:
    assert summed("all", [1e100, 1.0, -1e100], "s", math.fsum) == 1.0


def test_equal_values_are_written_once_and_counted() -> None:
    values = {"a": 5, "b": 7, "c": 5}
    assert alike("x", values, "B", "", bare) == [10, 7]
    (step, *_), last = derivation(sum_of("x", values, "B", "")), sum_of("x", values, "B", "")
    assert (step.name, last.value) == ("x[a and 1 more]", 17)


@pytest.mark.parametrize("lift", [bare, leaf])
def test_a_sum_of_values_is_the_same_however_it_is_written(lift: Callable[..., object]) -> None:
    found = sum_of("x", {str(n): n % 7 for n in range(100)}, "B", "", lift)
    assert getattr(found, "value", found) == sum(n % 7 for n in range(100))
