"""The built-in models without torch: tensors, FLOPs and allocations of a step."""

from __future__ import annotations

from shardwright.core.job import Job
from shardwright.core.model import ModelSpec
from shardwright.core.specs import dlrm


def model_spec(job: Job) -> ModelSpec:
    """The model a job describes, with every table's optimizer filled in."""
    return dlrm.spec(job)
