"""The door: all that the planner asks of TorchRec's world, under the names it asks by."""

# The planner knows this file by name only, so that TorchRec's world can be left out or replaced
# whole. Order counts below: options are tried, and
# ties decided, in the order in which TorchRec's enumerator yields them.

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.core.cluster import Cluster, Device
from shardwright.core.errors import InputError
from shardwright.core.model import ComputeKernel, TableSpec
from shardwright.core.option import Option, column_width, shard_runs
from shardwright.core.sharding import ShardingType, traits
from shardwright.planner.choice import Placed, tally
from shardwright.planner.options import (
    QUANTIZED_KERNELS,
    QUANTIZED_TYPES,
    USUAL_MIN_PARTITION,
    is_quantized,
)
from shardwright.planner.statistics.records import CriticalTerm
from shardwright.torchrec.candidate import module_of
from shardwright.torchrec.constants import PRESET
from shardwright.torchrec.pricing import derive, exchange_bytes, faster, price
from shardwright.torchrec.search import bounded_tables, search
from shardwright.torchrec.times import PHASE_OF_PART

__all__ = [
    "PHASE_OF_PART",
    "PRESET",
    "bounded_tables",
    "critical_terms",
    "derive",
    "exchange_bytes",
    "faster",
    "modules",
    "price",
    "search",
    "torchrec_options",
]


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
TYPES_ON_REQUEST: tuple[ShardingType, ...] = ("grid_shard",)
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
        raise InputError(f"tables '{table.name}'", wanted, ", ".join(limits), remedy)
    return tuple(found)


def _types(table: TableSpec, device: Device) -> tuple[ShardingType, ...]:
    if is_quantized(table):
        possible = QUANTIZED_TYPES
    elif not table.pooled:
        possible = _SEQUENCE_TYPES
    else:
        possible = _BAG_TYPES_ON_CPU if device == "cpu" else _BAG_TYPES
    named = table.sharding_types
    # TorchRec has grid sharding, and tables on SSD, only where a constraint names them.
    return tuple(t for t in possible if (t in named if named else t not in TYPES_ON_REQUEST))


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


def modules(tables: Iterable[Placed]) -> dict[str, list[Placed]]:
    """Tables that exchange their rows together, by module and sharding type."""
    groups: dict[str, list[Placed]] = {}
    for placed in tables:
        name = f"{module_of(placed.choice.table)} {placed.choice.option.sharding_type}"
        groups.setdefault(name, []).append(placed)
    return groups


def critical_terms(tables: tuple[Placed, ...], ranks: int) -> Iterator[CriticalTerm]:
    """Ranks meet after the communication of each module and sharding type, forward and backward,
    and after all compute, forward and backward: each takes as long as its slowest rank."""
    for name, group in modules(tables).items():
        for part in ("fwd_comms", "bwd_comms"):
            yield _term(f"{name} {part}", True, group, part, ranks)
    for part in ("fwd_compute", "bwd_compute"):
        yield _term(part, False, tables, part, ranks)


def _term(
    name: str, communication: bool, tables: Iterable[Placed], part: str, ranks: int
) -> CriticalTerm:
    found = tally(tables, ranks).seconds.get(part)
    values = [0.0] * ranks if found is None else found.tolist()
    return CriticalTerm(name, communication, max(values), values.index(max(values)))
