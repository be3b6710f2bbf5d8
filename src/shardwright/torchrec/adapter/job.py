"""A job out of a TorchRec model and what its planner would be given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import PlannerError, StorageReservation
from torchrec.distributed.sharding_plan import get_default_sharders

from shardwright.core.document import encode_toml, write_atomically
from shardwright.core.errors import NoPlanError, UnsupportedError, expected
from shardwright.job.tables import entry_of
from shardwright.torchrec.adapter.limits import Ranks, limited
from shardwright.torchrec.adapter.machine import (
    cluster_section,
    communication,
    default_topology,
    least_storage,
    reservation_section,
)
from shardwright.torchrec.adapter.tables import (
    Constraints,
    Sharders,
    TorchRecTable,
    read_tables,
    sharded_modules,
)

PROFILE = "torchrec-1.9"
TABLES_SUFFIX = ".tables.json"


@dataclass(frozen=True)
class Request:
    """What a planner of TorchRec's is given, and how this job differs from the usual one.

    ``overrides`` are sections of a job, which win key by key over what the model says.
    """

    topology: Topology
    batch_size: int = BATCH_SIZE
    constraints: Constraints | None = None
    storage_reservation: StorageReservation | None = None
    timeout_seconds: float | None = None
    overrides: Mapping[str, Any] | None = None

    @property
    def profile(self) -> str:
        """The cost profile of the job."""
        return str((self.overrides or {}).get("planner", {}).get("constants", PROFILE))

    @property
    def lean(self) -> bool:
        """Whether types that add nothing are left out: not where TorchRec's search is asked for."""
        section: Mapping[str, object] = (self.overrides or {}).get("planner", {})
        return section.get("options") != "torchrec" and section.get("search") != "proposers"


def job_of(
    module: nn.Module,
    *,
    topology: Topology | None = None,
    batch_size: int | None = None,
    sharders: Sharders | None = None,
    constraints: Constraints | None = None,
    storage_reservation: StorageReservation | None = None,
    timeout_seconds: float | None = None,
    job_overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The tables of ``module`` as a job: a document for ``parse_job`` or :func:`write_job`.

    Arguments are those of :class:`~shardwright.torchrec.adapter.planner.ShardwrightPlanner`.
    """
    request = Request(
        topology or default_topology(),
        batch_size or BATCH_SIZE,
        constraints,
        storage_reservation,
        timeout_seconds,
        job_overrides,
    )
    return document(module, sharders or get_default_sharders(), request)[0]


def document(
    module: nn.Module, sharders: Sharders, request: Request
) -> tuple[dict[str, Any], tuple[TorchRecTable, ...]]:
    """The job as a document, and its tables in the same order; none if nothing can be sharded."""
    topology = request.topology
    cluster = cluster_section(topology, rates=request.profile == PROFILE)
    tables = read_tables(module, sharders, request.constraints, topology.compute_device)
    ranks = Ranks(
        topology.compute_device,
        topology.world_size,
        min(topology.intra_group_size, topology.world_size),
        least_storage(topology).ssd,
    )
    entries = [entry_of(limited(table, ranks, lean=request.lean)) for table in tables]
    modules = (child for _, child, _ in sharded_modules(module, sharders))
    set_aside = partial(_set_aside, request, module, sharders)
    planner: dict[str, Any] = {
        "constants": request.profile,
        "reservation": reservation_section(request.storage_reservation, module, modules, set_aside),
        "estimator": _estimator(tables),
    }
    if request.timeout_seconds is not None:
        planner["time_limit"] = float(request.timeout_seconds)
    found = {
        "cluster": cluster,
        "batch": {"size": request.batch_size},
        "planner": planner,
        "tables": entries,
    }
    return _merged(found, request.overrides or {}), tables


def _set_aside(
    request: Request, module: nn.Module, sharders: Sharders, reservation: StorageReservation
) -> int:
    """Bytes of HBM that a reservation takes of what every rank counts as having."""
    try:
        left = reservation.reserve(
            topology=request.topology,
            batch_size=request.batch_size,
            module=module,
            sharders=list(sharders),
            constraints=dict(request.constraints or {}),
        )
    except PlannerError as error:
        found = " ".join(str(error).split())
        raise NoPlanError(expected("storage_reservation", "HBM left for tables", found)) from error
    taken = least_storage(request.topology).hbm - least_storage(left).hbm
    if taken < 0:
        raise UnsupportedError(
            expected("storage_reservation", "bytes taken of ranks", f"{-taken:,} B given")
        )
    return taken


def _estimator(tables: Sequence[TorchRecTable]) -> dict[str, Any]:
    """What the sharders of the tables say about all of them."""
    sharders = list({id(table.sharder): table.sharder for table in tables}.values())
    found: dict[str, Any] = {}
    dtypes = communication(sharders)
    if dtypes is not None:
        found["communication"] = list(dtypes)
    shares = [(getattr(s, "fused_params", None) or {}).get("cache_load_factor") for s in sharders]
    if shares and shares[0] is not None and len(set(shares)) == 1:
        found["cache_load_factor"] = float(shares[0])
    return found


def _merged(document: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(document)
    for key, value in overrides.items():
        inner = merged.get(key)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            value = _merged(inner, value)
        merged[key] = value
    return merged


def write_job(job: Mapping[str, Any], path: Path | str) -> None:
    """Write a job as TOML; its tables go beside it, as JSON, into ``NAME.tables.json``."""
    path = Path(path)
    beside = path.with_name(path.stem + TABLES_SUFFIX)
    write_atomically(beside, (json.dumps(job["tables"], indent=1) + "\n").encode())
    sections = {key: value for key, value in job.items() if key != "tables"}
    model = {**sections.pop("model", {}), "tables": beside.name}
    write_atomically(path, encode_toml({"model": model, **sections}).encode())
