"""The ways to shard a table that TorchRec 1.9.2 looks at, in its order."""

from __future__ import annotations

from shardwright.core.cluster import Cluster, Device
from shardwright.core.errors import InputError, expected
from shardwright.core.model import ComputeKernel, TableSpec
from shardwright.core.option import Option, column_width, shard_runs
from shardwright.core.sharding import ShardingType, traits
from shardwright.planner.options import (
    QUANTIZED_KERNELS,
    QUANTIZED_TYPES,
    USUAL_MIN_PARTITION,
    is_quantized,
)

_BAG_TYPES: tuple[ShardingType, ...] = (
    "data_parallel",
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
)
_SEQUENCE_TYPES = tuple(name for name in _BAG_TYPES if traits(name).sequences)
_BAG_TYPES_ON_CPU = _BAG_TYPES[:4]
_TYPES_ON_REQUEST: tuple[ShardingType, ...] = ("grid_shard",)
_KERNELS: dict[Device, tuple[ComputeKernel, ...]] = {
    "cpu": ("fused",),
    "cuda": ("fused", "fused_uvm", "fused_uvm_caching", "key_value"),
}
_KERNELS_ON_REQUEST: tuple[ComputeKernel, ...] = ("key_value",)


def torchrec_options(table: TableSpec, cluster: Cluster) -> tuple[Option, ...]:
    """What TorchRec 1.9.2 tries for ``table``, in its order: one column split, by type and kernel.

    Quantised tables get what TorchRec's quantised sharders offer.

    :raises InputError: the table's limits leave nothing, or are of training and of inference.
    """
    width = column_width(table, table.min_partition or USUAL_MIN_PARTITION)
    found = []
    for sharding_type in _types(table, cluster.compute_device):
        kernels = _kernels(table, sharding_type, cluster)
        if not kernels:
            continue
        runs = shard_runs(table, sharding_type, cluster.world_size, cluster.group, width)
        found += [Option(table.name, sharding_type, kernel, runs) for kernel in kernels]
    if not found:
        wanted = (
            f"a sharding type and a compute kernel that go together on {cluster.compute_device}"
        )
        limits = [*(table.sharding_types or ("any type",)), *(table.compute_kernels or ())]
        remedy = "Widen sharding_types or compute_kernels."
        if is_quantized(table):
            offered = " or ".join(QUANTIZED_KERNELS[cluster.compute_device])
            remedy = f"A quantised table is {' or '.join(QUANTIZED_TYPES)} with kernel {offered}."
        raise InputError(expected(f"tables '{table.name}'", wanted, ", ".join(limits), remedy))
    return tuple(found)


def _types(table: TableSpec, device: Device) -> tuple[ShardingType, ...]:
    if is_quantized(table):
        possible = QUANTIZED_TYPES
    elif not table.pooled:
        possible = _SEQUENCE_TYPES
    else:
        possible = _BAG_TYPES_ON_CPU if device == "cpu" else _BAG_TYPES
    named = table.sharding_types
    return tuple(t for t in possible if (t in named if named else t not in _TYPES_ON_REQUEST))


def _kernels(
    table: TableSpec, sharding_type: ShardingType, cluster: Cluster
) -> tuple[ComputeKernel, ...]:
    device = cluster.compute_device
    possible = QUANTIZED_KERNELS[device] if is_quantized(table) else _KERNELS[device]
    if traits(sharding_type).replicated:
        possible = ("dense",)
    if not cluster.ssd_cap:
        possible = tuple(k for k in possible if k != "key_value")
    named = table.compute_kernels
    return tuple(k for k in possible if (k in named if named else k not in _KERNELS_ON_REQUEST))
