from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost import embedding

TYPES = ("data_parallel", "table_wise", "row_wise", "column_wise")
KINDS = ("sgd", "rowwise_adagrad")
CASES: dict[str, Callable[[Any], Any]] = {
    "weight_bytes": lambda v: embedding.weight_bytes(v.rows, v.columns, v.size),
    "routed_seconds": lambda v: embedding.routed_seconds(
        v.ids, v.columns, v.size, v.ranks, v.c["sgd_passes"], v.c
    ),
    "replicated_seconds": lambda v: embedding.replicated_seconds(
        v.ids, v.rows, v.columns, v.size, v.ranks, v.c["sgd_passes"], v.c
    ),
}
for _kind in KINDS:
    CASES[f"optimizer_state_bytes/{_kind}"] = lambda v, k=_kind: embedding.optimizer_state_bytes(
        v.rows, k
    )
for _type in TYPES:
    CASES |= {
        f"gradient_bytes/{_type}": lambda v, t=_type: embedding.gradient_bytes(
            v.rows, v.columns, v.size, t
        ),
        f"ids_at_shard/{_type}": lambda v, t=_type: embedding.ids_at_shard(v.ids, v.ranks, t),
        f"request_seconds/{_type}": lambda v, t=_type: embedding.request_seconds(v.ids, t, v.c),
    }
    for _kind in KINDS:
        CASES |= {
            f"shard_bytes/{_type}/{_kind}": lambda v, t=_type, k=_kind: embedding.shard_bytes(
                v.rows, v.columns, "bf16", k, t
            ),
            f"shard_seconds/{_type}/{_kind}": lambda v, t=_type, k=_kind: embedding.shard_seconds(
                v.ids, v.rows, v.columns, "fp32", k, v.ranks, t, v.c
            ),
        }
for _routed in (False, True):
    for _replicated in (False, True):
        CASES[f"step_latencies/{_routed}/{_replicated}"] = lambda v, a=_routed, b=_replicated: (
            embedding.step_latencies(a, b, b, v.ranks, v.c)
        )
SAMPLES = st.lists(
    st.fixed_dictionaries(
        {
            "rows": st.integers(0, 2**32),
            "columns": st.integers(1, 1024),
            "size": st.sampled_from([1, 2, 4, 8]),
            "ids": st.integers(0, 2**20),
            "ranks": st.integers(1, 4096),
        }
    ),
    min_size=1,
    max_size=3,
)


def test_every_function_is_evaluated_in_three_ways(
    public_functions: Callable[[ModuleType], set[str]],
) -> None:
    assert {name.partition("/")[0] for name in CASES} == public_functions(embedding)


@pytest.mark.parametrize("name", CASES)
@given(samples=SAMPLES, preset=st.sampled_from(["local", "h100-8"]))
@settings(deadline=None, max_examples=10)
def test_numbers_arrays_and_amounts_agree(
    agree: Callable[..., None], name: str, samples: list[dict[str, float]], preset: str
) -> None:
    agree(CASES[name], samples, preset)


def test_bytes_of_a_large_table_are_exact_integers() -> None:
    found = embedding.weight_bytes(40_000_000, 128, 4 * 96)
    assert type(found) is int
    assert found == 1_966_080_000_000


@pytest.mark.parametrize(
    ("kind", "sharding_type", "held"),
    [
        ("sgd", "table_wise", (640, 0, 0)),
        ("rowwise_adagrad", "table_wise", (640, 0, 40)),
        ("rowwise_adagrad", "row_wise", (640, 0, 40)),
        ("sgd", "column_wise", (640, 0, 0)),
        ("sgd", "data_parallel", (640, 640, 0)),
        ("rowwise_adagrad", "data_parallel", (640, 640, 40)),
    ],
)
def test_a_shard_keeps_weights_states_and_a_replica_its_gradient(
    kind: str, sharding_type: str, held: tuple[int, int, int]
) -> None:
    found = embedding.shard_bytes(10, 16, "fp32", kind, sharding_type)
    assert (found["weight"], found["gradient"], found["optimizer_state"]) == held


@pytest.mark.parametrize(
    ("sharding_type", "ids"),
    [("data_parallel", 128), ("row_wise", 128), ("table_wise", 512), ("column_wise", 512)],
)
def test_a_shard_serves_its_share_of_the_global_batch(sharding_type: str, ids: int) -> None:
    assert embedding.ids_at_shard(128, 4, sharding_type) == ids


C = {
    "memory_rate": 64.0,
    "row_latency": 0.5,
    "index_cost": 2.0,
    "sort_cost": 3.0,
    "operation_latency": 0.25,
    "all_to_all_latency": 10.0,
    "all_to_all_rate": 8.0,
    "all_reduce_latency": 20.0,
    "all_reduce_rate": 16.0,
}


def test_only_row_wise_ids_are_sorted() -> None:
    seconds = {t: embedding.request_seconds(10, t, C) for t in TYPES[1:]}
    assert seconds == {"table_wise": 20.0, "row_wise": 30.0, "column_wise": 20.0}


def test_a_routed_shard_pays_for_ids_out_rows_back_and_its_update() -> None:
    # 4 ids of 64 B rows on 2 ranks; a row takes 64/64 + 0.5 seconds to touch
    assert embedding.routed_seconds(4, 16, 4, 2, 3.0, C) == {
        "exchange_ids": 4 * 8 / 2 / 8,
        "lookup": 4 * 1.5,
        "exchange_rows": 4 * 64 / 2 / 8,
        "reduce": 4 * 64 / 2 / 8,
        "step": 4 * 1.5 * 3,
    }


def test_a_replica_pays_for_its_whole_table_whatever_the_batch() -> None:
    # 10 rows of 64 B on 2 ranks: 640 B all-reduced and updated
    assert embedding.replicated_seconds(4, 10, 16, 4, 2, 3.0, C) == {
        "lookup": 4 * 1.5,
        "reduce": 2 * 640 / 2 / 16 + 4 * 1.5,
        "step": 640 * 3 / 64,
    }


def test_a_step_without_tables_has_no_latencies() -> None:
    assert embedding.step_latencies(False, False, False, 2, C) == {}


def test_routed_and_replicated_latencies_add_up() -> None:
    routed = embedding.step_latencies(True, False, False, 2, C)
    replicated = embedding.step_latencies(False, True, True, 2, C)
    both = embedding.step_latencies(True, True, True, 2, C)
    assert both == {
        phase: routed.get(phase, 0) + replicated.get(phase, 0)
        for phase in routed.keys() | replicated.keys()
    }


def test_replicas_that_ride_pay_no_collective() -> None:
    alone = embedding.step_latencies(True, True, True, 2, C)
    riding = embedding.step_latencies(True, True, False, 2, C)
    assert alone["reduce"] - riding["reduce"] == C["all_reduce_latency"]
    assert {p for p in alone if alone[p] != riding[p]} == {"reduce"}


def test_a_single_rank_has_operations_but_no_collectives() -> None:
    for phase, count in embedding.ROUTED_OPERATIONS.items():
        assert embedding.step_latencies(True, False, False, 1, C)[phase] == count * 0.25
