from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.amount import Amount, Step, derivation, leaf, named
from shardwright.core.batch import Batch
from shardwright.core.cluster import TIERS, Cluster
from shardwright.core.errors import InputError
from shardwright.core.model import CacheSpec, TableSpec
from shardwright.job.planner import EstimatorSection
from shardwright.planner.options import QUANTIZED_TYPES
from shardwright.planner.pricing.evaluate import PricingContext
from shardwright.torchrec import storage, times
from shardwright.torchrec.pricing import derive, price
from shardwright.torchrec.profile import DDR_CAP, HBM_CAP, SSD_CAP, TORCHREC, torchrec_options
from shardwright.torchrec.storage import MeshSizes, Shards, ShardScheme

TYPES = (
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
)
CUDA_KERNELS = ("fused", "fused_uvm", "fused_uvm_caching", "key_value")
QUANTIZED_KERNELS = ("quant", "quant_uvm", "quant_uvm_caching")
PIPELINES = ("none", "train_base", "train_sparse_dist", "train_prefetch_sparse_dist")
OPTIMIZERS = ("none", "sgd", "adam", "adagrad", "rowwise_adagrad")
C = {name: constant.value for name, constant in TORCHREC.items()}

PLACES = [("data_parallel", "dense", "cuda"), ("data_parallel", "dense", "cpu")]
PLACES += [(t, kernel, "cuda") for t in TYPES for kernel in CUDA_KERNELS]
PLACES += [(t, "fused", "cpu") for t in TYPES]
PLACES += [(t, kernel, "cuda") for t in QUANTIZED_TYPES for kernel in QUANTIZED_KERNELS]
PLACES += [(t, "quant", "cpu") for t in QUANTIZED_TYPES]
SCHEMES = st.builds(
    lambda place, *flags: ShardScheme(*place, *flags),
    st.sampled_from(PLACES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(PIPELINES),
    st.booleans(),
    st.booleans(),
)
ELEMENT = st.sampled_from([1, 2, 4, 8])
SHARE = st.sampled_from([0.05, 0.1, 0.2, 0.33, 0.5, 0.9, 1.0])
COUNT = st.floats(0, 2**30)
SAMPLE = st.fixed_dictionaries(
    {
        "rows": st.integers(0, 2**33),
        "columns": st.integers(1, 1024),
        "table_rows": st.integers(1, 2**33),
        "dim": st.integers(1, 1024),
        "lookups": COUNT,
        "outputs": COUNT,
        "element_bytes": ELEMENT,
        "output_bytes": ELEMENT,
        "forward_bytes": ELEMENT,
        "backward_bytes": ELEMENT,
        "forward_reduce_bytes": ELEMENT,
        "backward_reduce_bytes": ELEMENT,
        "state": st.sampled_from([0, 1.0, 2.0, 1 / 128, 1 / 384]),
        "load_factor": SHARE,
        "cached_share": SHARE,
        "key_value_share": SHARE,
        "l1_cache_bytes": st.integers(0, 2**40),
        "passes": st.integers(1, 12),
        "expected_lookups": COUNT,
        "misses": st.floats(0, 1),
        "world": st.integers(1, 4096),
        "local": st.integers(1, 64),
        "group": st.integers(1, 256),
    }
)
SAMPLES = st.lists(SAMPLE, min_size=1, max_size=3)

Sample = dict[str, Any]
Case = Callable[[ShardScheme, Shards, MeshSizes, Any], Any]


def _features(q: Shards, ranks: MeshSizes) -> tuple[Any, Any, Any]:
    return (q.misses, q.lookups), (q.load_factor, q.cached_share), (ranks.world, ranks.group)


DEMAND: dict[str, Case] = {
    "batch_lookups": lambda s, q, r, c: storage.batch_lookups(*_features(q, r)),
    "batch_outputs": lambda s, q, r, c: storage.batch_outputs(*_features(q, r)),
    "state_share": lambda s, q, r, c: {
        kind: storage.state_share(kind, q.dim, c) for kind in OPTIMIZERS
    },
    "served_lookups": lambda s, q, r, c: storage.served_lookups(s, q, r),
    "returned_rows": lambda s, q, r, c: storage.returned_rows(s, q, r),
    "id_bytes": lambda s, q, r, c: storage.id_bytes(q.lookups, c),
}
STORAGE: dict[str, Case] = {
    "input_bytes": storage.input_bytes,
    "output_bytes": lambda s, q, r, c: storage.output_bytes(s, q, r),
    "table_bytes": lambda s, q, r, c: storage.table_bytes(s, q),
    "weight_bytes": lambda s, q, r, c: storage.weight_bytes(s, q, q.table_rows, "ddr"),
    "kept_bytes": lambda s, q, r, c: storage.kept_bytes(s, q, q.table_rows, "hbm"),
    "bookkeeping_bytes": lambda s, q, r, c: storage.bookkeeping_bytes(s, q, c),
    "key_value_cache_bytes": lambda s, q, r, c: storage.key_value_cache_bytes(q),
    "stored_bytes": lambda s, q, r, c: storage.stored_bytes(s, q, c),
    "held_input_bytes": lambda s, q, r, c: storage.held_input_bytes(s, q.rows, q.passes, c),
    "transient_bytes": storage.transient_bytes,
    "shard_bytes": storage.shard_bytes,
}


def _flow(s: ShardScheme, q: Shards, r: MeshSizes, c: Any) -> times.MovedBytes:
    return times.flow(s, q, r, c)


TIME: dict[str, Case] = {
    "memory_rate": lambda s, q, r, c: times.memory_rate(s, q, c),
    "link_rate": lambda s, q, r, c: times.link_rate("rate", r.world, r.local, c),
    "all_reduce_rate": lambda s, q, r, c: times.all_reduce_rate(r, c),
    "block_penalty": lambda s, q, r, c: times.block_penalty(q.columns, c),
    "flow": lambda s, q, r, c: _flow(s, q, r, c)._asdict(),
    "compute_times": lambda s, q, r, c: times.compute_times(s, q, r, _flow(s, q, r, c), c),
    "replica_times": lambda s, q, r, c: times.replica_times(q, r, _flow(s, q, r, c), c),
    "exchange_times": lambda s, q, r, c: times.exchange_times(s, q, r, _flow(s, q, r, c), c),
    "between_groups": lambda s, q, r, c: times.between_groups(q, r, c),
    "communication_times": lambda s, q, r, c: times.communication_times(
        s, q, r, _flow(s, q, r, c), c
    ),
    "prefetch_time": times.prefetch_time,
    "input_dist_time": times.input_dist_time,
    "shard_seconds": times.shard_seconds,
    "total_seconds": lambda s, q, r, c: times.total_seconds(times.shard_seconds(s, q, r, c)),
}
CASES = DEMAND | STORAGE | TIME
EXACT = {"id_bytes", *STORAGE}  # whole bytes: arrays hold Python numbers


def _flat(result: Any, prefix: str = "result") -> dict[str, Any]:
    if not isinstance(result, dict):
        return {prefix: result}
    parts = [_flat(value, f"{prefix}.{key}") for key, value in result.items()]
    return {name: value for part in parts for name, value in part.items()}


def _evaluate(name: str, scheme: ShardScheme, sample: Sample, c: Any) -> dict[str, Any]:
    q = Shards(*(sample[part] for part in Shards._fields))
    ranks = MeshSizes(*(sample[part] for part in MeshSizes._fields))
    return _flat(CASES[name](scheme, q, ranks, c))


@pytest.mark.parametrize(
    ("cases", "module"),
    [(DEMAND | STORAGE, storage), (TIME, times)],
)
def test_every_function_is_evaluated_in_three_ways(
    public_functions: Callable[[ModuleType], set[str]], cases: dict[str, Case], module: ModuleType
) -> None:
    assert set(cases) == public_functions(module)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CASES)
@given(scheme=SCHEMES, samples=SAMPLES)
@settings(max_examples=6)
def test_numbers_arrays_and_amounts_agree(
    reevaluate: Callable[[Sequence[Step]], None],
    name: str,
    scheme: ShardScheme,
    samples: list[Sample],
) -> None:
    dtype = object if name in EXACT else float
    arrays = {part: np.array([s[part] for s in samples], dtype=dtype) for part in samples[0]}
    vectors = _evaluate(name, scheme, arrays, C)
    leaves = {constant: leaf(value, constant) for constant, value in C.items()}
    for index, sample in enumerate(samples):
        plain = _evaluate(name, scheme, sample, C)
        inputs = {part: leaf(value, part) for part, value in sample.items()}
        explained = _evaluate(name, scheme, inputs, leaves)
        assert plain.keys() == vectors.keys() == explained.keys()
        for part, value in plain.items():
            element = np.broadcast_to(np.asarray(vectors[part]), len(samples))[index]
            if name in EXACT:
                assert type(value) is int, part
                assert element == value, part
            assert element == pytest.approx(value, rel=1e-13, abs=0), part
            found = explained[part]
            assert isinstance(found, Amount), part
            assert (type(found.value), found.value) == (type(value), value), part
            reevaluate(derivation(named("result_of_test", found)))


def test_bytes_beyond_int64_and_float64_are_exact() -> None:
    # the estimator's product of the base and the shard is past 2^80 on the way
    sample = dict.fromkeys(Shards._fields, 0) | {
        "rows": 2**32 + 1,
        "columns": 513,
        "table_rows": 2 * (2**32 + 1),
        "dim": 513,
        "element_bytes": 4,
    }
    scheme = ShardScheme("row_wise", "fused", "cuda")
    found = storage.stored_bytes(scheme, Shards(**sample), C)["hbm"]["weight"]
    assert (type(found), found) == (int, (2**32 + 1) * 513 * 4)


def test_the_penalty_has_two_steps() -> None:
    widths = (4, 63, 64, 127, 128, 512)
    found = [times.block_penalty(width, C) for width in widths]
    assert found == [1.75, 1.75, 1.15, 1.15, 1.0, 1.0]


def test_a_kernel_without_a_bandwidth_is_refused() -> None:
    sample = Shards(**dict.fromkeys(Shards._fields, 1))
    with pytest.raises(InputError, match=r"kernel on cpu: expected .*, got 'fused_uvm'"):
        times.memory_rate(ShardScheme("table_wise", "fused_uvm", "cpu"), sample, C)


def _cluster(device: Any) -> Cluster:
    return Cluster("torchrec-1.9", 16, 4, device, HBM_CAP, DDR_CAP, SSD_CAP, 8, TORCHREC)


TABLES = {
    "bags": TableSpec(
        "bags",
        1_000_003,
        192,
        dtype="bf16",
        optimizer="rowwise_adagrad",
        pooling_factors=(0.5, 20.0),
        num_poolings=(1.0, 0.5),
        batch_sizes=(512, 100),
        output_dtype="fp32",
        module_weighted=True,
        sharding_types=("data_parallel", *TYPES),
        compute_kernels=("dense", *CUDA_KERNELS),
        min_partition=32,
        cache=CacheSpec(load_factor=0.15, passes=4, stats=(123456, 0.3, 0.4)),
        kv_l1_mb=64,
    ),
    "sequence": TableSpec(
        "sequence", 5, 100, optimizer="adam", pooled=False, compute_kernels=("dense", *CUDA_KERNELS)
    ),
    "quantised": TableSpec(
        "quantised", 999_983, 96, dtype="int8", compute_kernels=QUANTIZED_KERNELS, min_partition=32
    ),
}
ESTIMATORS = {
    "default": EstimatorSection(),
    "prefetch": EstimatorSection(
        "train_prefetch_sparse_dist",
        count_ephemeral=True,
        communication=("int8", "bf16"),
        cache_load_factor=0.3,
        prefetch_pipeline=True,
    ),
    "inference": EstimatorSection(is_inference=True),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", TABLES)
def test_an_explanation_ends_in_the_price(
    reevaluate: Callable[[Sequence[Step]], None], name: str, device: str, estimator: str
) -> None:
    table = TABLES[name]
    setting = PricingContext(_cluster(device), Batch(256), ESTIMATORS[estimator])
    choices = price(setting, [(table, o) for o in torchrec_options(table, setting.cluster)])
    for choice in choices:
        assert len(choice.costs) == len(choice.option.runs)
        for index in {0, len(choice.costs) - 1}:
            found = derive(setting, table, choice.option, index)
            cost = choice.costs[index]
            assert found.seconds.value == pytest.approx(cost.total_seconds, rel=1e-14, abs=0)
            reevaluate(derivation(found.seconds))
            assert tuple(found.storage[tier].value for tier in TIERS) == cost.storage
            for amount in found.storage.values():
                reevaluate(derivation(amount))


def test_an_explanation_says_where_every_input_is_from() -> None:
    setting = PricingContext(_cluster("cuda"), Batch(256), ESTIMATORS["prefetch"])
    for table in TABLES.values():
        for option in torchrec_options(table, setting.cluster):
            found = derive(setting, table, option, 0)
            for amount in (found.seconds, *found.storage.values()):
                inputs = [step for step in derivation(amount) if not step.formula]
                assert all(step.source for step in inputs)


def test_equal_shards_of_an_option_share_a_cost() -> None:
    table = TableSpec("t", 1000, 64, sharding_types=("grid_shard",), min_partition=16)
    setting = PricingContext(_cluster("cuda"), Batch(256))
    found = torchrec_options(table, setting.cluster)
    (choice, *_) = price(setting, [(table, option) for option in found])
    assert len(choice.option.runs) == 4
    assert len({id(cost) for cost in choice.costs}) == 1


def test_a_quantised_row_has_a_scale_and_an_offset() -> None:
    sample = Shards(**dict.fromkeys(Shards._fields, 1) | {"table_rows": 10, "dim": 64})
    for kernel, nbytes in (("fused", 640), ("quant", 680), ("quant_uvm_caching", 680)):
        scheme = ShardScheme("table_wise", kernel, "cuda")
        assert storage.table_bytes(scheme, sample) == nbytes


@pytest.mark.parametrize(
    ("kernel", "device", "tiers"),
    [
        ("quant", "cpu", {"ddr"}),
        ("quant", "cuda", {"hbm"}),
        ("quant_uvm", "cuda", {"ddr"}),
        ("quant_uvm_caching", "cuda", {"hbm", "ddr"}),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_quantised_tables_have_no_optimizer_state(
    kernel: str, device: str, tiers: set[str], inference: bool
) -> None:
    sample = Shards(**dict.fromkeys(Shards._fields, 1))
    scheme = ShardScheme("table_wise", kernel, device, inference=inference)
    kept = storage.stored_bytes(scheme, sample, C)
    assert set(kept) == tiers
    for tier, kinds in kept.items():
        cached = kernel == "quant_uvm_caching" and tier == "hbm" and not inference
        assert set(kinds) == ({"weight", "cache"} if cached else {"weight"})


def test_rows_of_quantised_tables_travel_as_they_are() -> None:
    table = msgspec.structs.replace(TABLES["quantised"], cache=CacheSpec(load_factor=0.5))
    found = torchrec_options(table, _cluster("cuda"))
    cases = [(table, option) for option in found]
    plain = price(PricingContext(_cluster("cuda"), Batch(256), EstimatorSection()), cases)
    coded = EstimatorSection(communication=("fp16", "bf16"))
    assert price(PricingContext(_cluster("cuda"), Batch(256), coded), cases) == plain


def test_nothing_is_priced_at_nothing() -> None:
    assert price(PricingContext(_cluster("cuda"), Batch(256)), []) == []
