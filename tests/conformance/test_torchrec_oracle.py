from __future__ import annotations

from typing import Any

import oracle
import plan_cases
import pytest

from shardwright.core.errors import InputError
from shardwright.core.model import TableSpec
from shardwright.core.option import Option
from shardwright.planner.choice import Choice
from shardwright.planner.statistics.tables import over_shards
from shardwright.torchrec.pricing import price
from shardwright.torchrec.profile import torchrec_options
from shardwright.torchrec.times import PARTS

RELATIVE = 1e-9
MS = 1000
SHARD_FIELDS = {
    *("id", "table", "topology", "batch_size", "estimator", "qcomm", "fused_params", "expected"),
}
OPTION_FIELDS = {
    *("sharding_type", "kernel", "partition_by", "n_shards", "is_weighted", "sizes", "offsets"),
    *("storage", "perf", "shard_perf_total", "total_perf", "total_storage"),
}
ALL_OFFSETS = 16  # up to so many shards all offsets are given, beyond it three of them


def readable(case: oracle.Record) -> str:
    """A case by its table and machine."""
    table, topology = case["table"], case["topology"]
    kind = "bags" if table.get("pooled", True) else "sequence"
    shape = f"{table['rows']}x{table['dim']}"
    machine = f"{topology.get('compute_device', 'cuda')}{topology['world_size']}"
    return f"{case['id']}-{kind}-{shape}-{table.get('dtype', 'fp32')}-{machine}"


def offsets(option: Option) -> list[list[int]]:
    """First row and column of every shard, or of the first two and the last."""
    found = [[shard.row, shard.column] for shard in option.shards]
    return found if len(found) <= ALL_OFFSETS else [*found[:2], found[-1]]


def close(value: float) -> Any:
    return pytest.approx(value, rel=RELATIVE, abs=0)


def compare_shards(choice: Choice, wanted: oracle.Record) -> None:
    """Names, sizes and places of the shards, bytes exactly, milliseconds closely."""
    option = choice.option
    assert option.partition == wanted["partition_by"]
    assert option.count == wanted["n_shards"]
    assert [[s.rows, s.columns] for s in option.shards] == list(oracle.repeated(wanted["sizes"]))
    assert offsets(option) == wanted["offsets"]
    storage = [list(cost.storage) for cost in choice.shard_costs]
    assert all(type(nbytes) is int for row in storage for nbytes in row)
    assert storage == list(oracle.repeated(wanted["storage"]))
    assert list(choice.total_storage) == wanted["total_storage"]
    spent = zip(choice.shard_costs, oracle.repeated(wanted["perf"]), strict=True)
    for cost, (*parts, input_dist) in spent:
        assert [cost.seconds[part] * MS for part in PARTS] == close(parts)
        assert cost.hidden["input_dist"] * MS == close(input_dist)
    totals = zip(choice.shard_costs, oracle.repeated(wanted["shard_perf_total"]), strict=True)
    for cost, (total,) in totals:
        assert cost.total_seconds * MS == close(total)
    assert over_shards(choice, "seconds") * MS == close(wanted["total_perf"])


@pytest.mark.parametrize("case", oracle.cases("shards"), ids=readable)
def test_options_and_their_shards_are_priced_as_by_torchrec(case: oracle.Record) -> None:
    oracle.check_fields(case, SHARD_FIELDS, case["id"])
    oracle.check_fields(case["expected"], {"options"}, "expected")
    table, setting = oracle.table(case["table"]), oracle.setting(case)
    choices = price(setting, [(table, o) for o in torchrec_options(table, setting.cluster)])
    names = [(c.option.sharding_type, c.option.compute_kernel) for c in choices]
    expected = case["expected"]["options"]
    assert names == [(wanted["sharding_type"], wanted["kernel"]) for wanted in expected]
    weighted = table.module_weighted if table.pooled else table.constraint_weighted
    for choice, wanted in zip(choices, expected, strict=True):
        assert set(wanted) == OPTION_FIELDS
        assert wanted["is_weighted"] == weighted
        compare_shards(choice, wanted)


@pytest.mark.parametrize("limits", [{}, {"sharding_types": (), "compute_kernels": ()}])
def test_some_types_and_kernels_are_tried_only_where_they_are_named(limits: Any) -> None:
    options = torchrec_options(TableSpec("t", 100, 64, **limits), oracle.cluster({"world_size": 2}))
    assert "grid_shard" not in {option.sharding_type for option in options}
    assert "key_value" not in {option.compute_kernel for option in options}


def test_a_key_value_table_needs_a_disk() -> None:
    table = TableSpec("t", 100, 64, compute_kernels=("fused", "key_value"))
    without = oracle.cluster({"world_size": 2, "ssd_cap": 0})
    kernels = {option.compute_kernel for option in torchrec_options(table, without)}
    assert kernels == {"fused"}


def test_a_table_whose_limits_leave_nothing_is_named() -> None:
    table = TableSpec("t7", 100, 64, sharding_types=("row_wise",), compute_kernels=("dense",))
    wanted = r"^tables 't7': expected a sharding type .* on cuda, got row_wise, dense\. Widen"
    with pytest.raises(InputError, match=wanted):
        torchrec_options(table, oracle.cluster({"world_size": 2}))


QUANTIZED = ("quant", "quant_uvm", "quant_uvm_caching")


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(("device", "kernels"), [("cuda", QUANTIZED), ("cpu", ("quant",))])
def test_quantised_tables_have_kernels_and_types_of_their_own(
    pooled: bool, device: str, kernels: tuple[str, ...]
) -> None:
    table = TableSpec("t", 100, 64, dtype="int8", pooled=pooled, compute_kernels=QUANTIZED)
    options = torchrec_options(table, oracle.cluster({"world_size": 2, "compute_device": device}))
    types = ("table_wise", "row_wise", "column_wise")
    found = [(option.sharding_type, option.compute_kernel) for option in options]
    assert found == [(kind, kernel) for kind in types for kernel in kernels]


@pytest.mark.parametrize("training", ["dense", "fused", "key_value"])
def test_a_table_is_for_training_or_quantised(training: Any) -> None:
    table = TableSpec("t7", 100, 64, compute_kernels=(training, "quant"))
    wanted = rf"^tables 't7'\.compute_kernels: expected kernels of .*, got {training}, quant\. A "
    with pytest.raises(InputError, match=wanted):
        torchrec_options(table, oracle.cluster({"world_size": 2}))


@pytest.mark.parametrize(
    ("kind", "kernel", "device"),
    [
        ("data_parallel", "quant", "cuda"),
        ("table_column_wise", "quant_uvm", "cuda"),
        ("table_row_wise", "quant_uvm_caching", "cuda"),
        ("grid_shard", "quant", "cuda"),
        ("table_wise", "quant_uvm", "cpu"),
        ("row_wise", "quant_uvm_caching", "cpu"),
    ],
)
def test_what_torchrec_does_not_offer_for_quantised_tables_is_named(
    kind: Any, kernel: Any, device: str
) -> None:
    table = TableSpec("t7", 100, 64, sharding_types=(kind,), compute_kernels=(kernel,))
    wanted = rf"^tables 't7': expected .* on {device}, got {kind}, {kernel}\. A quantised table "
    with pytest.raises(InputError, match=wanted):
        torchrec_options(table, oracle.cluster({"world_size": 2, "compute_device": device}))


def told_apart(case: oracle.Record) -> str:
    """A plan by its problem, proposers and partitioner."""
    proposers = "-".join(name for name, *_ in case.get("proposers") or [["default"]])
    partitioner = case.get("partitioner") or ["greedy"]
    return f"{case['id']}-{case['problem'].get('kind', '')}-{proposers}-{partitioner[0]}"


@pytest.mark.parametrize("case", oracle.cases("plans"), ids=told_apart)
def test_plans_are_those_of_torchrec(case: oracle.Record) -> None:
    plan_cases.compare_plan(case)


@pytest.mark.parametrize("case", oracle.cases("imbalance"), ids=lambda case: case["id"])
def test_imbalance_is_measured_as_by_torchrec(case: oracle.Record) -> None:
    plan_cases.compare_imbalance(case)
