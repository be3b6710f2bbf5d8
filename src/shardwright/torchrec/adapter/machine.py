"""TorchRec's topology and storage reservation as sections of a job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed import comm
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
)
from torchrec.distributed.planner.types import BasicCommsBandwidths, Storage, StorageReservation
from torchrec.distributed.types import CommOp, ModuleSharder
from torchrec.distributed.utils import get_device_type

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.torchrec.constants import BACKWARD, BANDWIDTHS
from shardwright.tracker.tensors import NAMES

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
        raise UnsupportedError(expected(where, wanted, f"'{topology.compute_device}'"))
    if type(topology.comms_bandwidths) is not BasicCommsBandwidths:
        found = type(topology.comms_bandwidths).__name__
        remedy = "Give intra_host_bw and inter_host_bw."
        raise UnsupportedError(
            expected(where, "one bandwidth inside and one between hosts", found, remedy)
        )
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
    for module in set(sharded):
        own = _bytes(module)
        parameters, buffers = parameters - own[0], buffers - own[1]
    if buffers:
        return {"dense_bytes": round(multiplier * parameters + buffers), "multiplier": 1.0}
    return {"dense_bytes": parameters, "multiplier": float(multiplier)}


def _bytes(module: nn.Module) -> tuple[int, int]:
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    return parameters, sum(b.numel() * b.element_size() for b in module.buffers())


def communication(
    sharders: Iterable[ModuleSharder[nn.Module]],
) -> tuple[str, str] | None:
    """Dtypes of rows on the wire, forward and backward, where codecs are registered."""
    found = {_codec_dtypes(s.qcomm_codecs_registry) for s in sharders if s.qcomm_codecs_registry}
    found -= {None}
    if len(found) > 1:
        raise InputError(
            expected(
                "qcomm_codecs_registry",
                "the same codecs in every sharder",
                " and ".join(sorted(map(str, found))),
                "Set planner.estimator.communication in job_overrides.",
            )
        )
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
    narrow = "int8" if reduced.quantized_dtype.itemsize == dtype.itemsize else "fp8"
    name = NAMES.get(dtype)
    return name if name in WIRE_DTYPES else narrow
