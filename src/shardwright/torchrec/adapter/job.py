"""A job out of a TorchRec model and what its planner would be given."""

# A job is made and not a plan, so that what TorchRec was given can be written down, changed by hand
# and planned again without TorchRec. Whatever a job cannot say is refused; capacities that differ
# between ranks become the least of each kind, for a plan that fits there fits everywhere.

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed import comm
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
)
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    PlannerError,
    Storage,
    StorageReservation,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CommOp, ModuleSharder
from torchrec.distributed.utils import get_device_type

from shardwright.core.document import encode_toml, write_atomically
from shardwright.core.errors import InputError, NoPlanError, UnsupportedError
from shardwright.job.tables import entry_of
from shardwright.torchrec.adapter.tables import (
    Constraints,
    Hardware,
    Sharders,
    TorchRecTable,
    limited,
    read_tables,
    sharded_modules,
)
from shardwright.torchrec.profile import BACKWARD, BANDWIDTHS
from shardwright.tracker.tensors import NAMES

PROFILE = "torchrec-1.9"
TABLES_SUFFIX = ".tables.json"


@dataclass(frozen=True)
class PlanRequest:
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
    request = PlanRequest(
        topology or default_topology(),
        batch_size or BATCH_SIZE,
        constraints,
        storage_reservation,
        timeout_seconds,
        job_overrides,
    )
    return document(module, sharders or get_default_sharders(), request)[0]


def document(
    module: nn.Module, sharders: Sharders, request: PlanRequest
) -> tuple[dict[str, Any], tuple[TorchRecTable, ...]]:
    """The job as a document, and its tables in the same order; none if nothing can be sharded."""
    topology = request.topology
    cluster = cluster_section(topology, rates=request.profile == PROFILE)
    tables = read_tables(module, sharders, request.constraints, topology.compute_device)
    device, group = topology.compute_device, min(topology.intra_group_size, topology.world_size)
    ranks = Hardware(device, topology.world_size, group, least_storage(topology).ssd)
    # Limits are worked out here and written into the job: what TorchRec runs is known only where it
    # is installed.
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
    request: PlanRequest, module: nn.Module, sharders: Sharders, reservation: StorageReservation
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
        raise NoPlanError("storage_reservation", "HBM left for tables", found) from error
    # A reservation that we do not know is asked what it would leave, and only the difference is
    # kept.
    taken = least_storage(request.topology).hbm - least_storage(left).hbm
    if taken < 0:
        raise UnsupportedError("storage_reservation", "bytes taken of ranks", f"{-taken:,} B given")
    return taken


def _estimator(tables: Sequence[TorchRecTable]) -> dict[str, Any]:
    """What the sharders of the tables say about all of them."""
    # By identity: sharders have no equality of their own, and one serves many tables.
    sharders = list({id(table.sharder): table.sharder for table in tables}.values())
    found: dict[str, Any] = {}
    dtypes = communication(sharders)
    if dtypes is not None:
        found["communication"] = list(dtypes)
    shares = [(getattr(s, "fused_params", None) or {}).get("cache_load_factor") for s in sharders]
    # One key for all tables: where sharders differ it stays unsaid, and tables carry their own.
    if shares and shares[0] is not None and len(set(shares)) == 1:
        found["cache_load_factor"] = float(shares[0])
    return found


def _merged(document: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(document)
    for key, value in overrides.items():
        inner = merged.get(key)
        # Key by key, so that an override of one key does not take a section's other keys away.
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


logger = logging.getLogger(__name__)

DEVICES = ("cpu", "cuda")
RESERVED_SHARE = 0.15  # of a job that names no reservation, as in TorchRec
WIRE_DTYPES = ("fp32", "fp16", "bf16")  # that codecs send as they are


def default_topology() -> Topology:
    """The process group's ranks on the devices at hand; one rank where there is no group."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return Topology(
        world_size=ranks,
        compute_device=get_device_type(),
        local_world_size=comm.get_local_size(ranks),
        pod_size=comm.get_topology_domain_multiple(),
    )


def cluster_section(topology: Topology, *, rates: bool) -> dict[str, Any]:
    """The ``[cluster]`` of a job; bandwidths, in bytes per millisecond, only with ``rates``.

    Where ranks differ in memory every rank counts as that with least of each kind: a plan that fits
    then fits. It is logged.
    """
    _check(topology)
    storage = least_storage(topology)
    capacities = {"hbm_cap": storage.hbm, "ddr_cap": storage.ddr, "ssd_cap": storage.ssd}
    section: dict[str, Any] = {
        "compute_device": topology.compute_device,
        "world_size": topology.world_size,
        "local_world_size": topology.local_world_size,
        **{key: nbytes for key, nbytes in capacities.items() if nbytes},
    }
    if topology.intra_group_size > topology.local_world_size:
        section["pod_size"] = topology.intra_group_size // topology.local_world_size
    if rates:
        section |= {key: float(getattr(topology, key)) for key in (*BANDWIDTHS, *BACKWARD)}
    return section


def _check(topology: Topology) -> None:
    where = "topology"
    if topology.compute_device not in DEVICES:
        wanted = f"compute_device {' or '.join(DEVICES)}"
        raise UnsupportedError(where, wanted, f"'{topology.compute_device}'")
    # By exact type: a subclass may answer by ranks, and two numbers cannot say what it does.
    if type(topology.comms_bandwidths) is not BasicCommsBandwidths:
        found = type(topology.comms_bandwidths).__name__
        remedy = "Give intra_host_bw and inter_host_bw."
        raise UnsupportedError(where, "one bandwidth inside and one between hosts", found, remedy)
    least = least_storage(topology)
    larger = [device.rank for device in topology.devices if device.storage != least]
    if larger:
        logger.warning(
            "topology: ranks differ in memory; planned as if each had that of the least, %s, "
            "which leaves some of %d ranks unused (rank %d first)",
            least,
            len(larger),
            larger[0],
        )


def least_storage(topology: Topology) -> Storage:
    """The least of each kind of memory that a rank has."""
    kinds = ("hbm", "ddr", "ssd")
    storages = [device.storage for device in topology.devices]
    return Storage(**{kind: min(getattr(each, kind) for each in storages) for kind in kinds})


def reservation_section(
    reservation: StorageReservation | None,
    model: nn.Module,
    sharded: Iterable[nn.Module],
    set_aside: Callable[[StorageReservation], int],
) -> dict[str, Any]:
    """The ``[planner.reservation]`` that sets aside what ``reservation`` does, in bytes per rank.

    ``sharded`` are the modules of ``model`` whose tables are planned; the rest is dense.
    ``set_aside`` asks a reservation itself, for kinds that are none of ours.
    """
    match reservation:
        case None:
            dense = _dense(model, sharded, 6.0)
            return {"kind": "heuristic", "percentage": RESERVED_SHARE, **dense}
        case FixedAbsoluteStorageReservation():
            return {"kind": "absolute", "nbytes": reservation._hbm_reserved_bytes}
        case FixedPercentageStorageReservation():
            return {"kind": "percentage", "percentage": reservation._percentage}
        case HeuristicalStorageReservation():
            kind, multiplier = "heuristic", reservation._parameter_multiplier
        case InferenceStorageReservation():
            kind, multiplier = "inference", 1.0
        case _:
            return {"kind": "absolute", "nbytes": set_aside(reservation)}
    dense = _dense(model, sharded, multiplier)
    if reservation._dense_tensor_estimate:
        dense = {"dense_bytes": reservation._dense_tensor_estimate, "multiplier": 1.0}
    return {"kind": kind, "percentage": reservation._percentage, **dense}


def _dense(model: nn.Module, sharded: Iterable[nn.Module], multiplier: float) -> dict[str, Any]:
    """Bytes of the dense part and how often they count; buffers count once."""
    parameters, buffers = _bytes(model)
    # A set: a module that is reached by two paths has its bytes once.
    for module in set(sharded):
        own = _bytes(module)
        parameters, buffers = parameters - own[0], buffers - own[1]
    # Buffers are not trained, so the multiplier (weights, gradients, states) is not theirs.
    if buffers:
        return {"dense_bytes": round(multiplier * parameters + buffers), "multiplier": 1.0}
    return {"dense_bytes": parameters, "multiplier": float(multiplier)}


def _bytes(module: nn.Module) -> tuple[int, int]:
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    return parameters, sum(b.numel() * b.element_size() for b in module.buffers())


def communication(sharders: Iterable[ModuleSharder[nn.Module]]) -> tuple[str, str] | None:
    """Dtypes of rows on the wire, forward and backward, where codecs are registered."""
    found = {_codec_dtypes(s.qcomm_codecs_registry) for s in sharders if s.qcomm_codecs_registry}
    found -= {None}
    if len(found) > 1:
        where = "qcomm_codecs_registry"
        wanted = "the same codecs in every sharder"
        remedy = "Set planner.estimator.communication in job_overrides."
        raise InputError(where, wanted, " and ".join(sorted(map(str, found))), remedy)
    return next(iter(found), None)


def _codec_dtypes(registry: dict[str, Any]) -> tuple[str, str] | None:
    rows = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name, CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
    codecs = next((registry[name] for name in rows if name in registry), None)
    if codecs is None:
        return None
    reduced = registry.get(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name, codecs)
    return (
        _wire_dtype(codecs.forward, reduced.forward),
        _wire_dtype(codecs.backward, reduced.backward),
    )


def _wire_dtype(codec: Any, reduced: Any) -> str:
    """A codec's dtype; bytes that are reduced as wider numbers are fp8, others int8."""
    dtype = codec.quantized_dtype
    # Both travel as bytes, so they are told apart by what TorchRec reduces them in.
    narrow = "int8" if reduced.quantized_dtype.itemsize == dtype.itemsize else "fp8"
    name = NAMES.get(dtype)
    return name if name in WIRE_DTYPES else narrow
