from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.optimizers import TRAINED
from shardwright.cost import dense, network

CASES: dict[str, Callable[[Any], Any]] = {
    "compute_seconds": lambda v: dense.compute_seconds(v.operations, v.flops, v.moved, v.c),
    "product_rate": lambda v: dense.product_rate("bf16", v.c),
    "update_seconds": lambda v: dense.update_seconds(v.payload, v.c),
    "update_seconds/away": lambda v: dense.update_seconds(v.payload, v.c, away=True),
    "copy_seconds": lambda v: dense.copy_seconds(v.payload, v.c, away=False),
    "copy_seconds/away": lambda v: dense.copy_seconds(v.payload, v.c, away=True),
    "fresh_seconds": lambda v: dense.fresh_seconds(v.payload, v.c),
    "gradient_seconds": lambda v: dense.gradient_seconds(v.payload, v.c),
    "replica_seconds/hsdp": lambda v: dense.replica_seconds(
        v.payload, v.shard, v.ranks, twice=False, c=v.c
    ),
    "replica_seconds/hfsdp": lambda v: dense.replica_seconds(
        v.payload, v.shard, v.ranks * 8, twice=True, c=v.c, local=8
    ),
    "communication_seconds/sharded": lambda v: dense.communication_seconds(
        v.payload, v.shard, v.ranks, sharded=True, c=v.c
    ),
    "communication_seconds/replicated": lambda v: dense.communication_seconds(
        v.payload, v.shard, v.ranks, sharded=False, c=v.c
    ),
    "communication_seconds/sharded over hosts": lambda v: dense.communication_seconds(
        v.payload, v.shard, v.ranks * 8, sharded=True, c=v.c, local=8
    ),
    "communication_seconds/replicated over hosts": lambda v: dense.communication_seconds(
        v.payload, v.shard, v.ranks * 8, sharded=False, c=v.c, local=8
    ),
} | {
    f"unit_bytes/{kind}": (
        lambda v, k=kind: dense.unit_bytes(v.payload, v.padding, k, v.payload, v.padding)
    )
    for kind in TRAINED
}
SAMPLES = st.lists(
    st.fixed_dictionaries(
        {
            "payload": st.integers(0, 2**45),
            "shard": st.integers(0, 2**30),
            "padding": st.integers(0, 2**20),
            "flops": st.integers(0, 2**50),
            "moved": st.integers(0, 2**45),
            "operations": st.integers(0, 1000),
            "ranks": st.integers(1, 4096),
        }
    ),
    min_size=1,
    max_size=3,
)
C = {
    "compute_rate": 100.0,
    "memory_rate": 10.0,
    "ddr_rate": 4.0,
    "host_link_rate": 2.0,
    "operation_latency": 0.5,
    "all_gather_latency": 1.0,
    "all_gather_rate": 10.0,
    "reduce_scatter_latency": 2.0,
    "reduce_scatter_rate": 5.0,
    "all_reduce_latency": 3.0,
    "all_reduce_rate": 10.0,
    "fresh_memory_bytes": 1000.0,
    "fresh_memory_rate": 100.0,
}


def test_every_function_is_evaluated_in_three_ways(
    public_functions: Callable[[ModuleType], set[str]],
) -> None:
    assert {name.partition("/")[0] for name in CASES} == public_functions(dense)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CASES)
@given(samples=SAMPLES, preset=st.sampled_from(["local", "h100-8"]))
@settings(max_examples=6)
def test_numbers_arrays_and_amounts_agree(
    agree: Callable[..., None], name: str, samples: list[dict[str, float]], preset: str
) -> None:
    agree(CASES[name], samples, preset)


@pytest.mark.parametrize(
    ("kind", "state", "padding"), [("sgd", 0, 24), ("adagrad", 404, 36), ("adam", 804, 48)]
)
def test_padding_counts_once_for_each_role(kind: str, state: int, padding: int) -> None:
    assert dense.unit_bytes(400, 12, kind, 400, 12) == {
        "weight": 400,
        "gradient": 400,
        "optimizer_state": state,
        "padding": padding,
    }


def test_replicas_of_a_clocks_machine_sum_at_their_own_rate() -> None:
    clock = C | {network.RING: 0.0, "inter_host_rate": 8.0, "replica_rate": 4.0}
    # Of 100 B 3/4 pass every rank twice, at 4 B/s over the root of 4 hosts.
    found = dense.replica_seconds(0, 100, 4, twice=False, c=clock, local=1)
    assert found["reduce"] == 3.0 * (1 + 2) + 150 / 2
    whole = dense.communication_seconds(100, 100, 4, sharded=False, c=clock, local=1)
    assert whole["reduce"] == found["reduce"]
    cut = dense.communication_seconds(100, 25, 4, sharded=True, c=clock, local=1)
    assert cut["gather"] == 1.0 * (1 + 2) + 75 / 8


def test_computing_takes_its_products_what_others_move_and_its_calls() -> None:
    assert dense.compute_seconds(4, 300, 70, C) == 300 / 100 + 70 / 10 + 4 * 0.5
    faster = C | {"bf16_compute_rate": 600.0}
    assert dense.compute_seconds(0, 300, 0, faster, "bf16") == 300 / 600
    assert dense.compute_seconds(0, 300, 0, faster, "fp16") == 300 / 100  # no rate of its own


def test_a_sharded_unit_pays_a_gather_and_a_reduce_scatter() -> None:
    found = dense.communication_seconds(100, 50, 2, sharded=True, c=C)
    assert found == {"gather": 1 + 50 / 10, "reduce": 2 + 50 / 5}


def test_up_to_the_threshold_memory_is_used_again() -> None:
    assert [dense.fresh_seconds(n, C) for n in (0, 999, 1000, 1001)] == [0, 0, 0, 10.01]


def test_a_gather_of_new_memory_touches_it_and_a_reduce_touches_its_copy_and_its_shard() -> None:
    found = dense.communication_seconds(4000, 2000, 2, sharded=True, c=C)
    assert found == {"gather": 1 + 200 + 40, "reduce": 2 + 400 + 40 + 20}


def test_an_all_reduce_works_in_place() -> None:
    found = dense.communication_seconds(4000, 4000, 2, sharded=False, c=C)
    assert found["reduce"] == 3 + 400


def test_a_gradient_is_cleared_and_summed_in_memory_that_may_be_new() -> None:
    assert dense.gradient_seconds(1000, C) == 100
    assert dense.gradient_seconds(2000, C) == 200 + 20


def test_a_unit_that_spans_hosts_pays_for_the_network() -> None:
    c = C | {"inter_host_rate": 1.0, "inter_host_latency": 7.0}
    found = dense.communication_seconds(100, 25, 4, sharded=True, c=c, local=2)
    assert found == {"gather": 8 + 50 / 10 + 25, "reduce": 9 + 50 / 5 + 25}


def test_a_replicated_unit_pays_an_all_reduce_alone() -> None:
    found = dense.communication_seconds(100, 100, 2, sharded=False, c=C)
    assert found == {"gather": 0.0, "reduce": 3 + 100 / 10}


def test_an_update_reads_all_its_bytes() -> None:
    assert dense.update_seconds(30, C) == 3.0 + 0.5
