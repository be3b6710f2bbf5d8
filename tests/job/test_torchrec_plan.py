"""A plan of TorchRec's becomes a job whose tables may lie as they do there, and no other way."""

from __future__ import annotations

import json
from typing import Any

import pytest

import shardwright as sw
from shardwright.core.errors import InputError, UnsupportedError
from shardwright.job.engines.torchrec import job_of
from shardwright.job.job import Job, parse_job

# As ``print(plan)`` of TorchRec writes it: two lists a module, cells between bars.
PRINTED = """\
module: sparse.ebc

param | sharding type | compute kernel |    ranks
----- | ------------- | -------------- | ------------
items | row_wise      | fused          | [0, 1, 2, 3]
users | column_wise   | fused          | [1, 3]
shops | table_wise    | fused          | [2]

param | shard offsets | shard sizes |   placement
----- | ------------- | ----------- | -------------
items | [0, 0]        | [25, 64]    | rank:0/cuda:0
items | [25, 0]       | [25, 64]    | rank:1/cuda:1
items | [50, 0]       | [25, 64]    | rank:2/cuda:0
items | [75, 0]       | [25, 64]    | rank:3/cuda:1
users | [0, 0]        | [500, 32]   | rank:1/cuda:1
users | [0, 32]       | [500, 32]   | rank:3/cuda:1
shops | [0, 0]        | [70, 16]    | rank:2/cuda:0"""


def shard(offsets: list[int], sizes: list[int], rank: int) -> dict[str, Any]:
    place = f"rank:{rank}/cuda:{rank % 2}"
    return {"shard_offsets": offsets, "shard_sizes": sizes, "placement": place}


def table(kind: str, ranks: list[int], *shards: dict[str, Any], kernel: str = "fused") -> Any:
    found = {"sharding_type": kind, "compute_kernel": kernel, "ranks": ranks}
    return found | ({"shards": list(shards)} if shards else {})


ITEMS = table("row_wise", [0, 1, 2, 3], *(shard([25 * k, 0], [25, 64], k) for k in range(4)))
USERS = table("column_wise", [1, 3], shard([0, 0], [500, 32], 1), shard([0, 32], [500, 32], 3))
SHOPS = table("table_wise", [2], shard([0, 0], [70, 16], 2))
MODULE = {"items": ITEMS, "users": USERS, "shops": SHOPS}
REPLICA = table("data_parallel", [0, 1, 2, 3], kernel="dense")


def serialized(**modules: Any) -> str:
    return json.dumps({"plan": modules})


def beside() -> Job:
    tables = [
        {"name": "days", "rows": 7, "dim": 16, "pooling_factors": [3.0], "optimizer": "sgd"},
        {"name": "shops", "rows": 70, "dim": 16},
    ]
    return parse_job({"tables": tables, "batch": {"size": 64}})


def test_what_is_printed_and_what_is_serialized_are_the_same_job() -> None:
    found = job_of(serialized(ebc=MODULE), None, None)
    assert found == job_of(PRINTED, None, None)
    assert found == job_of(json.dumps(MODULE), None, None)  # of a module alone
    assert found.document["cluster"] == {
        "compute_device": "cuda",
        "local_world_size": 2,
        "world_size": 4,
    }


@pytest.mark.slow_after(1)
def test_the_plan_of_the_job_places_tables_as_there() -> None:
    found = sw.plan(parse_job(job_of(PRINTED, None, None).document))
    placed = {
        each.name: sorted(
            (rank, shape.rows, shape.columns)
            for shard in each.shards
            for rank, shape in zip(shard.ranks, shard.run.shapes(), strict=True)
        )
        for each in found.tables
    }
    assert placed == {
        "items": [(rank, 25, 64) for rank in range(4)],
        "users": [(1, 500, 32), (3, 500, 32)],
        "shops": [(2, 70, 16)],
    }
    kinds = {each.name: each.sharding_type for each in found.tables}
    assert kinds == {"items": "row_wise", "users": "column_wise", "shops": "table_wise"}


def test_a_job_beside_says_what_a_plan_does_not() -> None:
    text = serialized(ebc={"days": REPLICA, "shops": SHOPS})
    found = parse_job(job_of(text, beside(), 4).document)
    days, shops = found.tables
    assert (days.rows, days.pooling_factors, days.sharding_types) == (7, (3.0,), ("data_parallel",))
    assert shops.compute_kernels == ("fused",)
    assert found.planner.constraints.ranks == {"shops": (2,)}
    assert (found.batch.size, found.cluster.world_size) == (64, 4)


def test_tables_of_one_name_are_called_by_their_modules() -> None:
    found = job_of(serialized(a={"shops": SHOPS}, b={"shops": SHOPS, "items": ITEMS}), None, None)
    names = [each["name"] for each in found.document["tables"]]
    assert names == ["a.shops", "b.shops", "items"]


def test_all_that_is_missing_or_wrong_is_named_at_once() -> None:
    wrong = {
        "a": {"sharding_type": "rowwise", "compute_kernel": "fast"},
        "b": table("table_wise", [2], {"shard_sizes": [1]}),
        "days": REPLICA,
    }
    with pytest.raises(UnsupportedError) as error:
        job_of(serialized(ebc=wrong), None, None)
    for said in (
        "a.sharding_type: expected data_parallel or table_wise",
        "a.compute_kernel: expected dense or fused",
        "b.shards: expected shard_offsets and shard_sizes of two numbers each",
        "days.shards: expected shards, which say rows and dim, got none. A plan has none of "
        "replicas: name a job that has the table with --job",
    ):
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ShardingPlan(plan={})", "the plan: expected print(plan), or json.dumps("),
        ('{"plan": {"m": {"shardingPlan": {}}}}', "tables with a sharding_type, got an object of"),
        ("{", "the plan: expected JSON"),
        ("", "the plan: expected a table, got none"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        job_of(text, None, None)
    assert said in str(error.value)


def test_a_plan_of_other_tables_or_ranks_than_the_job_s_is_refused() -> None:
    small = table("table_wise", [5], shard([0, 0], [60, 16], 5))
    text = serialized(ebc={"shops": small, "items": ITEMS})
    with pytest.raises(InputError) as error:
        job_of(text, beside(), 4)
    for said in (
        "shops.shards: expected 70 x 16 as in the job, got 60 x 16",
        "items: expected a table of the job, got none of that name",
        "-n: expected the 6 ranks of the plan, got 4",
    ):
        assert said in str(error.value)


def test_replicas_count_among_the_ranks_of_a_plan_and_are_named_for_none() -> None:
    found = job_of(serialized(ebc={"days": REPLICA}), beside(), None).document
    assert found["cluster"]["world_size"] == 4
    assert found["planner"] == {"options": "torchrec"}


def test_shards_that_are_not_all_there_are_refused() -> None:
    half = PRINTED.replace("items | [50, 0]       | [25, 64]    | rank:2/cuda:0\n", "")
    with pytest.raises(UnsupportedError) as error:
        job_of(half, None, None)
    said = "items.shards: expected the 6,400 numbers of 100 x 64 once each, got 4,800."
    assert said in str(error.value)


@pytest.mark.parametrize("sizes", [["25", 64], [25.0, 64], [25, 64, 1], None])
def test_sizes_that_are_no_two_numbers_are_refused(sizes: Any) -> None:
    wrong = table("table_wise", [0], {"shard_offsets": [0, 0], "shard_sizes": sizes})
    with pytest.raises(UnsupportedError, match="shard_offsets and shard_sizes of two numbers each"):
        job_of(serialized(ebc={"items": wrong}), None, None)
