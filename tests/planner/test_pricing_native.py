from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core import optimizers
from shardwright.core.amount import Step, bare, derivation
from shardwright.core.batch import Batch, lookups, outputs
from shardwright.core.cluster import TIERS
from shardwright.core.model import (
    CacheSpec,
    ComputeKernel,
    TableSpec,
)
from shardwright.core.option import Option, shard_runs
from shardwright.core.sharding import ShardingType
from shardwright.cost.constants import cluster
from shardwright.job.cluster import ClusterSection
from shardwright.job.planner import EstimatorSection, PipelineType
from shardwright.planner.choice import Choice
from shardwright.planner.pricing import native
from shardwright.planner.pricing.evaluate import PricingContext, traffic

TYPES: tuple[ShardingType, ...] = get_args(ShardingType)
KERNELS: tuple[ComputeKernel, ...] = get_args(ComputeKernel)
TABLE = TableSpec("t", 1000, 64, optimizer="rowwise_adagrad")


def _setting(
    preset: str = "h100-8", world_size: int = 16, batch: int = 32, **estimator: Any
) -> PricingContext:
    found, _ = cluster(ClusterSection(preset=preset, world_size=world_size), "cluster")
    return PricingContext(found, Batch(batch), EstimatorSection(**estimator))


def _option(
    setting: PricingContext,
    table: TableSpec,
    sharding_type: ShardingType,
    kernel: ComputeKernel = "fused",
    parts: int = 2,
) -> Option:
    kernel = "dense" if sharding_type == "data_parallel" else kernel
    width = table.dim // parts if sharding_type in COLUMN_TYPES else table.dim
    machine = setting.cluster
    runs = shard_runs(table, sharding_type, machine.world_size, machine.group, width)
    return Option(table.name, sharding_type, kernel, runs)


COLUMN_TYPES = ("column_wise", "table_column_wise", "grid_shard")

TABLES = st.integers(1, 4).flatmap(
    lambda features: st.builds(
        TableSpec,
        name=st.just("t"),
        rows=st.one_of(st.integers(1, 40), st.integers(1, 2**31)),
        dim=st.sampled_from([4, 16, 128]),
        dtype=st.sampled_from(["fp32", "fp16", "int8"]),
        optimizer=st.sampled_from((None, *optimizers.TABLES)),
        pooled=st.booleans(),
        pooling_factors=st.tuples(*[st.floats(0, 40, width=16)] * features),
        num_poolings=st.one_of(st.none(), st.tuples(*[st.floats(0, 3, width=16)] * features)),
        batch_sizes=st.one_of(st.none(), st.tuples(*[st.integers(1, 4096)] * features)),
        output_dtype=st.sampled_from([None, "fp16"]),
        cache=st.one_of(
            st.none(),
            st.builds(
                CacheSpec,
                load_factor=st.one_of(st.none(), st.floats(0, 1)),
                prefetch_pipeline=st.sampled_from([None, False, True]),
                stats=st.one_of(
                    st.none(), st.tuples(st.floats(0, 1e6), st.floats(0, 1), st.floats(0, 1))
                ),
            ),
        ),
        kv_l1_mb=st.one_of(st.none(), st.integers(0, 512)),
    )
)
SETTINGS = st.builds(
    _setting,
    preset=st.sampled_from(["h100-8", "local", "cpu-host"]),
    world_size=st.sampled_from([1, 2, 5, 8, 16, 64]),
    batch=st.integers(1, 4096),
    pipeline_type=st.sampled_from(get_args(PipelineType)),
    is_inference=st.booleans(),
    communication=st.sampled_from([None, ("fp16", "bf16"), ("int8", "fp16")]),
    cache_load_factor=st.sampled_from([None, 0.1]),
    prefetch_pipeline=st.sampled_from([None, False, True]),
)


@pytest.mark.slow
@given(
    setting=SETTINGS,
    table=TABLES,
    sharding_type=st.sampled_from(TYPES),
    kernel=st.sampled_from(KERNELS),
    exchange=st.booleans(),
)
def test_a_derivation_leads_to_the_price(
    reevaluate: Callable[[Sequence[Step]], None],
    setting: PricingContext,
    table: TableSpec,
    sharding_type: ShardingType,
    kernel: ComputeKernel,
    exchange: bool,
) -> None:
    option = _option(setting, table, sharding_type, kernel)
    (choice,) = native.price(setting, [(table, option)], exchange=exchange)
    for index, found in enumerate(choice.costs):
        derived = native.derive(setting, table, option, index, exchange=exchange)
        assert derived.seconds.value == pytest.approx(found.total_seconds, rel=1e-12, abs=0)
        assert tuple(derived.storage[tier].value for tier in TIERS) == found.storage
        for amount in (derived.seconds, *derived.storage.values()):
            reevaluate(derivation(amount))


@pytest.mark.slow
@given(setting=SETTINGS, table=TABLES)
def test_traffic_is_that_of_the_batch(setting: PricingContext, table: TableSpec) -> None:
    asked = lookups(table, setting.batch), outputs(table, setting.batch)
    assert traffic(setting, table, bare) == asked


@pytest.mark.slow
@given(tables=st.lists(TABLES, min_size=1, max_size=6), setting=SETTINGS)
def test_prices_do_not_depend_on_what_is_priced_beside(
    tables: list[TableSpec], setting: PricingContext
) -> None:
    cases = [
        (table, _option(setting, table, sharding_type))
        for table in tables
        for sharding_type in TYPES
    ]
    together = native.price(setting, cases, exchange=True)
    alone = [native.price(setting, [case], exchange=True)[0] for case in cases]
    assert together == alone
    assert [(choice.table, choice.option) for choice in together] == cases


def test_nothing_is_priced_at_nothing() -> None:
    assert native.price(_setting(), [], exchange=False) == []


def test_runs_of_one_shape_share_a_cost() -> None:
    setting = _setting()
    option = _option(setting, TABLE, "grid_shard")
    (choice,) = native.price(setting, [(TABLE, option)], exchange=False)
    shapes = [(run.rows, run.columns) for run in option.runs]
    assert len({id(found) for found in choice.costs}) == len(set(shapes)) < len(shapes)


def test_bytes_are_exact_integers() -> None:
    table = TableSpec("t", 2**40 + 1, 128, optimizer="adam")
    setting = _setting()
    option = _option(setting, table, "table_wise")
    (choice,) = native.price(setting, [(table, option)], exchange=True)
    held = choice.costs[0].hbm
    assert held["weight"] == (2**40 + 1) * 512
    assert held["optimizer_state"] == (2**40 + 1) * 1024
    assert all(type(nbytes) is int for nbytes in held.values())


def _cost(
    setting: PricingContext, option: Option, table: TableSpec = TABLE, exchange: bool = False
) -> Any:
    return native.price(setting, [(table, option)], exchange=exchange)[0].costs[0]


@pytest.mark.parametrize(
    ("kernel", "hbm", "ddr", "ssd"),
    [
        ("fused", {"weight", "optimizer_state"}, set(), set()),
        ("fused_uvm", set(), {"weight", "optimizer_state"}, set()),
        ("fused_uvm_caching", {"cache"}, {"weight", "optimizer_state"}, set()),
        ("key_value", {"cache"}, set(), {"weight", "optimizer_state"}),
        ("quant", {"weight"}, set(), set()),
        ("quant_uvm", set(), {"weight"}, set()),
        ("quant_uvm_caching", {"cache"}, {"weight"}, set()),
    ],
)
def test_every_kernel_fills_its_own_memories(
    kernel: ComputeKernel, hbm: set[str], ddr: set[str], ssd: set[str]
) -> None:
    setting = _setting()
    found = _cost(setting, _option(setting, TABLE, "table_wise", kernel))
    assert (set(found.hbm), set(found.ddr), set(found.ssd)) == (hbm, ddr, ssd)


def test_a_cpu_keeps_everything_in_host_memory() -> None:
    setting = _setting("local", 2)
    found = _cost(setting, _option(setting, TABLE, "data_parallel"), exchange=True)
    assert set(found.ddr) == {"weight", "gradient", "optimizer_state", "input", "output"}
    assert not found.hbm
    assert not found.ssd


def test_a_cache_holds_the_share_that_is_asked_for() -> None:
    table = msgspec.structs.replace(TABLE, cache=CacheSpec(load_factor=0.5))
    setting = _setting(cache_load_factor=0.1)
    option = _option(setting, table, "table_wise", "fused_uvm_caching")
    per_row = 64 * 4 + 16
    assert _cost(setting, option, table).hbm == {"cache": 500 * per_row + 4000}
    assert _cost(setting, option, TABLE).hbm == {"cache": 100 * per_row + 4000}
    assert _cost(_setting(), option, TABLE).hbm == {"cache": 200 * per_row + 4000}


def test_a_key_value_cache_has_states_beside_rows_and_a_largest_size() -> None:
    table = msgspec.structs.replace(TABLE, rows=10**6, kv_l1_mb=1)
    setting = _setting()
    found = _cost(setting, _option(setting, table, "table_wise", "key_value"), table)
    row = 256 + 4  # row-wise Adagrad's number
    assert found.hbm == {"cache": 2**20 // row * (row + 16) + 4 * 10**6}


def test_buffers_of_the_exchange_are_priced_when_asked_for() -> None:
    setting = _setting(pipeline_type="train_sparse_dist")
    option = _option(setting, TABLE, "table_wise")
    kept, with_buffers = (_cost(setting, option, exchange=asked).hbm for asked in (False, True))
    served = 32 * 16
    assert with_buffers == kept | {"input": 2 * served * 8, "output": served * 256}


@pytest.mark.parametrize(
    ("pipeline", "batches"),
    [
        ("none", 1),
        ("train_base", 1),
        ("train_sparse_dist", 2),
        ("train_prefetch_sparse_dist", 3),
    ],
)
def test_a_pipeline_holds_several_inputs(pipeline: PipelineType, batches: int) -> None:
    setting = _setting(pipeline_type=pipeline)
    found = _cost(setting, _option(setting, TABLE, "row_wise"), exchange=True)
    assert (found.hbm["input"], found.hbm["output"]) == (32 * 8 * batches, 32 * 256)


def test_a_prefetching_pipeline_loads_ahead() -> None:
    option = _option(_setting(), TABLE, "table_wise", "fused_uvm_caching")
    ahead = _setting(pipeline_type="train_prefetch_sparse_dist")
    assert "load" in _cost(ahead, option).seconds
    assert "load" not in _cost(_setting(), option).seconds
    never = msgspec.structs.replace(TABLE, cache=CacheSpec(prefetch_pipeline=False))
    assert "load" not in _cost(ahead, option, never).seconds


def test_rows_travel_in_the_dtype_of_the_communication() -> None:
    option = _option(_setting(), TABLE, "table_wise")
    plain = _cost(_setting(), option).seconds
    small = _cost(_setting(communication=("fp16", "fp8")), option).seconds
    assert small["exchange_rows"] == pytest.approx(plain["exchange_rows"] / 2)
    assert small["reduce"] == pytest.approx(plain["reduce"] / 4)
    assert small["exchange_ids"] == plain["exchange_ids"]


def test_inference_reads_and_keeps_weights_alone() -> None:
    setting = _setting(is_inference=True)
    found = _cost(setting, _option(setting, TABLE, "table_wise"))
    assert set(found.hbm) == {"weight"}
    assert set(found.seconds) == {"exchange_ids", "lookup", "exchange_rows"}


def test_bags_are_summed_before_they_travel() -> None:
    setting = _setting()
    pooled = msgspec.structs.replace(TABLE, pooling_factors=(20.0,))
    sequence = msgspec.structs.replace(pooled, pooled=False)
    option = _option(setting, TABLE, "table_wise")
    one, few, many = (
        _cost(setting, option, table).seconds["exchange_rows"]
        for table in (TABLE, pooled, sequence)
    )
    assert one == few
    assert many == pytest.approx(20 * few)


def test_a_bag_travels_as_often_as_it_holds_an_id() -> None:
    """Of 0.25 ids on average: for a quarter of the samples, whatever other bags hold."""
    setting = _setting()
    option = _option(setting, TABLE, "table_wise")
    rare, one, many = (
        _cost(setting, option, msgspec.structs.replace(TABLE, pooling_factors=factors))
        for factors in ((0.25, 20.0), (1.0, 20.0), (20.0, 20.0))
    )
    assert one.seconds["exchange_rows"] == many.seconds["exchange_rows"]
    assert rare.seconds["exchange_rows"] == pytest.approx(one.seconds["exchange_rows"] * 1.25 / 2)


def test_every_rank_addresses_the_ids_of_a_routed_table() -> None:
    setting = _setting("local", 2)
    cases = [
        (TABLE, _option(setting, TABLE, sharding_type))
        for sharding_type in ("data_parallel", "table_wise", "row_wise")
    ]
    found = [choice.everywhere for choice in native.price(setting, cases, exchange=False)]
    assert found == [0.0, pytest.approx(32 * 10e-9), pytest.approx(32 * 50e-9)]


def _once(
    table: TableSpec, sharding_type: ShardingType, dedup: bool | None = None, batch: int = 2048
) -> Choice:
    found, _ = cluster(ClusterSection(preset="local", world_size=2), "cluster")
    setting = PricingContext(found, Batch(batch), EstimatorSection(), dedup)
    (choice,) = native.price(
        setting, [(table, _option(setting, table, sharding_type))], exchange=True
    )
    return choice


@pytest.mark.parametrize(
    ("rows", "zipf", "sharding_type", "pays"),
    [
        (10, 0.0, "table_wise", True),
        (10, 0.0, "data_parallel", False),
        (10_000_000, 0.0, "row_wise", False),
        (10_000_000, 1.5, "row_wise", True),
        (100_000, 1.05, "row_wise", True),  # the sort by owner falls away
        (100_000, 1.05, "table_wise", False),
    ],
)
def test_rows_travel_once_where_enough_ids_repeat(
    rows: int, zipf: float, sharding_type: ShardingType, pays: bool
) -> None:
    table = TableSpec("t", rows, 16, optimizer="sgd", zipf=zipf)
    assert _once(table, sharding_type).dedup is pays


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("rows", [10, 30_000, 10_000_000])
def test_rows_travel_once_only_where_that_costs_less(
    rows: int, sharding_type: ShardingType
) -> None:
    table = TableSpec("t", rows, 64, optimizer="sgd", zipf=1.05)
    free, never, always = (_once(table, sharding_type, way) for way in (None, False, True))

    def seconds(choice: Choice) -> float:
        return 2 * choice.everywhere + sum(each.total_seconds for each in choice.shard_costs)

    assert (never.dedup, always.dedup) == (False, True)
    if sharding_type != "column_wise":  # of which each block is sorted
        assert seconds(free) == min(seconds(never), seconds(always))
    assert free.dedup or seconds(free) == seconds(never)


@pytest.mark.parametrize(
    "bags", [{"pooling_factors": (3.0,)}, {"constraint_weighted": True}, {"pooled": False}]
)
def test_sums_and_weighted_rows_do_not_travel_once(bags: dict[str, Any]) -> None:
    table = TableSpec("t", 10, 16, optimizer="sgd", **bags)
    assert _once(table, "row_wise", True).dedup is ("pooled" in bags)


def test_what_travels_once_is_what_is_expected_of_the_ids() -> None:
    table = TableSpec("t", 10, 16, optimizer="sgd")
    (shard,) = _once(table, "table_wise").costs
    assert (shard.ddr["input"], shard.ddr["output"]) == (2 * 10 * 8, 2 * 10 * 64)


def test_a_wider_mesh_costs_the_network() -> None:
    near, far = _setting(world_size=8), _setting(world_size=16)
    option = _option(near, TABLE, "table_wise")
    assert (
        _cost(far, option).seconds["exchange_rows"]
        > 2 * _cost(near, option).seconds["exchange_rows"]
    )


@pytest.mark.parametrize("sharding_type", TYPES)
def test_sums_over_columns_are_priced_where_an_optimizer_has_one_number_a_row(
    sharding_type: ShardingType,
) -> None:
    setting = _setting("local", world_size=4)
    table = msgspec.structs.replace(TABLE, sharding_types=(sharding_type,))
    option = _option(setting, table, sharding_type)
    (found,) = native.price(setting, [(table, option)], exchange=False)
    derived = native.derive(setting, table, option, 0, exchange=False)
    assert derived.seconds.value == pytest.approx(found.costs[0].total_seconds, rel=1e-12)
    names = {step.name for step in derivation(derived.seconds)}
    assert ("exchange_sums_seconds" in names) == (sharding_type in COLUMN_TYPES)
