"""Seconds of shards: what each part is made of, and what holds for every type and kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.model import QUANTIZED, ComputeKernel
from shardwright.core.sharding import ShardingType
from shardwright.cost import embedding
from shardwright.cost.embedding import CACHED_KERNELS, Cache, Demand
from shardwright.cost.presets import PRESETS

TYPES = get_args(ShardingType)
ROUTED = tuple(t for t in TYPES if t != "data_parallel")
KERNELS = get_args(ComputeKernel)

# 10 rows of 16 fp32 on 4 ranks of 2 hosts; each rank asks for 12 ids in 4 bags
PLAIN = Demand(12, 4, 10, 16, 64, 4, 2, 3.0, Cache(5, 1.0, 48))
C = {
    "memory_rate": 64.0,
    "row_latency": 0.5,
    "index_cost": 2.0,
    "sort_cost": 3.0,
    "operation_latency": 0.25,
    "all_to_all_latency": 10.0,
    "all_to_all_rate": 8.0,
    "all_gather_latency": 15.0,
    "all_gather_rate": 12.0,
    "all_reduce_latency": 20.0,
    "all_reduce_rate": 16.0,
    "inter_host_rate": 4.0,
    "inter_host_latency": 5.0,
    "host_link_rate": 16.0,
    "ddr_rate": 32.0,
    "ssd_rate": 2.0,
}


def test_only_ids_of_tables_cut_by_rows_are_sorted() -> None:
    seconds = {t: embedding.request_seconds(10, t, C) for t in ROUTED}
    cut = {t for t, value in seconds.items() if value == 30.0}
    assert cut == {"row_wise", "table_row_wise", "grid_shard"}
    assert set(seconds.values()) == {20.0, 30.0}


def test_ids_whose_rows_travel_once_are_sorted_whatever_the_cut() -> None:
    assert {embedding.request_seconds(10, t, C, dedup=True) for t in ROUTED} == {45.0}


def test_a_routed_shard_pays_for_ids_out_rows_back_and_its_update() -> None:
    # 4 ids of 64 B rows on 2 ranks; a row takes 64/64 + 0.5 seconds to touch
    demand = Demand(2, 2, 10, 16, 64, 4, 4, 3.0)
    assert embedding.shard_seconds(demand, "table_wise", "fused", 2, C) == {
        "exchange_ids": 4 * 8 / 2 / 8,
        "lookup": 4 * 1.5,
        "exchange_rows": 4 * 64 / 2 / 8,
        "reduce": 4 * 64 / 2 / 8,
        "step": 4 * 1.5 * 3,
    }


def test_rows_and_gradients_travel_in_their_own_dtypes() -> None:
    found = embedding.shard_seconds(PLAIN, "table_wise", "fused", 4, C)
    assert found["exchange_rows"] == 16 * 16 * 4 * 3 / 4 / 8
    assert found["reduce"] == 16 * 16 * 2 * 3 / 4 / 8


def test_what_leaves_the_host_goes_through_the_network() -> None:
    found = embedding.shard_seconds(PLAIN, "table_wise", "fused", 4, C, local=2)
    rows = 16 * 64
    assert found["exchange_rows"] == rows / 4 / 8 + rows * 2 / 4 / 4


def test_a_dense_replica_pays_for_its_whole_table_whatever_the_batch() -> None:
    # 10 rows of 64 B on 2 ranks: 640 B all-reduced and updated
    demand = Demand(4, 4, 10, 16, 64, 4, 4, 3.0)
    assert embedding.replicated_seconds(demand, "dense", 2, C) == {
        "lookup": 4 * 1.5,
        "reduce": 2 * 640 / 2 / 16 + 4 * 1.5,
        "step": 640 * 3 / 64,
    }


def test_a_replica_by_rows_pays_for_those_that_ranks_looked_up_whatever_the_table() -> None:
    # 3 different rows of 8 + 64 B from each of 2 ranks, out of 4 ids each
    for rows in (10, 10**9):
        demand = Demand(4, 4, rows, 16, 64, 4, 4, 3.0, distinct=3)
        assert embedding.shard_seconds(demand, "data_parallel", "fused", 2, C) == {
            "lookup": 4 * 1.5,
            "reduce": 2 * 3 * 72 / 2 / C["all_gather_rate"] + 4 * (C["sort_cost"] + 1.5),
            "step": 2 * 3 * 1.5 * 3,
        }


@pytest.mark.parametrize(
    ("ids", "rows", "few"),
    [
        (100, 100_000, True),
        (100, 2_000, False),  # not above 1 MiB
        (22_222, 100_000, True),  # 2 x 2 x 22,222 x 72 B against 6,400,000 B
        (22_223, 100_000, False),
    ],
)
def test_rows_are_few_where_exchanging_them_is_less_than_the_table(
    ids: int, rows: int, few: bool
) -> None:
    assert embedding.rows_are_few(ids, rows, 16, 2) == few


def test_rows_in_host_memory_are_touched_through_the_slower_of_link_and_memory() -> None:
    found = embedding.shard_seconds(PLAIN, "table_wise", "fused_uvm", 4, C)
    assert (found["lookup"], found["step"]) == (48 * (64 / 16 + 0.5), 48 * (64 / 16 + 0.5) * 3)
    slow = C | {"ddr_rate": 8.0}
    assert embedding.touch_seconds(PLAIN, "fused_uvm", slow) == 64 / 8 + 0.5


@pytest.mark.parametrize(("kernel", "rate"), [("fused_uvm_caching", 16), ("key_value", 2)])
def test_half_of_the_ids_miss_a_cache_of_half_the_rows(kernel: str, rate: int) -> None:
    found = embedding.shard_seconds(PLAIN, "table_wise", kernel, 4, C)
    fetch = 24 * 64 / rate
    assert (found["lookup"], found["step"]) == (24 * 1.5 + fetch, 48 * 1.5 * 3 + fetch)


def test_a_prefetch_loads_what_would_miss_ahead_of_the_lookup() -> None:
    found = embedding.shard_seconds(PLAIN, "table_wise", "fused_uvm_caching", 4, C, prefetch=True)
    assert (found["load"], found["lookup"]) == (24 * 64 / 16, 48 * 1.5)


@pytest.mark.parametrize(("sharding_type", "parts"), [("row_wise", 4), ("table_row_wise", 2)])
def test_rows_that_repeat_in_a_step_are_fetched_once(sharding_type: str, parts: int) -> None:
    demand = replace(PLAIN, cache=Cache(0, 1.0, 8))
    found = embedding.shard_seconds(
        demand, sharding_type, "fused_uvm_caching", 4, C, local=2, prefetch=True
    )
    assert found["load"] == 8 / parts * 64 / 16


def test_a_dense_kernel_updates_every_row() -> None:
    found = embedding.shard_seconds(PLAIN, "table_wise", "dense", 4, C)
    assert found["step"] == 640 * 3 / 64


@pytest.mark.parametrize("sharding_type", TYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_inference_has_the_forward_parts_alone(sharding_type: str, kernel: str) -> None:
    trained = embedding.shard_seconds(PLAIN, sharding_type, kernel, 4, C)
    served = embedding.shard_seconds(PLAIN, sharding_type, kernel, 4, C, training=False)
    assert served == {p: s for p, s in trained.items() if p not in ("reduce", "step")}


@pytest.mark.parametrize("kernel", QUANTIZED)
@pytest.mark.parametrize("sharding_type", ROUTED)
def test_quantised_tables_are_never_trained(kernel: str, sharding_type: str) -> None:
    found = embedding.shard_seconds(PLAIN, sharding_type, kernel, 4, C)
    assert found.keys() == {"exchange_ids", "lookup", "exchange_rows"}


LOCAL = {name: constant.value for name, constant in PRESETS["local"].constants.items()}


@pytest.mark.parametrize(
    ("sharding_type", "kernel", "kind", "rows", "columns", "seconds"),
    [
        ("data_parallel", "dense", "sgd", 10_000, 16, (1.8432e-6, 3.858432e-4, 1.92e-4)),
        (
            "table_wise",
            "fused",
            "sgd",
            10_000,
            16,
            (1.2288e-6, 7.3728e-6, 9.8304e-6, 9.8304e-6, 2.21184e-5),
        ),
        (
            "row_wise",
            "fused",
            "rowwise_adagrad",
            2_500,
            16,
            (3.072e-7, 1.8432e-6, 2.4576e-6, 2.4576e-6, 2.21184e-5),
        ),
        (
            "column_wise",
            "fused",
            "sgd",
            10_000,
            8,
            (1.2288e-6, 5.7344e-6, 4.9152e-6, 4.9152e-6, 1.72032e-5),
        ),
    ],
)
def test_one_host_costs_what_it_was_validated_at(
    sharding_type: str,
    kernel: str,
    kind: str,
    rows: int,
    columns: int,
    seconds: tuple[float, ...],
) -> None:
    # 128 ids of one rank, 4 ranks, the constants of the preset "local"
    demand = Demand(128, 128, rows, columns, columns * 4, 4, 4, LOCAL[f"{kind}_passes"])
    found = embedding.shard_seconds(demand, sharding_type, kernel, 4, LOCAL)
    assert tuple(found.values()) == pytest.approx(seconds, rel=1e-12)


# Properties of every type and kernel

H100 = {name: constant.value for name, constant in PRESETS["h100-8"].constants.items()}
DEMANDS = st.builds(
    Demand,
    ids=st.integers(0, 2**20),
    bags=st.integers(0, 2**20),
    rows=st.integers(1, 2**32),
    columns=st.integers(1, 1024),
    row_bytes=st.integers(1, 8192),
    forward_bytes=st.sampled_from([1, 2, 4]),
    backward_bytes=st.sampled_from([1, 2, 4]),
    passes=st.sampled_from([0.0, 3.0, 5.0]),
    cache=st.builds(Cache, st.just(0), st.floats(0, 1), st.integers(0, 2**30)),
)
ANY = {
    "demand": DEMANDS,
    "sharding_type": st.sampled_from(TYPES),
    "kernel": st.sampled_from(KERNELS),
    "hosts": st.integers(1, 16),
    "local": st.integers(1, 8),
    "prefetch": st.booleans(),
}


@given(**ANY)
def test_a_shard_of_no_rows_costs_nothing(
    demand: Demand, sharding_type: str, kernel: str, hosts: int, local: int, prefetch: bool
) -> None:
    empty = replace(demand, rows=0)
    ranks = hosts * local
    found = embedding.shard_seconds(
        empty, sharding_type, kernel, ranks, H100, local=local, prefetch=prefetch
    )
    assert set(found.values()) <= {0}
    assert set(embedding.shard_bytes(0, demand.columns, "fp32", "adam", kernel).values()) <= {0}
    buffers = embedding.exchange_bytes(empty, sharding_type, 4, 2, ranks, local)
    assert set(buffers.values()) == {0}


@given(**ANY)
def test_one_rank_pays_no_communication(
    demand: Demand, sharding_type: str, kernel: str, hosts: int, local: int, prefetch: bool
) -> None:
    found = embedding.shard_seconds(demand, sharding_type, kernel, 1, H100, prefetch=prefetch)
    assert found.get("exchange_ids", 0) == found.get("exchange_rows", 0) == 0
    own = 0.0
    if sharding_type == "data_parallel":  # rows are summed, of exchanged ones those that are alike
        sorts = kernel != "dense" and demand.rows > 0
        own = found["lookup"] + (demand.ids * H100["sort_cost"] if sorts else 0)
    assert found.get("reduce", 0) == pytest.approx(own, rel=1e-9)


@given(**ANY, more=st.integers(1, 2**20))
def test_more_ids_never_cost_less(
    demand: Demand,
    sharding_type: str,
    kernel: str,
    hosts: int,
    local: int,
    prefetch: bool,
    more: int,
) -> None:
    larger = replace(demand, ids=demand.ids + more)
    few, many = (
        embedding.shard_seconds(
            d, sharding_type, kernel, hosts * local, H100, local=local, prefetch=prefetch
        )
        for d in (demand, larger)
    )
    assert all(0 <= few[part] <= many[part] * (1 + 1e-12) for part in few)


@pytest.mark.slow
@given(**ANY, more=st.integers(1, 2**20))
def test_more_rows_never_cost_less(
    demand: Demand,
    sharding_type: str,
    kernel: str,
    hosts: int,
    local: int,
    prefetch: bool,
    more: int,
) -> None:
    larger = replace(demand, rows=demand.rows + more)
    few, many = (
        embedding.shard_seconds(
            d, sharding_type, kernel, hosts * local, H100, local=local, prefetch=prefetch
        )
        for d in (demand, larger)
    )
    assert all(0 <= few[part] <= many[part] * (1 + 1e-12) for part in few)
    sizes = [
        embedding.shard_bytes(d.rows, d.columns, "fp32", "adam", kernel)["weight"]
        for d in (demand, larger)
    ]
    assert sizes[0] < sizes[1]


def test_a_cache_makes_host_memory_faster() -> None:
    seconds = {
        kernel: sum(embedding.shard_seconds(PLAIN, "table_wise", kernel, 4, H100).values())
        for kernel in ("fused", *CACHED_KERNELS, "fused_uvm")
    }
    assert seconds["fused"] < seconds["fused_uvm_caching"] < seconds["fused_uvm"]
    assert seconds["fused_uvm_caching"] < seconds["key_value"]


# Latencies of a step


def test_a_step_without_tables_has_no_latencies() -> None:
    assert embedding.step_latencies([], 2, C) == {}


def test_routed_and_replicated_latencies_add_up() -> None:
    routed = embedding.step_latencies(["routed"], 2, C)
    replicated = embedding.step_latencies(["reduced"], 2, C)
    both = embedding.step_latencies(["routed", "reduced"], 2, C)
    assert both == {
        phase: routed.get(phase, 0) + replicated.get(phase, 0)
        for phase in routed.keys() | replicated.keys()
    }


def test_replicas_that_ride_pay_no_collective() -> None:
    alone = embedding.step_latencies(["routed", "reduced"], 2, C)
    riding = embedding.step_latencies(["routed", "riding"], 2, C)
    assert alone["reduce"] - riding["reduce"] == C["all_reduce_latency"]
    assert {p for p in alone if alone[p] != riding[p]} == {"reduce"}


def test_hosts_add_their_latency_to_each_collective() -> None:
    one = embedding.step_latencies(["routed"], 4, C)
    two = embedding.step_latencies(["routed"], 4, C, 2)
    added = {phase: two[phase] - one[phase] for phase in one if two[phase] != one[phase]}
    assert added == {"exchange_ids": 2 * 5.0, "exchange_rows": 5.0, "reduce": 5.0}


def test_a_single_rank_has_operations_but_no_collectives() -> None:
    for part, latencies in embedding.LATENCIES.items():
        for phase, count in latencies.operations.items():
            assert embedding.step_latencies([part], 1, C)[phase] == count * 0.25
