"""Shardwright plans, explains and runs sharded PyTorch training.

Importing this package imports neither torch nor the floor behind a name; each loads on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardwright.core.batch import Batch
    from shardwright.core.cluster import Cluster
    from shardwright.core.errors import (
        InputError,
        MismatchError,
        NoPlanError,
        RunError,
        ShardwrightError,
        UnsupportedError,
    )
    from shardwright.core.job import Job, parse_job, read_job
    from shardwright.core.measurement import Measurement, read_measurement
    from shardwright.core.placement import BlockShard, Owned, Replicate, Shard
    from shardwright.core.plan import Plan, read_plan, write_plan
    from shardwright.lab.compare import compare
    from shardwright.planner.explain import explain_tensor as explain
    from shardwright.planner.planner import plan
    from shardwright.runtime.apply import apply
    from shardwright.runtime.dstorage import DStorage, ParamInfo
    from shardwright.runtime.fully_shard import fully_shard_flat, get_dstorage
    from shardwright.runtime.optimizer import optimizer_parameters
    from shardwright.runtime.state import full_state_dict
    from shardwright.tracker.memory import MemoryTracker

_HOMES = {
    "Batch": "core.batch",
    "BlockShard": "core.placement",
    "Cluster": "core.cluster",
    "DStorage": "runtime.dstorage",
    "InputError": "core.errors",
    "Job": "core.job",
    "Measurement": "core.measurement",
    "MemoryTracker": "tracker.memory",
    "MismatchError": "core.errors",
    "NoPlanError": "core.errors",
    "Owned": "core.placement",
    "ParamInfo": "runtime.dstorage",
    "Plan": "core.plan",
    "Replicate": "core.placement",
    "RunError": "core.errors",
    "Shard": "core.placement",
    "ShardwrightError": "core.errors",
    "UnsupportedError": "core.errors",
    "apply": "runtime.apply",
    "compare": "lab.compare",
    "full_state_dict": "runtime.state",
    "fully_shard_flat": "runtime.fully_shard",
    "get_dstorage": "runtime.fully_shard",
    "optimizer_parameters": "runtime.optimizer",
    "parse_job": "core.job",
    "plan": "planner.planner",
    "read_job": "core.job",
    "read_measurement": "core.measurement",
    "read_plan": "core.plan",
    "write_plan": "core.plan",
}
_RENAMED = {"explain": ("planner.explain", "explain_tensor")}

__all__ = [
    "Batch",
    "BlockShard",
    "Cluster",
    "DStorage",
    "InputError",
    "Job",
    "Measurement",
    "MemoryTracker",
    "MismatchError",
    "NoPlanError",
    "Owned",
    "ParamInfo",
    "Plan",
    "Replicate",
    "RunError",
    "Shard",
    "ShardwrightError",
    "UnsupportedError",
    "apply",
    "compare",
    "explain",
    "full_state_dict",
    "fully_shard_flat",
    "get_dstorage",
    "optimizer_parameters",
    "parse_job",
    "plan",
    "read_job",
    "read_measurement",
    "read_plan",
    "write_plan",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its floor on first use."""
    home, original = _RENAMED.get(name) or (_HOMES.get(name), name)
    if home is None:
        raise AttributeError(f"module 'shardwright' has no attribute '{name}'")
    return getattr(importlib.import_module(f"shardwright.{home}"), original)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
