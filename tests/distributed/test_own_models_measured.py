"""A model of the user's own is planned from its recording: it trains as on one process, and takes
the bytes that its plan foresees."""

from __future__ import annotations

from typing import Any

import pytest
from own_tasks import (
    OF_UNITS,
    actions_of_a_step,
    apart_by_plan,
    bytes_of_steps,
    own_job,
    planned,
)
from pool import Pool
from public_models import MODELS

from shardwright.core.errors import UnsupportedError
from shardwright.core.job import Job, parse_job
from shardwright.core.plan import Plan
from shardwright.core.schedule import training_step
from shardwright.core.timeline import decode, exact_bytes, phase_peaks
from shardwright.lab.recordings import plan

UNTRACED = {"Mixtral", "LSTM", "Wav2Vec2"}  # shapes that depend on values
QUICK = {"GPT2", "T5", "ResNet"}
NAMES = [
    n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
    for n in MODELS
    if n not in UNTRACED
]
MOST_APART = 0.01  # of a peak
DENSE = {1: {}, 2: {"prefetch": 1, "reshard": True}, 4: {"prefetch": 0, "layers_per_unit": 1}}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_module_trains_and_takes_memory_as_planned(
    pool: Pool, name: str, world_size: int
) -> None:
    job = own_job(
        name,
        "adam",
        cluster={"preset": "local", "world_size": world_size},
        planner={"dense": DENSE[world_size]},
    )
    free = plan(job)
    sharded = {unit.name: "shard" for unit in free.units if "-" not in unit.name}
    job = own_job(
        name,
        "adam",
        cluster={"preset": "local", "world_size": world_size},
        planner={"dense": DENSE[world_size], "units": sharded},
    )
    check_as_planned(pool, job, plan(job))


def check_as_planned(pool: Pool, job: Job, made: Plan) -> None:
    results = pool.run(made.world_size, planned, job=job, made=made)
    check_planned_bytes(made, results)
    assert [apart for apart, _ in results] == [{}] * made.world_size


def check_planned_bytes(made: Plan, results: list[Any]) -> None:
    predicted = decode(made.timeline)
    wanted = {key: size for key, size in exact_bytes(predicted).items() if size}
    measured = [event for _, events in results for event in events]
    assert {key: size for key, size in exact_bytes(measured).items() if size} == wanted
    foreseen, seen = phase_peaks(predicted), phase_peaks(measured)
    for rank in range(made.world_size):
        highest = [
            max(sum(kinds.values()) for (r, _), kinds in peaks.items() if r == rank)
            for peaks in (foreseen, seen)
        ]
        assert highest[0] == pytest.approx(highest[1], rel=MOST_APART)


@pytest.mark.parametrize("overlap", ["none", "rows", "ids_and_rows"])
def test_an_embedding_looked_up_early_takes_memory_as_planned(pool: Pool, overlap: str) -> None:
    job = parse_job(
        {
            "model": {"python": "own_models:recommender"},
            "train": {"overlap": overlap, "table_optimizer": "sgd"},
            "cluster": {"preset": "local", "world_size": 2, "ddr_cap": "2 MiB"},
        }
    )
    made = plan(job)
    assert made.modes.routed == {"user"}
    assert made.modes.early == (set() if overlap == "none" else {"user"})
    found = pool.run(2, bytes_of_steps, job=job, made=made)
    check_planned_bytes(made, [({}, events) for events in found])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("policy", "way"), [("full", "shard"), ("selective", "replicate")])
def test_checkpointed_blocks_train_and_take_memory_as_planned(
    pool: Pool, policy: str, way: str, world_size: int
) -> None:
    cluster = {"preset": "local", "world_size": world_size}
    dense = {**DENSE[world_size], "checkpointing": [policy]}
    job = own_job("GPT2", "adam", cluster=cluster, planner={"dense": dense})
    units = {unit.name: way for unit in plan(job).units if "-" not in unit.name}
    job = own_job("GPT2", "adam", cluster=cluster, planner={"dense": dense, "units": units})
    made = plan(job)
    assert sum(len(unit.checkpointed) for unit in made.units) == 3
    assert {unit.checkpointing for unit in made.units if unit.checkpointed} == {policy}
    check_as_planned(pool, job, made)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_is_computed_again_draws_the_same_random_numbers(pool: Pool, world_size: int) -> None:
    def job(policy: str) -> Job:
        return parse_job(
            {
                "model": {"python": "own_models:dropping"},
                "train": {"steps": 3, "optimizer": "sgd", "learning_rate": 0.1},
                "cluster": {"preset": "local", "world_size": world_size},
                "planner": {"dense": {"checkpointing": [policy]}},
            }
        )

    plans = [plan(job(policy)) for policy in ("none", "full", "selective", "layers:2")]
    assert sum(len(unit.checkpointed) for unit in plans[-1].units) == 2
    found = pool.run(world_size, apart_by_plan, job=job("none"), plans=plans)
    assert found == [{}] * world_size


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("way", ["shard", "replicate"])
@pytest.mark.parametrize(("world_size", "prefetch"), [(1, 0), (2, 0), (2, 1), (4, 0)])
def test_layers_that_are_lists_are_units_of_the_parts_that_run(
    pool: Pool, world_size: int, prefetch: int, way: str, policy: str
) -> None:
    dense = {"prefetch": prefetch, "checkpointing": [policy], "layers_per_unit": 1}
    job = parse_job(
        {
            "model": {"python": "own_models:paired"},
            "data": {"python": "own_models:batches_of_adapted"},
            "train": {"steps": 3, "optimizer": "adam", "learning_rate": 0.01},
            "cluster": {"preset": "local", "world_size": world_size},
            "planner": {
                "units": {f"layers.{k}": way for k in range(6)},
                "dense": dense,
            },
        }
    )
    made = plan(job)
    units = {unit.name: unit.modules for unit in made.units}
    assert units["layers.3"] == ("layers.3.0", "layers.3.1")
    check_as_planned(pool, job, made)


ORDERS = ("a b a", "a a b b", "loop", "there and back", "back to front", "few twice", "twins")
ORDINARY = {"prefetch": 1, "reshard": True}
MANNERS: dict[str, dict[str, Any]] = {  # of planning: sections of a job
    "sharded": {"planner": {"dense": ORDINARY}},
    "sharded one by one": {"planner": {"dense": {"prefetch": 0, "layers_per_unit": 1}}},
    "sharded by two, kept": {
        "planner": {"dense": {"prefetch": 1, "layers_per_unit": 2, "reshard": False}}
    },
    "checkpointed": {"planner": {"dense": {**ORDINARY, "checkpointing": ["full"]}}},
    "replicated": {"planner": {"dense": {"prefetch": 1}}},
    "zero1": {"memory": {"param_dtype": "fp32", "zero": 1}},
    "zero2": {
        "memory": {"param_dtype": "fp32", "zero": 2},
        "planner": {"dense": {"layers_per_unit": 1}},
    },
    "offloaded": {"memory": {"param_dtype": "fp32", "offload": "all"}},
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("order", "manner", "world_size"),
    [
        (order, manner, (1, 2, 4)[(place + other) % 3])  # every two of the three together
        for place, order in enumerate(ORDERS)
        for other, manner in enumerate(MANNERS)
    ],
)
def test_parts_called_several_times_in_an_order_of_their_own_run_as_planned(
    pool: Pool, world_size: int, order: str, manner: str
) -> None:
    model = {"python": "own_models:called", "arguments": {"order": order}}
    model = {"python": "own_models:twins"} if order == "twins" else model
    document = {
        "model": model,
        "data": {"python": "own_models:batches_of_adapted"},
        "train": {"steps": 3, "optimizer": "sgd", "learning_rate": 0.01},
        "cluster": {"preset": "local", "world_size": world_size},
        "planner": {},
        **MANNERS[manner],
    }
    names = {unit.series or unit.name for unit in plan(parse_job(document)).model.units}
    way = "replicate" if manner == "replicated" else "shard"
    document["planner"] = {**document["planner"], "units": dict.fromkeys(names, way)}
    job = parse_job(document)
    made = plan(job)
    if "memory" in document:  # which computes in fp32
        check_planned_bytes(made, pool.run(world_size, planned, job=job, made=made))
    else:
        check_as_planned(pool, job, made)
    steps = training_step(made.model.step, made.modes)
    for did in pool.run(world_size, actions_of_a_step, job=job, made=made):
        assert did == [action for action in steps if action.verb in OF_UNITS]


@pytest.mark.parametrize("world_size", [1, 3])
def test_layers_that_are_lists_with_parameters_of_their_own_are_no_units(
    pool: Pool, world_size: int
) -> None:
    job = parse_job(
        {
            "model": {"python": "own_models:scaled"},
            "data": {"python": "own_models:batches_of_adapted"},
            "train": {"steps": 3, "optimizer": "adam", "learning_rate": 0.01},
            "cluster": {"preset": "local", "world_size": world_size},
        }
    )
    check_as_planned(pool, job, plan(job))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])  # which makes its states at once
@pytest.mark.parametrize("way", ["shard", "replicate"])
def test_what_is_frozen_has_neither_gradient_nor_states(
    pool: Pool, way: str, optimizer: str
) -> None:
    job = parse_job(
        {
            "model": {"python": "own_models:adapted"},
            "data": {"python": "own_models:batches_of_adapted"},
            "train": {"steps": 3, "optimizer": optimizer, "learning_rate": 0.01},
            "cluster": {"preset": "local", "world_size": 2},
            "planner": {"units": {"root": way, "1": way}, "dense": {"layers_per_unit": 2}},
        }
    )
    made = plan(job)
    layers, element = made.units[1], 8
    kept = [
        sum(
            size
            for (rank, _, kind, name), size in exact_bytes(decode(made.timeline)).items()
            if (kind, name) == (wanted, layers.name)
        )
        for wanted in ("weight", "gradient")
    ]
    copies = 2 if way == "replicate" else 1
    assert kept[1] == copies * element * 2 * (2 * 13 * 3)
    assert kept[0] == kept[1] + copies * element * 2 * (13 * 13 + 13)
    check_as_planned(pool, job, made)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("world_size", "zero", "offload"),
    [
        (world, zero, way)
        for world in (1, 2, 4)
        for zero in (1, 2, 3)
        for way in ("none", "all")
        if (zero, way) != (3, "none")
    ],
)
def test_stages_of_zero_take_memory_as_planned(
    pool: Pool, world_size: int, zero: int, offload: str
) -> None:
    """Frozen layers beside others, in fp64, computed in fp32; also in host memory."""
    job = parse_job(
        {
            "model": {"python": "own_models:adapted"},
            "data": {"python": "own_models:batches_of_adapted"},
            "train": {"steps": 3, "optimizer": "adam", "learning_rate": 0.01},
            "cluster": {"preset": "local", "world_size": world_size},
            "memory": {
                "zero": zero,
                "offload": offload,
                "param_dtype": "fp32",
                "reduce_dtype": "fp32",
            },
        }
    )
    made = plan(job)
    assert offload == "all" or zero in {unit.roles.zero for unit in made.units}
    assert {unit.offloaded is True for unit in made.units if unit.roles.zero} <= {offload == "all"}
    check_planned_bytes(made, pool.run(world_size, planned, job=job, made=made))


NARROW = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("zero", "dtypes", "way", "world_size"),
    [
        (zero, dtypes, way, (1, 2, 3, 4)[(zero + place + other + more) % 4])
        for zero in (1, 2, 3)
        for place, dtypes in enumerate(NARROW)
        for other, way in enumerate(("replicate", "shard"))
        for more in (0, 2)
    ],
)
def test_units_that_compute_in_another_dtype_take_memory_as_planned(
    pool: Pool, world_size: int, zero: int, dtypes: tuple[str, str], way: str
) -> None:
    """A replica is copied to be computed with, and the copy goes after its backward."""
    param, reduce = dtypes
    job = parse_job(
        {
            "model": {"python": "own_models:adapted"},
            "data": {"python": "own_models:batches_of_adapted"},
            "train": {"steps": 3, "optimizer": "adam", "learning_rate": 0.01},
            "cluster": {"preset": "local", "world_size": world_size},
            "memory": {"zero": zero, "param_dtype": param, "reduce_dtype": reduce},
            "planner": {"units": {"root": way, "1": way}},
        }
    )
    made = plan(job)
    assert {unit.name for unit in made.units} == made.modes.sharded_units
    check_planned_bytes(made, pool.run(world_size, planned, job=job, made=made))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("way", "zero"), [("shard", 3), ("replicate", 3), ("auto", 1), ("auto", 2)]
)
def test_what_gets_no_gradient_stays_as_it_is(
    pool: Pool, way: str, zero: int, optimizer: str
) -> None:
    job = parse_job(
        {
            "model": {"python": "own_models:spared"},
            "data": {"python": "own_models:batches_of_adapted"},
            "train": {"steps": 3, "optimizer": optimizer, "learning_rate": 0.01},
            "cluster": {"preset": "local", "world_size": 2},
            "planner": {"units": {"root": way, "layers": way} if zero == 3 else {}},
            **({"memory": {"zero": zero, "param_dtype": "fp32"}} if zero < 3 else {}),
        }
    )
    made = plan(job)
    trained = {block.tensor for block in made.expanded() if block.role == "gradient"}
    layers = {f"layers.{k}.{name}" for k in range(4) for name in ("weight", "bias")}
    assert trained == layers | {"head.weight", "head.bias"}
    said = "'layers.0.spare' and others get no gradient in a step: counted and run as frozen"
    assert said in made.assumptions
    if zero == 3:
        check_as_planned(pool, job, made)
    else:
        check_planned_bytes(made, pool.run(2, planned, job=job, made=made))


@pytest.mark.parametrize("name", sorted(UNTRACED))
def test_a_module_whose_shapes_depend_on_values_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match="expected shapes that do not depend on values"):
        plan(own_job(name, "adam", cluster={"preset": "local", "world_size": 2}))
