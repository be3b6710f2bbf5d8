"""A transformer or a llama on ranks is that of one process, and needs what its plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from combinations import in_turn
from plans import plan
from pool import Pool
from transformer_tasks import meter_planned, moved_by_plans, train_planned, whole_of

from shardwright.core.timeline import decode, exact_bytes, phase_peaks
from shardwright.data.tokens import write_text
from shardwright.job.job import Job, parse_job

GLOBAL_BATCH = 12
PLANNERS: dict[str, dict[str, Any]] = {
    "free": {},
    "sharded": {"units": {"embed": "shard", "layers": "shard", "head": "shard"}},
    "replicated": {"units": {"embed": "replicate", "layers": "replicate", "head": "replicate"}},
    "mixed": {"units": {"embed": "replicate", "layers": "shard", "head": "replicate"}},
    "merged": {
        "units": {"embed": "shard", "layers": "shard", "head": "shard"},
        "dense": {"layers_per_unit": 2},
    },
    "prefetched": {
        "units": {"embed": "shard", "layers": "shard", "head": "shard"},
        "dense": {"prefetch": 1},
    },
    "kept": {
        "units": {"embed": "shard", "layers": "shard", "head": "shard"},
        "dense": {"reshard": False},
    },
    "offloaded": {"units": {"embed": "offload", "layers": "offload", "head": "offload"}},
    "in part": {
        "units": {"embed": "replicate", "layers": "offload", "head": "shard"},
        "dense": {"prefetch": 1, "reshard": True},
    },
    "checkpointed": {
        "units": {"embed": "shard", "layers": "shard", "head": "shard"},
        "dense": {"checkpointing": ["full"], "prefetch": 1},
    },
    "selective": {
        "units": {"embed": "replicate", "layers": "replicate", "head": "replicate"},
        "dense": {"checkpointing": ["selective"]},
    },
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    write_text(path, 3000)
    return path


def text_job(text: Path, world_size: int, planner: dict[str, Any], **changes: Any) -> Job:
    document: dict[str, Any] = {
        "model": {"kind": "transformer", "layers": 3, "dim": 20, "heads": 4},
        "batch": {"size": GLOBAL_BATCH // world_size, "sequence": 11},
        "data": {"path": str(text)},
        "cluster": {"world_size": world_size},
        "planner": planner,
        "train": {"steps": 6, "optimizer": "sgd", "learning_rate": 0.5},
    }
    others = {key: section for key, section in changes.items() if key not in document}
    own = {key: section | changes.get(key, {}) for key, section in document.items()}
    return parse_job(own | others)


LLAMAS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"experts": 3, "experts_per_token": 2, "expert_ffn_dim": 12, "moe_layers": [0, 2]},
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("planner", "kind"),
    in_turn(["prefetched", "sharded", "kept", "offloaded", "checkpointed"], ["experts", "dense"]),
)
def test_so_is_that_of_a_llama(pool: Pool, text: Path, kind: str, planner: str) -> None:
    layers = [f"layers.{layer}" for layer in range(3)]
    units = dict.fromkeys(("tok_embeddings", *layers, "head"), "shard")
    widths = {"kind": "llama", "dim": 16, "kv_heads": 2, "ffn_dim": 24, **LLAMAS[kind]}
    planned = {**PLANNERS[planner], "units": units}
    check_curve(pool, text_job(text, 2, planned, model=widths, train={"learning_rate": 0.15}), 2)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("world_size", "planner"),
    [
        (2, "in part"),
        (1, "prefetched"),
        *((2, name) for name in PLANNERS if name != "in part"),
        *((3, name) for name in ("merged", "in part")),
        *(
            pytest.param(world, name, marks=pytest.mark.product)
            for world in (1, 3)
            for name in PLANNERS
            if (world, name) not in ((1, "prefetched"), (3, "merged"), (3, "in part"))
        ),
    ],
)
def test_the_loss_curve_is_that_of_one_process(
    pool: Pool, text: Path, world_size: int, planner: str
) -> None:
    check_curve(pool, text_job(text, world_size, PLANNERS[planner]), world_size)


def check_curve(pool: Pool, job: Job, world_size: int) -> None:
    whole = msgspec.structs.replace(
        job, batch=msgspec.structs.replace(job.batch, size=GLOBAL_BATCH)
    )
    losses, weights = whole_of(whole)
    assert losses[-1] < losses[0] - 0.5
    scored = []
    for found, state, scores in pool.run(world_size, train_planned, job=job, made=plan(job)):
        assert found == pytest.approx(losses, abs=1e-5)
        assert set(state) == set(weights)
        for name, weight in weights.items():
            torch.testing.assert_close(state[name], weight, rtol=1e-4, atol=1e-5)
        scored.append(np.concatenate(scores))
    numbers = np.sort(np.concatenate(scored)[:, 0])
    assert numbers.tolist() == list(range(len(numbers)))


SIZES: dict[str, dict[str, Any]] = {
    "weights": {"model": {"dim": 64}, "batch": {"size": 2}},
    "activations": {"model": {"dim": 32, "heads": 8}, "batch": {"size": 8, "sequence": 40}},
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("planner", "sizes", "world_size"), in_turn(list(PLANNERS)[::-1], SIZES, [2])
)
def test_bytes_are_exact_and_peaks_are_close(
    pool: Pool, text: Path, world_size: int, sizes: str, planner: str
) -> None:
    job = text_job(text, world_size, PLANNERS[planner], **SIZES[sizes])
    check_step_bytes(pool, job, world_size)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("world_size", "model"), in_turn([2, 4, 1], [{}, {"kind": "llama", "dim": 16, "kv_heads": 2}])
)
def test_so_are_those_of_layers_of_which_every_second_is_checkpointed(
    pool: Pool, text: Path, model: dict[str, Any], world_size: int
) -> None:
    dense = {"checkpointing": ["layers:2"], "layers_per_unit": 2, "reshard": world_size > 2}
    model = {"layers": 4, **model}
    job = text_job(text, world_size, {"dense": dense, "units": {"layers": "shard"}}, model=model)
    assert [len(unit.checkpointed) for unit in plan(job).units] == [0, 1, 1, 0]
    check_step_bytes(pool, job, world_size)


STATES_OF_8_BITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: (PLANNERS[name], {}) for name in ("sharded", "mixed", "merged", "prefetched")},
    "zero 1": ({}, {"memory": {"zero": 1}}),
    "zero 2": ({}, {"memory": {"zero": 2}}),
    "buckets": ({"dense": {"bucket_size": 9000}}, {"memory": {"zero": 2}}),
    "offload": ({}, {"memory": {"offload": "all"}}),
    "hsdp": (PLANNERS["sharded"], {"parallel": {"data_replicate": 2}}),
    "hfsdp": ({}, {"parallel": {"data_replicate": 2}, "memory": {"zero": [2, 3]}}),
}
STATES_ON = {"sharded": 1, "merged": 3, "zero 2": 3, "hfsdp": 4}  # ranks, others on two


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("way", "world_size"),
    [(way, STATES_ON.get(way, 2)) for way in STATES_OF_8_BITS]
    + [
        pytest.param(way, ranks, marks=pytest.mark.product)
        for way, (_, sections) in STATES_OF_8_BITS.items()
        for ranks in ((2, 4) if "parallel" in sections else (1, 2, 3, 4))
        if ranks != STATES_ON.get(way, 2)
    ],
)
def test_states_of_8_bits_are_exact_and_their_peaks_are_close(
    pool: Pool, text: Path, world_size: int, way: str
) -> None:
    planner, sections = STATES_OF_8_BITS[way]
    learns = {"train": {"optimizer": "adamw_8bit", "learning_rate": 0.01}}
    sizes = {"model": {"dim": 68}, "batch": {"size": 2}}
    check_step_bytes(
        pool, text_job(text, world_size, planner, **sizes, **learns, **sections), world_size
    )


def check_step_bytes(pool: Pool, job: Job, world_size: int) -> None:
    made = plan(job)
    predicted = decode(made.timeline)
    results = pool.run(world_size, meter_planned, job=job, made=made)
    measured = [event for exact, _ in results for event in exact]
    wanted = {key: size for key, size in exact_bytes(predicted).items() if size}
    assert {key: size for key, size in exact_bytes(measured).items() if size} == wanted
    told = phase_peaks(predicted)
    for rank, (_, by_step) in enumerate(results):
        steps = [phase_peaks(events) for events in by_step]
        # gloo may hold a buffer for a moment after the wait: the step that shows least is the one
        least = min(max(sum(kinds.values()) for kinds in step.values()) for step in steps)
        expected = max(sum(kinds.values()) for (r, _), kinds in told.items() if r == rank)
        assert expected == pytest.approx(least, rel=0.01)


def test_what_a_unit_moves_is_what_the_plan_says(pool: Pool, text: Path) -> None:
    made = {name: plan(text_job(text, 2, planner)) for name, planner in PLANNERS.items()}
    told = {
        name: {unit.name: (unit.collectives, unit.bytes_per_step) for unit in its.units}
        for name, its in made.items()
    }
    for rank, found in enumerate(pool.run(2, moved_by_plans, plans=made)):
        assert found == told, rank
