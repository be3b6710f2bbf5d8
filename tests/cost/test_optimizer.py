from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.optimizers import TABLES, TRAINED
from shardwright.cost import optimizer

CASES: dict[str, Callable[[Any], Any]] = {
    f"{function.__name__}/{kind}": (lambda v, f=function, k=kind: f(v.nbytes, k))
    for function in (
        optimizer.dense_state_bytes,
        optimizer.dense_padding_state_bytes,
        optimizer.dense_update_bytes,
    )
    for kind in TRAINED
}
for _kind in TABLES:
    CASES |= {
        f"table_state_bytes/{_kind}": lambda v, k=_kind: optimizer.table_state_bytes(
            v.rows, v.columns, k
        ),
        f"table_passes/{_kind}": lambda v, k=_kind: optimizer.table_passes(k, v.c, like=v.rows),
    }
SAMPLES = st.lists(
    st.fixed_dictionaries(
        {
            "nbytes": st.integers(0, 2**50),
            "rows": st.integers(0, 2**40),
            "columns": st.integers(1, 1024),
        }
    ),
    min_size=1,
    max_size=3,
)


def test_every_function_is_evaluated_in_three_ways(
    public_functions: Callable[[ModuleType], set[str]],
) -> None:
    assert {name.partition("/")[0] for name in CASES} == public_functions(optimizer)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CASES)
@given(samples=SAMPLES)
@settings(max_examples=6)
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


@pytest.mark.parametrize(
    ("kind", "passes"), [("sgd", 3), ("sgd_momentum", 5), ("adagrad", 5), ("adam", 7)]
)
def test_an_update_reads_and_writes_every_state(kind: str, passes: int) -> None:
    assert optimizer.dense_update_bytes(100, kind) == passes * 100


def test_an_update_in_8_bits_takes_longer_on_a_core_than_its_bytes() -> None:
    found = [
        optimizer.dense_update_bytes(4, "adamw_8bit", on_host=on_host) for on_host in (False, True)
    ]
    assert found == [128, 392]


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        *(("none", 0), ("sgd", 0), ("rowwise_adagrad", 40), ("adagrad", 640), ("adam", 1280)),
        ("partial_rowwise_adam", 640 + 40),
    ],
)
def test_a_table_keeps_its_state_by_row_or_by_element(kind: str, state: int) -> None:
    assert optimizer.table_state_bytes(10, 16, kind) == state


def test_without_an_optimizer_no_row_is_written() -> None:
    assert optimizer.table_passes("none", {}, like=1) == 0
