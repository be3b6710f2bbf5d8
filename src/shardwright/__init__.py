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
        StoppedError,
        UnsupportedError,
    )
    from shardwright.core.measurement import Measurement, read_measurement, write_measurement
    from shardwright.core.placement import BlockShard, Owned, Replicate, Shard
    from shardwright.estimate.own_model import Task
    from shardwright.estimate.questions import advise, estimate_memory, fit, memory
    from shardwright.estimate.recordings import plan, plan_module
    from shardwright.job.job import Job, parse_job, read_job
    from shardwright.job.plan import Plan, read_plan, write_plan
    from shardwright.planner.explain import explain_tensor as explain
    from shardwright.runtime.adamw_8bit import AdamW8bit
    from shardwright.runtime.apply import apply
    from shardwright.runtime.buckets import Buckets
    from shardwright.runtime.clip import clip_grad_norm_
    from shardwright.runtime.embeddings.shard import shard_embeddings, start_sparse_data_dist
    from shardwright.runtime.fully_shard import fully_shard_flat
    from shardwright.runtime.guard import Guard
    from shardwright.runtime.model_parts import average_weights
    from shardwright.runtime.muon import Muon
    from shardwright.runtime.optimizer import optimizer_parameters
    from shardwright.runtime.optimizer_dict import (
        load_optimizer_state_dict,
        optimizer_state_dict,
    )
    from shardwright.runtime.saving import Resumed, load_checkpoint, save_checkpoint
    from shardwright.runtime.sharded_module import ShardedModule
    from shardwright.runtime.state import full_state_dict
    from shardwright.runtime.units.buffers import shard_buffer
    from shardwright.runtime.units.cutting import MixedPrecision
    from shardwright.runtime.units.dstorage import DStorage, get_dstorage
    from shardwright.runtime.units.parameter import ParamInfo
    from shardwright.runtime.units.shard_tensor import ShardTensor
    from shardwright.runtime.units.unit import State
    from shardwright.tracker.memory import MemoryTracker
    from shardwright.train.compare import compare
    from shardwright.train.loop import Run, measure
_HOMES = {
    "AdamW8bit": "runtime.adamw_8bit",
    "Batch": "core.batch",
    "BlockShard": "core.placement",
    "Buckets": "runtime.buckets",
    "Cluster": "core.cluster",
    "DStorage": "runtime.units.dstorage",
    "Guard": "runtime.guard",
    "InputError": "core.errors",
    "Job": "job.job",
    "Measurement": "core.measurement",
    "MemoryTracker": "tracker.memory",
    "MismatchError": "core.errors",
    "MixedPrecision": "runtime.units.cutting",
    "Muon": "runtime.muon",
    "NoPlanError": "core.errors",
    "Owned": "core.placement",
    "ParamInfo": "runtime.units.parameter",
    "Plan": "job.plan",
    "Replicate": "core.placement",
    "Resumed": "runtime.saving",
    "Run": "train.loop",
    "RunError": "core.errors",
    "Shard": "core.placement",
    "ShardTensor": "runtime.units.shard_tensor",
    "ShardedModule": "runtime.sharded_module",
    "ShardwrightError": "core.errors",
    "State": "runtime.units.unit",
    "StoppedError": "core.errors",
    "Task": "estimate.own_model",
    "UnsupportedError": "core.errors",
    "advise": "estimate.questions",
    "apply": "runtime.apply",
    "average_weights": "runtime.model_parts",
    "clip_grad_norm_": "runtime.clip",
    "compare": "train.compare",
    "estimate_memory": "estimate.questions",
    "fit": "estimate.questions",
    "full_state_dict": "runtime.state",
    "fully_shard_flat": "runtime.fully_shard",
    "get_dstorage": "runtime.units.dstorage",
    "load_checkpoint": "runtime.saving",
    "load_optimizer_state_dict": "runtime.optimizer_dict",
    "measure": "train.loop",
    "memory": "estimate.questions",
    "optimizer_parameters": "runtime.optimizer",
    "optimizer_state_dict": "runtime.optimizer_dict",
    "parse_job": "job.job",
    "plan": "estimate.recordings",
    "plan_module": "estimate.recordings",
    "read_job": "job.job",
    "read_measurement": "core.measurement",
    "read_plan": "job.plan",
    "shard_embeddings": "runtime.embeddings.shard",
    "start_sparse_data_dist": "runtime.embeddings.shard",
    "shard_buffer": "runtime.units.buffers",
    "save_checkpoint": "runtime.saving",
    "write_measurement": "core.measurement",
    "write_plan": "job.plan",
}
_RENAMED = {
    "explain": ("planner.explain", "explain_tensor"),
    # what a document that is printed asks for: the floor of values cannot import the report
    "first_screen": ("report.first_screen", "as_text"),
    "first_screen_as_html": ("report.first_screen", "as_html"),
}

__all__ = [
    "AdamW8bit",
    "Batch",
    "BlockShard",
    "Buckets",
    "Cluster",
    "DStorage",
    "Guard",
    "InputError",
    "Job",
    "Measurement",
    "MemoryTracker",
    "MismatchError",
    "MixedPrecision",
    "Muon",
    "NoPlanError",
    "Owned",
    "ParamInfo",
    "Plan",
    "Replicate",
    "Resumed",
    "Run",
    "RunError",
    "Shard",
    "ShardTensor",
    "ShardedModule",
    "ShardwrightError",
    "State",
    "StoppedError",
    "Task",
    "UnsupportedError",
    "advise",
    "apply",
    "average_weights",
    "clip_grad_norm_",
    "compare",
    "estimate_memory",
    "explain",
    "fit",
    "full_state_dict",
    "fully_shard_flat",
    "get_dstorage",
    "load_checkpoint",
    "load_optimizer_state_dict",
    "measure",
    "memory",
    "optimizer_parameters",
    "optimizer_state_dict",
    "parse_job",
    "plan",
    "plan_module",
    "read_job",
    "read_measurement",
    "read_plan",
    "save_checkpoint",
    "shard_buffer",
    "shard_embeddings",
    "start_sparse_data_dist",
    "write_measurement",
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
