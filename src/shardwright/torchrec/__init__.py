"""TorchRec's world: its costs and its way to search, and a planner that stands in for its own.

    from shardwright.torchrec import ShardwrightPlanner

    planner = ShardwrightPlanner(topology=topology, batch_size=512, constraints=constraints)
    plan = planner.collective_plan(model, sharders, process_group)
    model = DistributedModelParallel(model, plan=plan, sharders=sharders)

The names here are the adapter's; they load on first use, and with them TorchRec. Our planner comes
in by :mod:`shardwright.torchrec.profile`, which needs neither TorchRec nor torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from shardwright.core.errors import UnsupportedError

if TYPE_CHECKING:
    from shardwright.torchrec.adapter.job import job_of, write_job
    from shardwright.torchrec.adapter.planner import ShardwrightPlanner, sharding_plan
    from shardwright.torchrec.adapter.tables import TorchRecTable, read_tables

_HOMES = {
    "ShardwrightPlanner": "planner",
    "TorchRecTable": "tables",
    "job_of": "job",
    "read_tables": "tables",
    "sharding_plan": "planner",
    "write_job": "job",
}

__all__ = [
    "ShardwrightPlanner",
    "TorchRecTable",
    "job_of",
    "read_tables",
    "sharding_plan",
    "write_job",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use; one line says so where TorchRec is not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    if importlib.util.find_spec("torchrec") is None:
        where, remedy = f"{__name__}.{name}", "Install shardwright[torchrec]."
        raise UnsupportedError(where, "TorchRec to be installed", "no module 'torchrec'", remedy)
    return getattr(importlib.import_module(f"{__name__}.adapter.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
