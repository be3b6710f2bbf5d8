"""What stages of a pipeline take is what is estimated of them."""

from __future__ import annotations

import pytest
from pipeline_tasks import tracked_stage
from pool import Pool

from shardwright.core.job import parse_job
from shardwright.lab.footprint import footprint

MICROBATCHES = 4
DIM, SEQUENCE = 64, 32
LOSS_BYTES = 4 * MICROBATCHES + 8  # losses that the schedule hands out


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_take_what_was_estimated(pool: Pool, schedule: str) -> None:
    model = {"layers": 4, "dim": DIM, "heads": 4, "kv_heads": 2, "ffn_dim": 200, "vocab": 500}
    job = parse_job(
        {
            "model": {"kind": "llama", **model},
            "cluster": {"world_size": 2},
            "batch": {"size": MICROBATCHES, "sequence": SEQUENCE},
            "parallel": {"pipeline": 2, "schedule": schedule},
            "memory": {"runtime": "ddp", "lowering": "cpu", "param_dtype": "fp32"},
        }
    )
    estimated = {rank.coordinates["pipeline"]: rank for rank in footprint(job).ranks}
    first, last = pool.run(2, tracked_stage, job=job)
    for phase in estimated[1].phases:
        assert abs(phase.bytes - last[phase.phase]) <= LOSS_BYTES
    # The tracker meets a buffer for a gradient with the first one that arrives in it, and gloo
    # holds what it sent: at most the stream of every microbatch.
    streams = MICROBATCHES * SEQUENCE * DIM * 4
    for phase in estimated[0].phases:
        assert abs(phase.bytes - first[phase.phase]) <= streams
        assert phase.bytes == pytest.approx(first[phase.phase], rel=0.02)
