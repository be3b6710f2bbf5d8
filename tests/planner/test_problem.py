from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from shardwright.core.errors import InputError
from shardwright.core.job import Job
from shardwright.core.placement import Flat, Replicate
from shardwright.core.specs import model_spec
from shardwright.planner.problem import Problem, make_problem

MakeJob = Callable[..., Job]


def _problem(job: Job) -> Problem:
    return make_problem(job, model_spec(job))


def _types(job: Job) -> list[str]:
    return [choice.option.sharding_type for choice in _problem(job).tables[0]]


def test_a_table_may_be_placed_in_four_ways(make_job: MakeJob) -> None:
    assert _types(make_job(50)) == ["data_parallel", "table_wise", "row_wise", "column_wise"]


def test_a_table_too_narrow_to_cut_has_no_columns_to_offer(make_job: MakeJob) -> None:
    assert "column_wise" not in _types(make_job(50, dim=4))


def test_rowwise_adagrad_has_no_columns_to_offer(make_job: MakeJob) -> None:
    assert "column_wise" not in _types(make_job(50, train={"optimizer": "adagrad"}))


def test_only_allowed_types_are_offered(make_job: MakeJob) -> None:
    job = make_job(50, table={"sharding_types": ["row_wise", "table_wise"]})
    assert _types(job) == ["table_wise", "row_wise"]


@pytest.mark.parametrize(
    ("kernel", "types"),
    [("dense", ["data_parallel"]), ("fused", ["table_wise", "row_wise", "column_wise"])],
)
def test_a_kernel_goes_with_its_types(make_job: MakeJob, kernel: str, types: list[str]) -> None:
    assert _types(make_job(50, table={"compute_kernels": [kernel]})) == types


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"table": {"sharding_types": ["grid_shard"]}},
            "tables 't0'.sharding_types: expected one of data_parallel, table_wise, row_wise, "
            "column_wise, got grid_shard.",
        ),
        (
            {
                "table": {"sharding_types": ["column_wise"]},
                "train": {"optimizer": "adagrad"},
            },
            "tables 't0'.sharding_types: expected one of data_parallel, table_wise, row_wise, "
            "column_wise (column_wise needs sgd: its row-wise Adagrad sums would span ranks), "
            "got column_wise.",
        ),
        (
            {"table": {"sharding_types": ["row_wise"], "compute_kernels": ["dense"]}},
            "tables 't0': expected a sharding type and kernel that this version runs, got types "
            "['row_wise'], kernels ['dense']. Allow table_wise or row_wise with kernel fused, or "
            "data_parallel with dense.",
        ),
        (
            {"planner": {"units": {"botom": "shard"}}},
            "planner.units: expected units bottom, top, got 'botom'.",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(
    make_job: MakeJob, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        _problem(make_job(50, **changes))
    assert str(caught.value) == message


def test_every_shard_has_its_bytes_and_seconds(make_job: MakeJob) -> None:
    for choice in _problem(make_job(5, cluster={"world_size": 4})).tables[0]:
        shards = len(choice.option.shards)
        assert len(choice.shard_bytes) == len(choice.shard_seconds) == shards
        assert choice.bytes == tuple(sum(kept.values()) for kept in choice.shard_bytes)
        assert choice.seconds == tuple(math.fsum(s.values()) for s in choice.shard_seconds)


def test_row_shards_hold_what_their_rows_hold(make_job: MakeJob) -> None:
    job = make_job(5, cluster={"world_size": 4}, train={"optimizer": "adagrad"})
    row_wise = _problem(job).tables[0][2]
    assert row_wise.bytes == tuple(rows * (16 * 4 + 4) for rows in (2, 2, 1, 0))


def test_a_replica_asks_nobody(make_job: MakeJob) -> None:
    choices = {c.option.sharding_type: c for c in _problem(make_job(50)).tables[0]}
    assert choices["data_parallel"].request_seconds == 0
    assert choices["row_wise"].request_seconds > choices["table_wise"].request_seconds > 0


def test_a_unit_may_be_sharded_or_replicated(make_job: MakeJob) -> None:
    for choices in _problem(make_job(50)).units:
        assert [choice.placement for choice in choices] == [Replicate(), Flat()]
        assert [choice.replicated for choice in choices] == [True, False]


def test_a_sharded_unit_gathers_in_both_directions(make_job: MakeJob) -> None:
    replicated, sharded = _problem(make_job(50)).units[1]
    for phase in ("forward", "backward"):
        assert sharded.seconds[phase] > replicated.seconds[phase]
    assert sharded.seconds["step"] < replicated.seconds["step"]
