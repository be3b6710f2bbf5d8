from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.kinds import nbytes
from shardwright.core.model import QUANTIZED, ComputeKernel, TableSpec
from shardwright.core.optimizers import TABLES
from shardwright.core.sharding import ShardingType
from shardwright.cost import embedding
from shardwright.cost.embedding import Cache, Demand
from shardwright.job.planner import PipelineType

TYPES = get_args(ShardingType)
KERNELS = get_args(ComputeKernel)
KINDS = TABLES


def _demand(v: Any) -> Demand:
    """What a step asks of a shard, out of a sample's quantities."""
    cache = Cache(v.cached, v.miss, v.ids)
    passes = v.c["sgd_passes"]
    return Demand(
        v.ids, v.bags, v.rows, v.columns, v.columns * v.size, v.sent, v.sent, passes, cache, v.bags
    )


def _seconds(v: Any, sharding_type: str, kernel: str, local: Any, **flags: bool) -> dict[str, Any]:
    ranks = v.hosts * v.local
    return embedding.shard_seconds(
        _demand(v), sharding_type, kernel, ranks, v.c, local=local, **flags
    )


def _summing(v: Any) -> Demand:
    """Of a table of several column shards whose updates need sums over all of them."""
    return dataclasses.replace(_demand(v), dim=v.columns * v.local, swept=v.ids)


CASES: dict[str, Callable[[Any], Any]] = {
    "replicated_seconds": lambda v: embedding.replicated_seconds(_demand(v), "dense", v.hosts, v.c),
    "replicated_seconds/by rows": lambda v: embedding.replicated_seconds(
        _demand(v), "fused", v.hosts, v.c
    ),
    "rows_sent_back": lambda v: embedding.rows_sent_back(v.ids, v.bags, v.hosts),
    "bytes_of_sums": lambda v: embedding.bytes_of_sums(_summing(v), v.hosts),
    "shard_seconds/with sums over columns": lambda v: embedding.shard_seconds(
        _summing(v), "grid_shard", "fused", v.hosts * v.local, v.c, local=v.local
    ),
}
for _type in TYPES:
    CASES |= {
        f"row_parts/{_type}": lambda v, t=_type: embedding.row_parts(t, v.hosts * v.local, v.local),
        f"ids_at_shard/{_type}": lambda v, t=_type: embedding.ids_at_shard(
            v.ids, v.rows, v.hosts * v.local, t, v.local
        ),
        f"ids_at_shard/{_type} on one host": lambda v, t=_type: embedding.ids_at_shard(
            v.ids, v.rows, v.local, t
        ),
        f"request_seconds/{_type}": lambda v, t=_type: embedding.request_seconds(v.ids, t, v.c),
        f"request_seconds/{_type} of each row once": lambda v, t=_type: embedding.request_seconds(
            v.ids, t, v.c, dedup=True
        ),
        f"exchange_bytes/{_type}": lambda v, t=_type: embedding.exchange_bytes(
            _demand(v), t, v.size, 2, v.hosts * v.local, v.local
        ),
    }
    for _kernel in KERNELS:
        CASES |= {
            f"shard_seconds/{_type}/{_kernel}": lambda v, t=_type, k=_kernel: _seconds(
                v, t, k, v.local
            ),
            f"shard_seconds/{_type}/{_kernel} on one host": lambda v, t=_type, k=_kernel: _seconds(
                v, t, k, None, training=False, prefetch=True
            ),
        }
for _kernel in KERNELS:
    CASES |= {
        f"row_bytes/{_kernel}": lambda v, k=_kernel: embedding.row_bytes(v.columns, "bf16", k),
        f"slow_rate/{_kernel}": lambda v, k=_kernel: embedding.slow_rate(k, v.c),
        f"touch_seconds/{_kernel}": lambda v, k=_kernel: embedding.touch_seconds(
            _demand(v), k, v.c
        ),
    }
    for _kind in KINDS:
        CASES[f"shard_bytes/{_kernel}/{_kind}"] = lambda v, k=_kernel, o=_kind: (
            embedding.shard_bytes(v.rows, v.columns, "bf16", o, k)
        )
for _part in embedding.LATENCIES:
    CASES[f"step_latencies/{_part}"] = lambda v, part=_part: embedding.step_latencies(
        ["routed", part], v.hosts * v.local, v.c, v.local
    )
for _part in ("routed", "steady"):
    CASES[f"exchange_latency/{_part}"] = lambda v, part=_part: embedding.exchange_latency(
        part, "exchange_ids", v.hosts * v.local, v.c, v.local
    )
OF_CACHES = {"cached_rows", "cache_bytes", "fetched_rows"}  # in test_cache.py
OF_NAMES = {"home", "replica_part", "rows_are_few", "dedup_pays"}
SAMPLES = st.lists(
    st.fixed_dictionaries(
        {
            "rows": st.one_of(st.just(0), st.integers(0, 2**32)),
            "columns": st.integers(1, 1024),
            "size": st.sampled_from([1, 2, 4, 8]),
            "sent": st.sampled_from([1, 2, 4]),
            "ids": st.integers(0, 2**20),
            "bags": st.integers(0, 2**20),
            "cached": st.integers(0, 2**20),
            "miss": st.floats(0, 1),
            "hosts": st.integers(1, 512),
            "local": st.integers(1, 8),
        }
    ),
    min_size=1,
    max_size=3,
)


def test_every_function_is_evaluated_in_three_ways(
    public_functions: Callable[[ModuleType], set[str]],
) -> None:
    assert {name.partition("/")[0] for name in CASES} == (
        public_functions(embedding) - OF_NAMES - OF_CACHES
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CASES)
@given(samples=SAMPLES, preset=st.sampled_from(["local", "h100-8"]))
@settings(max_examples=2)
def test_numbers_arrays_and_amounts_agree(
    agree: Callable[..., None], name: str, samples: list[dict[str, float]], preset: str
) -> None:
    agree(CASES[name], samples, preset)


def test_bytes_of_a_large_table_are_exact_integers() -> None:
    found = embedding.shard_bytes(40_000_000 * 96, 128, "fp32", "sgd", "fused")["weight"]
    assert type(found) is int
    assert found == 1_966_080_000_000


@pytest.mark.parametrize(
    ("kind", "kernel", "held"),
    [
        ("sgd", "fused", (640, 0, 0)),
        ("none", "fused", (640, 0, 0)),
        ("rowwise_adagrad", "fused", (640, 0, 40)),
        ("adagrad", "fused_uvm", (640, 0, 640)),
        ("adam", "key_value", (640, 0, 1280)),
        ("sgd", "dense", (640, 640, 0)),
        ("rowwise_adagrad", "dense", (640, 640, 40)),
    ],
)
def test_a_shard_keeps_weights_states_and_a_replica_its_gradient(
    kind: str, kernel: str, held: tuple[int, int, int]
) -> None:
    found = embedding.shard_bytes(10, 16, "fp32", kind, kernel)
    assert (found["weight"], found["gradient"], found["optimizer_state"]) == held


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_gradient_of_a_replica_in_half_precision_is_whole(dtype: str) -> None:
    found = embedding.shard_bytes(10, 16, dtype, "sgd", "dense")
    assert (found["weight"], found["gradient"]) == (320, 640)


def test_inference_keeps_weights_alone() -> None:
    found = embedding.shard_bytes(10, 16, "fp32", "adam", "fused", training=False)
    assert found == {"weight": 640}


@pytest.mark.parametrize("kernel", QUANTIZED)
def test_a_quantised_row_has_a_byte_per_column_a_scale_and_an_offset(kernel: str) -> None:
    found = embedding.shard_bytes(10, 16, "fp32", "adam", kernel)
    assert found == {"weight": 10 * (16 + 8)}


@pytest.mark.parametrize(("kind", "row"), [("int8", 15 + 8), ("int4", 8 + 4)])
def test_rows_of_a_kind_of_bytes_take_what_the_kind_says(kind: str, row: int) -> None:
    assert embedding.shard_bytes(10, 15, kind, "none", "quant") == {"weight": 10 * row}
    packed = TableSpec("t", 10, 15, kind=kind)  # type: ignore[arg-type]
    assert nbytes(packed) == 10 * row


@pytest.mark.parametrize(
    ("kernel", "cuda", "cpu"),
    [
        ("dense", "hbm", "ddr"),
        ("fused", "hbm", "ddr"),
        ("quant", "hbm", "ddr"),
        ("fused_uvm", "ddr", "ddr"),
        ("fused_uvm_caching", "ddr", "ddr"),
        ("quant_uvm", "ddr", "ddr"),
        ("quant_uvm_caching", "ddr", "ddr"),
        ("key_value", "ssd", "ssd"),
    ],
)
def test_every_kernel_has_a_home_for_its_weights(kernel: str, cuda: str, cpu: str) -> None:
    assert (embedding.home(kernel, "cuda"), embedding.home(kernel, "cpu")) == (cuda, cpu)


def test_every_pipeline_says_how_many_inputs_it_holds() -> None:
    assert set(embedding.INPUTS_IN_FLIGHT) == set(get_args(PipelineType))


# 10 rows of 16 fp32 on 4 ranks of 2 hosts; each rank asks for 12 ids in 4 bags
PLAIN = Demand(12, 4, 10, 16, 64, 4, 2, 3.0, Cache(5, 1.0, 48))


@pytest.mark.parametrize(
    ("sharding_type", "ids", "rows"),
    [
        ("data_parallel", 12, 4),
        ("table_wise", 48, 16),
        ("column_wise", 48, 16),
        ("table_column_wise", 48, 16),
        ("row_wise", 12, 12),
        ("table_row_wise", 24, 16),
        ("grid_shard", 24, 16),
    ],
)
def test_a_shard_buffers_its_share_of_ids_and_a_row_per_bag(
    sharding_type: str, ids: int, rows: int
) -> None:
    found = embedding.exchange_bytes(PLAIN, sharding_type, 4, 3, 4, 2)
    assert found == {"input": ids * 8 * 3, "output": rows * 16 * 4}
    assert all(type(value) is int for value in found.values())


def test_sums_go_to_every_shard_that_has_other_columns() -> None:
    demand = Demand(8, 8, 100, 4, 16, 4, 4, 1, dim=16, swept=10)
    assert embedding.bytes_of_sums(demand, 2) == 5 * 4 * 4
    whole = dataclasses.replace(demand, columns=16)
    assert embedding.bytes_of_sums(whole, 2) == 0
