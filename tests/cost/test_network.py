from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost import network

COLLECTIVES = get_args(network.Collective)
CASES: dict[str, Callable[[Any], Any]] = {
    f"{function.__name__}/{collective}": case
    for collective in COLLECTIVES
    for function, case in (
        (
            network.transfer_seconds,
            lambda v, name=collective: network.transfer_seconds(name, v.nbytes, v.ranks, v.c),
        ),
        (
            network.latency_seconds,
            lambda v, name=collective: network.latency_seconds(name, v.ranks, v.c),
        ),
        (
            network.collective_seconds,
            lambda v, name=collective: network.collective_seconds(name, v.nbytes, v.ranks, v.c),
        ),
    )
}
SAMPLES = st.lists(
    st.fixed_dictionaries({"nbytes": st.integers(0, 2**40), "ranks": st.integers(1, 4096)}),
    min_size=1,
    max_size=3,
)
TEN = {
    f"{name}_{what}": value
    for name in COLLECTIVES
    for what, value in (("latency", 0.5), ("rate", 10.0))
}


def test_every_function_is_evaluated_in_three_ways(
    public_functions: Callable[[ModuleType], set[str]],
) -> None:
    assert {name.partition("/")[0] for name in CASES} == public_functions(network)


@pytest.mark.parametrize("name", CASES)
@given(samples=SAMPLES, preset=st.sampled_from(["local", "h100-8"]))
@settings(deadline=None, max_examples=15)
def test_numbers_arrays_and_amounts_agree(
    agree: Callable[..., None], name: str, samples: list[dict[str, float]], preset: str
) -> None:
    agree(CASES[name], samples, preset)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_single_rank_pays_nothing(collective: network.Collective) -> None:
    assert network.collective_seconds(collective, 2**30, 1, TEN) == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_of_no_bytes_costs_its_latency(collective: network.Collective) -> None:
    assert network.collective_seconds(collective, 0, 8, TEN) == 0.5


def test_every_rank_keeps_its_own_share_of_an_exchange() -> None:
    assert network.collective_seconds("all_to_all", 100, 4, TEN) == 0.5 + 75 / 10


def test_an_all_reduce_moves_its_bytes_twice() -> None:
    assert network.collective_seconds("all_reduce", 100, 4, TEN) == 0.5 + 150 / 10
