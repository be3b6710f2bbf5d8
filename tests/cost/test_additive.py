from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.presets import PRESETS
from shardwright.planner.pricing import additive

CASES: dict[str, Callable[[Any], Any]] = {
    "weight_bytes": lambda v: additive.weight_bytes(v.rows, v.columns, v.size),
    "shard_seconds": lambda v: additive.shard_seconds(
        v.ids, v.samples, v.columns, v.size, v.ranks, v.c
    ),
}
SAMPLES = st.lists(
    st.fixed_dictionaries(
        {
            "rows": st.integers(1, 2**40),
            "columns": st.integers(1, 1024),
            "size": st.sampled_from([1, 2, 4, 8]),
            "ids": st.floats(0, 2**20),
            "samples": st.integers(1, 2**16),
            "ranks": st.integers(1, 4096),
        }
    ),
    min_size=1,
    max_size=3,
)
C = {name: constant.value for name, constant in PRESETS["additive"].constants.items()}


def test_every_function_is_evaluated_in_three_ways(
    public_functions: Callable[[ModuleType], set[str]],
) -> None:
    assert {name.partition("/")[0] for name in CASES} == public_functions(additive) - {
        "price",
        "derive",
    }


@pytest.mark.parametrize("name", CASES)
@given(samples=SAMPLES)
def test_numbers_arrays_and_amounts_agree(
    agree: Callable[..., None], name: str, samples: list[dict[str, float]]
) -> None:
    agree(CASES[name], samples, "additive")


def test_a_shard_is_its_weights_alone() -> None:
    assert additive.weight_bytes(1000, 16, 4) == 64_000


@pytest.mark.parametrize(
    ("ranks", "dim", "pooling", "milliseconds"),
    [(4, 16, 1.0, 0.16078), (8, 128, 1.0, 2.9919)],
)
def test_seconds_are_those_of_the_studies(
    ranks: int, dim: int, pooling: float, milliseconds: float
) -> None:
    found = additive.shard_seconds(4096 * pooling, 4096, dim, 4, ranks, C)
    assert 1000 * sum(found.values()) == pytest.approx(milliseconds, rel=5e-5)


def test_lookups_grow_with_pooling_and_exchanges_with_ranks() -> None:
    one = additive.shard_seconds(100, 100, 16, 4, 2, C)
    pooled = additive.shard_seconds(300, 100, 16, 4, 2, C)
    assert pooled["lookup"] == pytest.approx(3 * one["lookup"])
    assert pooled["exchange_rows"] == one["exchange_rows"]
    more = additive.shard_seconds(100, 100, 16, 4, 5, C)
    assert more["exchange_rows"] == pytest.approx(4 * one["exchange_rows"])


def test_one_rank_exchanges_nothing() -> None:
    assert additive.shard_seconds(100, 100, 16, 4, 1, C)["exchange_rows"] == 0
