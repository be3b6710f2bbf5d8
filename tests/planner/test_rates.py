"""Products take as long as they do in the dtype that a unit computes in."""

from __future__ import annotations

from typing import Any

import pytest
from plans import plan

from shardwright.job.job import parse_job
from shardwright.job.plan import Plan
from shardwright.planner import explain


def _plan(device: str, **memory: Any) -> Plan:
    return plan(
        parse_job(
            {
                "model": {"kind": "llama", "layers": 1, "dim": 64, "heads": 2, "vocab": 128},
                "cluster": {"compute_device": device, "world_size": 1},
                "batch": {"size": 1, "sequence": 32},
                "memory": {"checkpointing": "none", **memory},
            }
        )
    )


@pytest.mark.parametrize(
    ("dtype", "rate"), [("bf16", "bf16_compute_rate"), ("fp32", "compute_rate")]
)
def test_explain_names_the_rate_of_the_dtype(dtype: str, rate: str) -> None:
    made = _plan("cuda", param_dtype=dtype)
    steps = {s.name for each in explain.explain_tensor(made, "layers.0") for s in each.steps}
    assert steps & {"bf16_compute_rate", "compute_rate"} == {rate}


def test_a_machine_without_a_rate_for_a_dtype_says_that_it_is_as_slow_as_fp32() -> None:
    noted = "products in bf16 take as long as in fp32 (no bf16_compute_rate is known)"
    assert noted in _plan("cpu", param_dtype="bf16").assumptions
    assert noted not in _plan("cuda").assumptions
