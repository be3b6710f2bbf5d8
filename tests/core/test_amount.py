from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.amount import (
    Amount,
    Step,
    ceil,
    ceil_div,
    derivation,
    leaf,
    maximum,
    minimum,
    named,
    rounded,
    where,
)

NAMES = st.sampled_from(["", "", "rows", "rows_on_rank", "bottom.0.weight", "bottom.0"])


@st.composite
def _leaves(draw: st.DrawFn) -> Amount:
    return Amount(draw(st.integers(1, 50)), name=draw(NAMES))


def _grown(inner: st.SearchStrategy[Amount]) -> st.SearchStrategy[Amount]:
    @st.composite
    def node(draw: st.DrawFn) -> Amount:
        a, b = draw(inner), draw(inner)
        positive = maximum(b, 1)
        made = draw(
            st.sampled_from(
                [
                    lambda: a + b,
                    lambda: a - b,
                    lambda: a * b,
                    lambda: a / positive,
                    lambda: a // positive,
                    lambda: a - (b - 1),
                    lambda: 7 - a,
                    lambda: 2 * b,
                    lambda: ceil_div(a, positive),
                    lambda: minimum(a, b),
                    lambda: maximum(a, 3),
                    lambda: ceil(a / positive),
                    lambda: where(a < b, a, b + 1),
                    lambda: where(a >= 4, a, b),
                    lambda: (a <= b) * 2,
                    lambda: (a < b) > (b < a),
                ]
            )
        )()
        return named(name, made) if (name := draw(NAMES)) else made

    return node()


EXPRESSIONS = st.recursive(_leaves(), _grown, max_leaves=12)


def _unique(amount: Amount) -> Amount:
    """The same tree with every name made its own, as formulas in this package have them."""
    made: dict[int, Amount] = {}
    used: dict[str, int] = {}

    def copy(node: Amount) -> Amount:
        if id(node) not in made:
            parts = tuple(copy(part) for part in node.parts)
            used[node.name] = used.get(node.name, 0) + 1
            name = f"{node.name}.{used[node.name]}" if node.name else ""
            made[id(node)] = Amount(node.value, node.unit, name, node.operation, parts)
        return made[id(node)]

    return copy(amount)


@given(EXPRESSIONS)
def test_every_printed_line_of_a_derivation_evaluates_to_its_value(
    reevaluate: Callable[[Sequence[Step]], None], expression: Amount
) -> None:
    result = named("result", _unique(expression))
    steps = derivation(result)
    assert steps[-1].name == "result"
    assert steps[-1].value == expression.value
    reevaluate(steps)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_ceil_div_is_exact(a: int, b: int) -> None:
    quotient = ceil_div(a, b)
    assert (quotient - 1) * b < a <= quotient * b


@given(st.integers(0, 1000), st.integers(1, 60))
def test_plain_numbers_arrays_and_amounts_agree(a: int, b: int) -> None:
    def formula(x: Any, y: Any) -> Any:
        chunk = ceil_div(x, y)
        return where(x > 10 * y, maximum(chunk, 3) + ceil(x / y), minimum(x, y) - chunk // 2)

    plain = formula(a, b)
    arrays = formula(np.array([a, a]), np.array([b, b]))
    explained = formula(leaf(a, "a"), leaf(b, "b"))
    assert arrays.tolist() == [plain, plain]
    assert explained.value == plain


def test_an_amount_is_no_truth_value() -> None:
    with pytest.raises(TypeError, match=r"Amount 'rows' used as a truth value.*where\("):
        bool(leaf(3, "rows"))


def test_a_comparison_of_amounts_is_no_truth_value() -> None:
    with pytest.raises(TypeError, match="truth value"):
        assert leaf(3, "rows") < 4


@pytest.mark.parametrize(
    "combine",
    [
        lambda array, amount: array * amount,
        lambda array, amount: amount * array,
        lambda array, amount: array < amount,
        lambda array, amount: np.add(array, amount),
        lambda array, amount: maximum(array, amount),
    ],
)
def test_an_array_does_not_swallow_an_amount(combine: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(TypeError):
        combine(np.array([1]), leaf(2, "ranks"))


def test_the_reason_against_arrays_is_shown() -> None:
    with pytest.raises(TypeError, match="explain one case at a time"):
        np.array([1]) * leaf(2, "ranks")


def test_bytes_stay_exact_integers() -> None:
    rows = leaf(40_000_000, "rows")
    found = named("bytes", rows * 128 * 4 * 96, "B").value
    assert type(found) is int
    assert found == 1_966_080_000_000


def test_bytes_beyond_64_bits_do_not_wrap() -> None:
    assert (leaf(2**40, "rows") * 2**16 * 8 * 512).value == 2**68


def test_a_name_on_a_plain_number_changes_nothing() -> None:
    assert named("rows", 5, "rows") == 5


def test_naming_a_named_amount_keeps_both_names() -> None:
    twice = named("second", named("first", leaf(2, "a") * 3))
    assert [(s.name, s.formula, s.value) for s in derivation(twice)] == [
        ("a", "", 2),
        ("first", "a * 3", 6),
        ("second", "first", 6),
    ]


def test_a_shared_input_is_printed_once() -> None:
    rows = leaf(2, "rows")
    assert [s.name for s in derivation(named("area", rows * rows))] == ["rows", "area"]


def test_a_condition_is_recorded_with_both_branches() -> None:
    a, b = leaf(2, "a"), leaf(5, "b")
    step = derivation(named("chosen", where(a < b, a, b)))[-1]
    assert step.formula == "where(a < b, a, b)"
    assert step.numbers == "where(2 < 5, 2, 5)"


def test_parentheses_stand_only_where_they_are_needed() -> None:
    a, b, c = leaf(9, "a"), leaf(5, "b"), leaf(2, "c")
    step = derivation(named("x", (a + b) * c - (a - b) - a * b))[-1]
    assert step.formula == "(a + b) * c - (a - b) - a * b"


def test_a_comparison_of_comparisons_is_not_printed_as_a_chain() -> None:
    a, b = leaf(3, "a"), leaf(2, "b")
    step = derivation(named("x", (a > b) > (b > a)))[-1]
    assert step.formula == "(a > b) > (b > a)"


def test_units_and_sources_reach_the_steps() -> None:
    rate = leaf(1e9, "rate", "B/s", "data sheet")
    steps = derivation(named("seconds", 8 / rate, "s"))
    assert [(s.unit, s.source) for s in steps] == [("B/s", "data sheet"), ("s", "")]


def test_ceil_rounds_up_to_an_integer() -> None:
    found = ceil(2.1)
    assert found == 3
    assert type(found) is int
    assert math.isclose(ceil(np.array([2.1, 3.0]))[0], 3)


@pytest.mark.parametrize(
    ("value", "nearest"),
    [(0.0, 0), (0.5, 0), (1.5, 2), (2.5, 2), (2.4, 2), (2.6, 3), (2.0**60, 2**60)],
)
def test_rounding_prefers_the_even_one(value: float, nearest: int) -> None:
    assert rounded(value) == nearest == round(value)


@given(value=st.floats(0, 2.0**62))
def test_rounding_is_that_of_python(value: float) -> None:
    assert rounded(value) == round(value)
