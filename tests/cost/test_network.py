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
    f"{function.__name__}/{collective}/{where}": case
    for collective in COLLECTIVES
    for where, host in (("one host", lambda v: None), ("hosts", lambda v: v.local))
    for function, case in (
        (
            network.transfer_seconds,
            lambda v, name=collective, host=host: network.transfer_seconds(
                name, v.nbytes, v.hosts * v.local, v.c, host(v)
            ),
        ),
        (
            network.latency_seconds,
            lambda v, name=collective, host=host: network.latency_seconds(
                name, v.hosts * v.local, v.c, host(v)
            ),
        ),
        (
            network.collective_seconds,
            lambda v, name=collective, host=host: network.collective_seconds(
                name, v.nbytes, v.hosts * v.local, v.c, host(v)
            ),
        ),
    )
} | {
    "among_replicas": lambda v: network.among_replicas(v.c, v.hosts * v.local, v.local)[
        "inter_host_rate"
    ]
}
SAMPLES = st.lists(
    st.fixed_dictionaries(
        {
            "nbytes": st.integers(0, 2**40),
            "hosts": st.integers(1, 512),
            "local": st.integers(1, 8),
        }
    ),
    min_size=1,
    max_size=3,
)
TEN = {
    f"{name}_{what}": value
    for name in COLLECTIVES
    for what, value in (("latency", 0.5), ("rate", 10.0))
} | {"inter_host_latency": 3.0, "inter_host_rate": 2.0}


def test_every_function_is_evaluated_in_three_ways(
    public_functions: Callable[[ModuleType], set[str]],
) -> None:
    assert {name.partition("/")[0] for name in CASES} == public_functions(network)


@pytest.mark.parametrize("name", CASES)
@given(samples=SAMPLES, preset=st.sampled_from(["local", "h100-8"]))
@settings(max_examples=6)
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


def test_an_exchange_sends_each_byte_for_another_host_through_the_network() -> None:
    # of 80 B for 8 ranks, 10 stay, 10 go to the one rank beside and 60 to three other hosts
    assert network.transfer_seconds("all_to_all", 80, 8, TEN, 2) == 10 / 10 + 60 / 2


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_two_stages_share_what_a_host_has_in_common(collective: network.Collective) -> None:
    # of 80 B, half crosses within the host and 3/4 of each rank's half between the four hosts
    assert network.transfer_seconds(collective, 80, 8, TEN, 2) == 40 / 10 + 30 / 2


def test_an_all_reduce_of_hosts_moves_its_bytes_twice() -> None:
    assert network.transfer_seconds("all_reduce", 80, 8, TEN, 2) == 2 * (40 / 10 + 30 / 2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("collective", COLLECTIVES)
@given(nbytes=st.integers(0, 2**40), local=st.integers(1, 8))
def test_one_host_given_as_such_costs_what_it_did(
    collective: network.Collective, nbytes: int, local: int
) -> None:
    told = network.collective_seconds(collective, nbytes, local, TEN, local)
    assert told == network.collective_seconds(collective, nbytes, local, TEN)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("collective", COLLECTIVES)
@given(nbytes=st.integers(0, 2**40), hosts=st.integers(1, 64), local=st.integers(1, 8))
def test_every_byte_that_is_not_a_ranks_own_crosses_one_link(
    collective: network.Collective, nbytes: int, hosts: int, local: int
) -> None:
    same = TEN | {"inter_host_rate": 10.0}
    ranks = hosts * local
    expected = network.transfer_seconds(collective, nbytes, ranks, same)
    found = network.transfer_seconds(collective, nbytes, ranks, same, local)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_a_clocks_ring_has_the_network_of_all_ranks_of_a_host(
    collective: network.Collective,
) -> None:
    # Of 80 B 7/8 pass every rank, at twice 2 B/s where two of a host share them, at most at 10.
    clock = TEN | {network.RING: 0.5}
    assert network.collective_seconds(collective, 80, 8, clock, 2) == 0.5 * (1 + 2) + 70 / 4
    assert network.transfer_seconds(collective, 80, 8, clock | {"inter_host_rate": 6.0}, 2) == 7
    assert network.collective_seconds("all_to_all", 80, 8, clock, 2) == 0.5 + 3 + 10 / 10 + 60 / 2


def test_replicas_have_a_rate_of_their_own_on_a_clocks_network_and_no_other_elsewhere() -> None:
    clock = TEN | {network.RING: 0.5, "replica_rate": 0.25}
    assert network.among_replicas(clock, 8, 2) == clock | {"inter_host_rate": 0.125}
    assert network.among_replicas(clock, 8) == clock
    assert network.among_replicas(TEN, 8, 2) == TEN


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_second_host_adds_its_latency(collective: network.Collective) -> None:
    assert network.latency_seconds(collective, 8, TEN, 8) == 0.5
    assert network.latency_seconds(collective, 8, TEN, 4) == 0.5 + 3.0
