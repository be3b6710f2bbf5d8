from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.model import DenseOptimizer, TableOptimizer
from shardwright.cost import optimizer

CASES: dict[str, Callable[[Any], Any]] = {
    f"{function.__name__}/{kind}": (lambda v, f=function, k=kind: f(v.nbytes, k))
    for function in (optimizer.dense_state_bytes, optimizer.dense_padding_state_bytes)
    for kind in get_args(DenseOptimizer)
}
SAMPLES = st.lists(st.fixed_dictionaries({"nbytes": st.integers(0, 2**50)}), min_size=1, max_size=3)


def test_every_function_is_evaluated_in_three_ways(
    public_functions: Callable[[ModuleType], set[str]],
) -> None:
    assert {name.partition("/")[0] for name in CASES} == public_functions(optimizer)


@pytest.mark.parametrize("name", CASES)
@given(samples=SAMPLES)
@settings(deadline=None, max_examples=15)
def test_numbers_arrays_and_amounts_agree(
    agree: Callable[..., None], name: str, samples: list[dict[str, float]]
) -> None:
    agree(CASES[name], samples, "local")


@pytest.mark.parametrize(("kind", "state"), [("sgd", 0), ("adagrad", 404), ("adam", 804)])
def test_a_dense_state_has_its_values_and_a_step_counter(kind: str, state: int) -> None:
    assert optimizer.dense_state_bytes(400, kind) == state


@pytest.mark.parametrize(("kind", "state"), [("sgd", 0), ("adagrad", 12), ("adam", 24)])
def test_padding_has_state_like_any_element(kind: str, state: int) -> None:
    assert optimizer.dense_padding_state_bytes(12, kind) == state


def test_every_optimizer_has_its_state() -> None:
    assert set(optimizer.TABLE_STATE_BYTES_PER_ROW) == set(get_args(TableOptimizer))
    assert set(optimizer.DENSE_STATES_PER_ELEMENT) == set(get_args(DenseOptimizer))
    assert set(optimizer.DENSE_STEP_BYTES) == set(get_args(DenseOptimizer))
