"""Plans whose units are shared within replicas (HSDP) or over them too (HFSDP): they train as one
process does, take the bytes that were predicted and make the calls that were counted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec
import pytest
from combinations import rare, slow
from msgspec import UNSET
from own_tasks import own_job, planned
from pool import Pool
from reference import small_job
from tasks import collectives_of_a_step
from test_measured_as_predicted import MODES, ROUTED, TYPES, check_run
from test_own_models_measured import check_as_planned, check_bytes_alone, check_planned_bytes

from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job
from shardwright.job.memory import PLANNED
from shardwright.job.parallel import ParallelSection
from shardwright.job.plan import Plan

WAYS: dict[str, Any] = {"hsdp": 3, "hsdp 2": 2, "hsdp 1": 1, "hfsdp": (2, 3)}


def on_grid(job: Job, way: str, replicas: int = 2) -> Job:
    """The same with as many replicas, whose shards are cut as ``way`` says."""
    section = ParallelSection(data_replicate=replicas)
    planner = msgspec.structs.replace(job.planner, units={})
    if WAYS[way] == 3 or way == "hfsdp":
        planner = job.planner
    memory = msgspec.structs.replace(PLANNED, zero=WAYS[way])
    return msgspec.structs.replace(job, parallel=section, memory=memory, planner=planner)


def adapted(way: str, world_size: int, **more: Any) -> Job:
    return parse_job(
        {
            "model": {"python": "own_models:adapted"},
            "data": {"python": "own_models:batches_of_adapted"},
            "train": {"steps": 3, "optimizer": "adam", "learning_rate": 0.01},
            "cluster": {"preset": "local", "world_size": world_size},
            "parallel": {"data_replicate": 2},
            "memory": {"zero": WAYS[way], "param_dtype": "fp32", "reduce_dtype": "fp32", **more},
            "planner": {"units": {"root": "shard", "1": "shard"}, "dense": {"layers_per_unit": 2}},
        }
    )


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(slow(*case) for case in (("GPT2", "hfsdp"), ("T5", "hsdp 2"))),
        *(rare("GPT2", way) for way in ("hsdp", "hsdp 2", "hsdp 1")),
        *(rare("T5", way) for way in ("hsdp", "hsdp 1", "hfsdp")),
    ],
)
def test_a_module_trains_and_takes_memory_as_planned(pool: Pool, name: str, way: str) -> None:
    cluster = {"preset": "local", "world_size": 4}
    free = plan(own_job(name, "sgd", cluster=cluster))
    units = {unit.name: "shard" for unit in free.units if "-" not in unit.name}
    document = {"units": units} if way in ("hsdp", "hfsdp") else {}
    job = on_grid(own_job(name, "sgd", cluster=cluster, planner=document), way)
    made = plan(job)
    assert made.grid.replicas == 2
    results = pool.run(4, planned, job=job, made=made)
    check_planned_bytes(made, results)
    nearly = 2e-6  # of fp32, in which the job computes; the module is one of fp64
    assert max(by for apart, _ in results for by in apart.values()) < nearly


def test_a_module_of_fp64_trains_as_on_one_process(pool: Pool) -> None:
    job = msgspec.structs.replace(adapted("hsdp", 4), memory=UNSET)
    check_as_planned(pool, job, plan(job))


@pytest.mark.parametrize(
    ("way", "offload"),
    [
        *(slow(*case) for case in (("hfsdp", "none"), ("hsdp", "all"))),
        *(slow(*case) for case in (("hsdp 2", "none"), ("hsdp 1", "all"))),
        *(rare(*case) for case in (("hfsdp", "all"), ("hsdp", "none"), ("hsdp 2", "all"))),
        rare("hsdp 1", "none"),
    ],
)
def test_frozen_layers_in_another_dtype_take_memory_as_planned(
    pool: Pool, way: str, offload: str
) -> None:
    job = adapted(way, 4, offload=offload)
    check_bytes_alone(pool, job, plan(job))


MOST = {("hsdp", "sharded", ROUTED), ("hsdp 2", "mixed", TYPES), ("hsdp 1", "sharded", TYPES)}


def ways_of_units() -> Iterator[Any]:
    """Each way once, and the rest of them."""
    for case in product(WAYS, ("sharded", "mixed"), (TYPES, ROUTED)):
        if case == ("hfsdp", "mixed", ROUTED):
            yield case
        else:
            yield slow(*case) if case in MOST else rare(*case)


@pytest.mark.parametrize(("way", "units", "types"), [*ways_of_units()])
def test_tables_are_shared_by_all_ranks_beside_them(
    pool: Pool, way: str, units: str, types: tuple[str, ...]
) -> None:
    made = plan(on_grid(small_job(types, MODES[units], 4, "sgd"), way))
    check_run(pool, made)
    check_calls(pool, made)


def check_calls(pool: Pool, made: Plan) -> None:
    """Every unit makes the calls that were planned, of as many bytes."""
    for found in pool.run(made.world_size, collectives_of_a_step, job=made.job, made=made):
        for unit in made.units:
            kinds = (f"{unit.name} gather", f"{unit.name} reduce")
            own = [n for _, label, n in found if label.startswith(kinds)]
            assert len(own) == unit.collectives
            assert sum(own) == unit.bytes_per_step
