"""What stages of a pipeline take is what is estimated of them."""

from __future__ import annotations

from typing import Any

import pytest
from combinations import rare, slow
from pipeline_tasks import tracked_stage
from pool import Pool

from shardwright.estimate.footprint import footprint
from shardwright.job.job import parse_job

MICROBATCHES = 4
DIM, SEQUENCE = 64, 32
LOSS_BYTES = 4 * MICROBATCHES + 8  # losses that the schedule hands out


@pytest.mark.parametrize(
    ("schedule", "replicas", "shards", "memory", "more"),
    [
        ("1f1b", 1, 1, {"runtime": "ddp"}, {}),
        rare("gpipe", 1, 1, {"runtime": "ddp"}, {}),
        slow("1f1b", 1, 2, {}, {}),
        rare("1f1b", 2, 1, {"zero": [2, 3]}, {}),
        slow("gpipe", 2, 1, {"zero": [2, 3]}, {"experts": 4, "experts_per_token": 2}),
    ],
    ids=str,
)
def test_stages_take_what_was_estimated(
    pool: Pool,
    schedule: str,
    replicas: int,
    shards: int,
    memory: dict[str, Any],
    more: dict[str, Any],
) -> None:
    model = {"layers": 4, "dim": DIM, "heads": 4, "kv_heads": 2, "ffn_dim": 200, "vocab": 500}
    job = parse_job(
        {
            "model": {"kind": "llama", **model, **more},
            "cluster": {"world_size": 2 * replicas * shards},
            "batch": {"size": MICROBATCHES, "sequence": SEQUENCE},
            "parallel": {
                "pipeline": 2,
                "schedule": schedule,
                "data_replicate": replicas,
                "data_shard": shards,
            },
            "memory": {"lowering": "cpu", "param_dtype": "fp32", **memory},
        }
    )
    estimated = {rank.coordinates["pipeline"]: rank for rank in footprint(job).ranks}
    every = pool.run(2 * replicas * shards, tracked_stage, job=job)
    first, last = every[0], every[-1]
    for phase in estimated[1].phases:
        assert abs(phase.bytes - last[phase.phase]) <= LOSS_BYTES
    # The tracker meets a buffer for a gradient with the first one that arrives in it, and gloo
    # holds what it sent: at most the stream of every microbatch.
    streams = MICROBATCHES * SEQUENCE * DIM * 4
    for phase in estimated[0].phases:
        assert abs(phase.bytes - first[phase.phase]) <= streams
        assert phase.bytes == pytest.approx(first[phase.phase], rel=0.02)
