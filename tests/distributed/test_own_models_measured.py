"""A model of the user's own is planned from its recording: it trains as on one process, and takes
the bytes that its plan foresees."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from combinations import rare, slow
from own_tasks import (
    OF_UNITS,
    apart_by_plan,
    bytes_of_steps,
    in_order,
    own_job,
    planned,
)
from pool import Pool
from public_models import MODELS

from shardwright.core.errors import UnsupportedError
from shardwright.core.schedule import training_step
from shardwright.core.timeline import decode, exact_bytes, phase_peaks
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan

UNTRACED = {"Mixtral", "LSTM", "Wav2Vec2"}  # shapes that depend on values
SIZES = (1, 2, 3)
MOST_APART = 0.01  # of a peak
DENSE = {1: {}, 2: {"prefetch": 1, "reshard": True}, 3: {"prefetch": 0, "layers_per_unit": 1}}
QUICK = {("GPT2", 2)}
DAILY = {
    *(("GPT2", 1), ("GPT2", 3), ("ResNet", 3)),
    *((name, 2) for name in ("Llama", "T5", "UNet", "GAT", "DLRM")),
}


def architectures() -> Iterator[Any]:
    """One on all ranks, others that differ most in how they are traced on two."""
    for case in product((name for name in MODELS if name not in UNTRACED), SIZES):
        yield case if case in QUICK else slow(*case) if case in DAILY else rare(*case)


@pytest.mark.parametrize(("name", "world_size"), [*architectures()])
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


def check_bytes_alone(pool: Pool, job: Job, made: Plan) -> None:
    """Of a run whose numbers are those of another dtype."""
    found = pool.run(made.world_size, bytes_of_steps, job=job, made=made)
    check_planned_bytes(made, [({}, events) for events in found])


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


@pytest.mark.parametrize("overlap", [slow("none"), slow("rows"), "ids_and_rows"])
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
    check_bytes_alone(pool, job, made)


@pytest.mark.parametrize(
    ("policy", "way", "world_size"),
    [
        *(slow(*case) for case in (("full", "shard", 2), ("selective", "replicate", 2))),
        slow("full", "shard", 3),
        *(rare(*case) for case in (("selective", "replicate", 3), ("full", "shard", 1))),
        rare("selective", "replicate", 1),
    ],
)
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


@pytest.mark.parametrize("world_size", [slow(1), 2, rare(3)])
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


@pytest.mark.parametrize(
    ("world_size", "prefetch", "way", "policy"),
    [
        slow(2, 1, "shard", "full"),
        *(slow(*case) for case in ((3, 0, "replicate", "selective"), (2, 0, "shard", "none"))),
        *(rare(1, 0, "shard", policy) for policy in ("none", "full", "selective")),
        *(rare(2, 1, "replicate", policy) for policy in ("none", "full", "selective")),
        *(rare(3, 0, "shard", policy) for policy in ("none", "full", "selective")),
    ],
)
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


QUICK_ORDERS = {("a b a", "checkpointed", 2), ("few twice", "sharded one by one", 2)}


def orders() -> Iterator[Any]:
    """Each manner with one order, each order with one manner or two, and the rest of them."""
    for place, order in enumerate(ORDERS):
        for other, manner in enumerate(MANNERS):
            case = (order, manner, SIZES[(place // 3 + other // 3) % 3])
            if case in QUICK_ORDERS:
                yield case
            else:
                yield rare(*case) if (place + other) % len(ORDERS) else slow(*case)


@pytest.mark.parametrize(("order", "manner", "world_size"), [*orders()])
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
    compares = "memory" not in document  # which computes in fp32
    results = pool.run(world_size, in_order, job=job, made=made, compares=compares)
    check_planned_bytes(made, [(differing, events) for differing, events, _ in results])
    assert [differing for differing, _, _ in results] == [{}] * world_size
    steps = training_step(made.model.step, made.modes)
    for _, _, did in results:
        assert did == [action for action in steps if action.verb in OF_UNITS]


@pytest.mark.parametrize("world_size", [slow(2), rare(1), rare(3)])
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


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [
        slow("shard", "adam"),
        slow("replicate", "adagrad"),  # which makes its states at once
        *(rare("shard", "adagrad"), rare("replicate", "adam")),
    ],
)
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


@pytest.mark.parametrize(
    ("world_size", "zero", "offload"),
    [
        (2, 2, "none"),
        *(slow(2, zero, way) for zero, way in ((1, "none"), (1, "all"), (2, "all"), (3, "all"))),
        *(slow(3, zero, "none") for zero in (1, 2)),
        *(rare(3, zero, "all") for zero in (1, 2, 3)),
        *(rare(1, zero, "none") for zero in (1, 2)),
        *(rare(1, zero, "all") for zero in (1, 2, 3)),
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
    check_bytes_alone(pool, job, made)


NARROW = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]


QUICK_DTYPES = {(1, ("bf16", "fp32"), "replicate", 2)}


def stages() -> Iterator[Any]:
    """Each stage with each pair of dtypes on two ranks or three, and the rest of them."""
    for zero, (place, dtypes), (other, way), more in product(
        (1, 2, 3), enumerate(NARROW), enumerate(("replicate", "shard")), (0, 1)
    ):
        case = (zero, dtypes, way, (2, 3)[(zero + place // 2 + more + 1) % 2])
        if (zero + place + other) % 2 or more:
            yield rare(*case)
        else:
            yield case if case in QUICK_DTYPES else slow(*case)


@pytest.mark.parametrize(("zero", "dtypes", "way", "world_size"), [*stages()])
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
    check_bytes_alone(pool, job, made)


@pytest.mark.parametrize(
    ("way", "zero", "optimizer"),
    [
        ("shard", 3, "adamw"),
        *(slow(*case) for case in (("replicate", 3, "sgd"), ("auto", 1, "sgd"))),
        slow("auto", 2, "adamw"),
        *(rare(*case) for case in (("shard", 3, "sgd"), ("replicate", 3, "adamw"))),
        *(rare(*case) for case in (("auto", 1, "adamw"), ("auto", 2, "sgd"))),
    ],
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
        check_bytes_alone(pool, job, made)


@pytest.mark.parametrize("name", sorted(UNTRACED))
def test_a_module_whose_shapes_depend_on_values_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match="expected shapes that do not depend on values"):
        plan(own_job(name, "adam", cluster={"preset": "local", "world_size": 2}))
