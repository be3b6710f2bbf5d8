"""The built-in models without torch: tensors, FLOPs and allocations of a step."""

from __future__ import annotations

import msgspec

from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.job import Job
from shardwright.core.model import ModelSpec
from shardwright.core.model_section import MEMORY_ONLY
from shardwright.core.specs import dlrm, transformer


def model_spec(job: Job) -> ModelSpec:
    """The model a job describes, with every table's optimizer filled in."""
    if job.model.kind in MEMORY_ONLY:
        raise UnsupportedError(
            expected(
                "model.kind",
                "dlrm, transformer or tables for a plan and a run",
                f"'{job.model.kind}'",
                "`shardwright memory` and `shardwright fit` take this kind.",
            )
        )
    if job.model.kind == "tables":
        return _tables_alone(job)
    if job.model.kind == "transformer":
        return transformer.spec(job)
    return dlrm.spec(job)


def _tables_alone(job: Job) -> ModelSpec:
    """No dense part and no steps to run: only tables that are to be placed."""
    tables = tuple(
        msgspec.structs.replace(table, fqn=table.name, optimizer=table.optimizer or "none")
        for table in job.tables
    )
    return ModelSpec(kind="tables", tables=tables, units=(), stages=())
