from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.core.batch import Batch
from shardwright.core.block import check_tiling
from shardwright.core.cluster import Cluster, Device
from shardwright.core.errors import InputError
from shardwright.core.model import ComputeKernel, TableSpec
from shardwright.core.option import Option, place
from shardwright.core.sharding import ShardingType
from shardwright.planner.options import replica_kernel, runnable_options, wide_options
from shardwright.torchrec.profile import torchrec_options

TYPES: tuple[ShardingType, ...] = get_args(ShardingType)
KERNELS: tuple[ComputeKernel, ...] = get_args(ComputeKernel)
EVERYWHERE = ["data_parallel", "table_wise", "row_wise", "column_wise"]
# What a type is called that is not bound to one host.
WIDER = {"table_column_wise": "column_wise", "table_row_wise": "row_wise"}


def _cluster(ranks: int = 8, group: int = 8, device: Device = "cuda", ssd: int = 0) -> Cluster:
    return Cluster("x", ranks, min(group, ranks), device, 2**30, 2**34, ssd, min(group, ranks), {})


def _table(rows: int = 1000, dim: int = 64, **changes: Any) -> TableSpec:
    return TableSpec("t", rows, dim, **changes)


def _types(options: tuple[Option, ...]) -> list[str]:
    return list(dict.fromkeys(option.sharding_type for option in options))


def _kernels(options: tuple[Option, ...], sharding_type: str = "table_wise") -> list[str]:
    return [o.compute_kernel for o in options if o.sharding_type == sharding_type]


def _widths(options: tuple[Option, ...], sharding_type: str = "column_wise") -> list[int]:
    return [o.runs[0].columns for o in options if o.sharding_type == sharding_type]


def test_on_one_host_a_table_may_be_sharded_in_four_ways() -> None:
    assert _types(wide_options(_table(), _cluster(), slow=False)) == EVERYWHERE


def test_several_hosts_offer_the_types_of_a_host_as_well() -> None:
    options = wide_options(_table(), _cluster(16), slow=False)
    assert _types(options) == [*EVERYWHERE, "table_row_wise", "grid_shard"]


def test_columns_on_one_host_have_to_be_named() -> None:
    table = _table(sharding_types=("table_column_wise",))
    assert _types(wide_options(table, _cluster(16), slow=False)) == ["table_column_wise"]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("ranks", [1, 8, 16])
def test_a_type_that_is_named_is_the_only_one(kind: ShardingType, ranks: int) -> None:
    options = wide_options(_table(sharding_types=(kind,)), _cluster(ranks), slow=True)
    assert _types(options) == [kind]


def test_types_are_tried_in_the_order_in_which_they_are_named() -> None:
    table = _table(sharding_types=("row_wise", "data_parallel"))
    assert _types(wide_options(table, _cluster(), slow=False)) == ["row_wise", "data_parallel"]


def test_a_table_is_cut_down_to_four_shards_for_each_rank() -> None:
    for ranks, widths in ((1, [32, 16]), (2, [32, 16, 8]), (8, [32, 16, 8, 4])):
        assert _widths(wide_options(_table(), _cluster(ranks), slow=False)) == widths


def test_no_shard_is_narrower_than_asked() -> None:
    assert _widths(wide_options(_table(min_partition=16), _cluster(), slow=False)) == [32, 16]


def test_every_even_cut_is_tried_up_to_the_first_of_four_shards_for_each_rank() -> None:
    table = _table(dim=192, min_partition=12)
    assert _widths(wide_options(table, _cluster(), slow=False)) == [96, 64, 48, 32, 24, 16, 12]
    assert _widths(wide_options(table, _cluster(1), slow=False)) == [96, 64, 48, 12]
    table = _table(dim=808)  # 2, 101 and 202 shards
    assert _widths(wide_options(table, _cluster(2), slow=False)) == [404, 8]


@pytest.mark.parametrize("dim", [1, 4, 6])
def test_a_table_too_narrow_to_cut_has_no_columns_to_offer(dim: int) -> None:
    options = wide_options(_table(dim=dim), _cluster(16), slow=False)
    assert not {"column_wise", "grid_shard"} & set(_types(options))


@pytest.mark.parametrize(("dim", "widths"), [(6, [6]), (64, [64, 32, 16, 8, 4])])
def test_only_as_in_torchrec_may_columns_that_are_asked_for_be_one_shard(
    dim: int, widths: list[int]
) -> None:
    table = _table(dim=dim, sharding_types=("column_wise",))
    assert _widths(wide_options(table, _cluster(), slow=False, uncut=True)) == widths
    if dim == 64:
        assert _widths(wide_options(table, _cluster(), slow=False)) == widths[1:]


def test_a_grid_has_as_many_columns_of_shards_as_hosts_or_two() -> None:
    for hosts, widths in ((2, [32]), (3, [32, 16]), (4, [32, 16]), (16, [32, 16, 8, 4])):
        options = wide_options(_table(), _cluster(8 * hosts), slow=False)
        assert _widths(options, "grid_shard") == widths


def test_a_grid_of_few_rows_has_as_many_columns_of_shards_as_fill_all_ranks() -> None:
    options = wide_options(_table(rows=3), _cluster(16), slow=False)  # three ranks of each host
    assert _widths(options, "grid_shard") == [32, 16, 8]


def test_kernels_of_host_memory_are_looked_at_only_on_request() -> None:
    assert _kernels(wide_options(_table(), _cluster(), slow=False)) == ["fused"]
    slow = wide_options(_table(), _cluster(), slow=True)
    assert _kernels(slow) == ["fused", "fused_uvm", "fused_uvm_caching"]


def test_a_kernel_that_is_named_needs_no_request() -> None:
    table = _table(compute_kernels=("fused_uvm_caching",))
    assert _kernels(wide_options(table, _cluster(), slow=False)) == ["fused_uvm_caching"]


def test_a_key_value_store_has_to_be_named_and_needs_an_ssd() -> None:
    table = _table(compute_kernels=("fused", "key_value"))
    assert _kernels(wide_options(table, _cluster(), slow=True)) == ["fused"]
    assert _kernels(wide_options(table, _cluster(ssd=1), slow=True)) == ["fused", "key_value"]
    assert "key_value" not in _kernels(wide_options(_table(), _cluster(ssd=1), slow=True))


@pytest.mark.parametrize(
    ("way", "named", "kinds"),
    [
        ("dense", None, ["dense"]),
        ("fused", None, ["fused"]),
        ("fused", ("fused", "dense"), ["fused"]),
        ("fused", ("dense",), ["dense"]),
        ("dense", ("fused", "dense"), ["dense"]),
        ("dense", ("fused",), []),
    ],
)
def test_replicas_learn_in_one_way_which_a_job_may_name(
    way: ComputeKernel, named: tuple[ComputeKernel, ...] | None, kinds: list[str]
) -> None:
    table = _table(compute_kernels=named, sharding_types=("data_parallel", "table_wise"))
    found = [
        *wide_options(table, _cluster(16), way, slow=True),
        *runnable_options(table, _cluster(device="cpu"), way),
    ]
    assert [o.compute_kernel for o in found if o.traits.replicated] == kinds * 2
    assert "dense" not in {o.compute_kernel for o in found if not o.traits.replicated}


@pytest.mark.parametrize(("batch", "way"), [(10, "fused"), (100_000, "dense")])
def test_replicas_exchange_rows_where_a_batch_has_few(batch: int, way: str) -> None:
    table = _table(rows=100_000)
    assert replica_kernel(table, _cluster(16), Batch(batch)) == way
    assert replica_kernel(_table(rows=100), _cluster(16), Batch(batch)) == "dense"


def test_a_cpu_has_one_kernel() -> None:
    options = wide_options(_table(), _cluster(device="cpu", ssd=1), slow=True)
    assert {o.compute_kernel for o in options} == {"dense", "fused"}


@pytest.mark.parametrize(
    ("changes", "device", "found"),
    [
        (
            {"sharding_types": ("row_wise",), "compute_kernels": ("dense",)},
            "cuda",
            "types ['row_wise'], kernels ['dense']",
        ),
        (
            {"sharding_types": ("data_parallel",), "compute_kernels": ("fused",)},
            "cuda",
            "types ['data_parallel'], kernels ['fused']",
        ),
        (
            {"sharding_types": ("table_wise",), "compute_kernels": ("fused_uvm",)},
            "cpu",
            "types ['table_wise'], kernels ['fused_uvm']",
        ),
        (
            {"sharding_types": ("table_wise",), "compute_kernels": ("key_value",)},
            "cuda",
            "types ['table_wise'], kernels ['key_value']",
        ),
        ({"sharding_types": ()}, "cuda", "types [], kernels ['any']"),
    ],
)
def test_limits_that_leave_nothing_are_refused(
    changes: dict[str, Any], device: Device, found: str
) -> None:
    with pytest.raises(InputError) as caught:
        wide_options(_table(**changes), _cluster(device=device), slow=True)
    assert str(caught.value) == (
        "tables 't': expected a sharding type and a compute kernel that go together on "
        f"{device}, got {found}. Widen sharding_types or compute_kernels, or lower min_partition."
    )


TABLES = st.builds(
    _table,
    rows=st.integers(1, 60),
    dim=st.sampled_from([1, 4, 6, 8, 16, 24, 100, 128, 160, 192, 256, 384]),
    pooled=st.booleans(),
    sharding_types=st.none() | st.sets(st.sampled_from(TYPES), min_size=1).map(tuple),
    compute_kernels=st.none() | st.sets(st.sampled_from(KERNELS[:5]), min_size=1).map(tuple),
    min_partition=st.none() | st.integers(0, 400),
)
CLUSTERS = st.builds(
    lambda hosts, group, device, ssd: _cluster(hosts * group, group, device, ssd),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from([0, 2**40]),
)


def _wide(table: TableSpec, cluster: Cluster) -> tuple[Option, ...]:
    try:
        return wide_options(table, cluster, slow=True, uncut=True)
    except InputError:
        assume(False)
        raise


@given(table=TABLES, cluster=CLUSTERS)
def test_the_shards_of_every_option_tile_their_table(table: TableSpec, cluster: Cluster) -> None:
    for option in _wide(table, cluster):
        ranks = range(option.count)
        if option.sharding_type == "data_parallel":
            assert option.count == cluster.world_size
        check_tiling(place(option, ranks, table), [table.tensor], option.count)


@given(table=TABLES, cluster=CLUSTERS)
def test_no_option_is_listed_twice(table: TableSpec, cluster: Cluster) -> None:
    options = [(o.sharding_type, o.compute_kernel, o.runs) for o in _wide(table, cluster)]
    assert len(set(options)) == len(options)


@given(table=TABLES, cluster=CLUSTERS)
def test_all_that_torchrec_looks_at_is_looked_at(table: TableSpec, cluster: Cluster) -> None:
    try:
        narrow = torchrec_options(table, cluster)
    except InputError:
        assume(False)
        raise
    options = wide_options(table, cluster, slow=True, uncut=True)
    wide = {(o.sharding_type, o.compute_kernel, o.shards) for o in options}
    for option in narrow:
        kinds = {option.sharding_type, WIDER.get(option.sharding_type, "")}
        if option.count == 1:  # columns that are not cut are a whole table
            kinds.add("table_wise")
        assert {(kind, option.compute_kernel, option.shards) for kind in kinds} & wide


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_what_runs_is_what_the_runtime_can_carry_out(optimizer: Any) -> None:
    types = [
        o.sharding_type
        for o in runnable_options(_table(optimizer=optimizer), _cluster(4, 4, "cpu"))
    ]
    columns = [] if optimizer == "rowwise_adagrad" else ["column_wise"]
    assert types == ["data_parallel", "table_wise", "row_wise", *columns]


def test_what_runs_is_cut_in_halves_where_no_width_is_named() -> None:
    assert _widths(runnable_options(_table(dim=64), _cluster(4, 4, "cpu"))) == [32]
    assert _widths(runnable_options(_table(dim=64, min_partition=8), _cluster(4, 4, "cpu"))) == [
        32,
        16,
        8,
    ]


def test_columns_that_cannot_be_cut_are_refused_where_nothing_else_is_allowed() -> None:
    with pytest.raises(InputError) as caught:
        runnable_options(_table(dim=6, sharding_types=("column_wise",)), _cluster(4, 4, "cpu"))
    assert "No cut of 6 columns is a multiple of 4 and at least min_partition." in str(caught.value)
