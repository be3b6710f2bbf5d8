"""The door: all that the planner asks of TorchRec's world, under the names it asks by."""

# The planner knows this file by name only, so that TorchRec's world can be left out or replaced
# whole. Order counts below: options are tried, and
# ties decided, in the order in which TorchRec's enumerator yields them.

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.core.cluster import Cluster, Constant, Device
from shardwright.core.errors import InputError
from shardwright.core.model import ComputeKernel, TableSpec
from shardwright.core.option import Option, column_width, shard_runs
from shardwright.core.sharding import ShardingType, traits
from shardwright.cost.presets import Preset
from shardwright.planner.choice import Placed, tally
from shardwright.planner.options import (
    QUANTIZED_KERNELS,
    QUANTIZED_TYPES,
    USUAL_MIN_PARTITION,
    is_quantized,
)
from shardwright.planner.statistics.records import CriticalTerm
from shardwright.torchrec.candidate import module_of
from shardwright.torchrec.pricing import derive, exchange_bytes, faster, price
from shardwright.torchrec.search import bounded_tables, search
from shardwright.torchrec.times import PHASE_OF_PART

# Numbers as they stand in TorchRec's source, to the digit, with their place: a better figure here
# would be a worse replica. Machines of a job override bandwidths and multipliers, nothing else.
# Bandwidths are bytes per millisecond: 1 GiB/s is 2^30 / 1000 of them.

GIB = 2**30
HBM_CAP = 32 * GIB  # bytes per rank; none on a machine without accelerators
DDR_CAP = 128 * GIB  # bytes per rank, not per host
SSD_CAP = 2 * 1024 * GIB  # bytes per rank

_GIB_PER_SECOND = GIB / 1000
_MIB_PER_SECOND = 2**20 / 1000


def _constant(value: float, unit: str, what: str) -> Constant:
    return Constant(value, unit, f"TorchRec 1.9.2, {what}", "2026-11-21")


BANDWIDTHS: dict[str, Constant] = {
    "hbm_mem_bw": _constant(897 * _GIB_PER_SECOND, "B/ms", "HBM of a V100"),
    "ddr_mem_bw": _constant(51 * _GIB_PER_SECOND, "B/ms", "DDR"),
    "ssd_mem_bw": _constant(100 * _MIB_PER_SECOND, "B/ms", "SSD"),
    "hbm_to_ddr_mem_bw": _constant(32 * _GIB_PER_SECOND, "B/ms", "between HBM and DDR"),
    "intra_host_bw": _constant(600 * _GIB_PER_SECOND, "B/ms", "links inside a host"),
    "inter_host_bw": _constant(12.5 * _GIB_PER_SECOND, "B/ms", "network card of one rank"),
}

BACKWARD: dict[str, Constant] = {
    "bwd_compute_multiplier": _constant(2.0, "", "backward compute by forward compute"),
    "weighted_feature_bwd_compute_multiplier": _constant(
        1.0, "", "further factor of a weighted table's backward compute"
    ),
}

TRAFFIC: dict[str, Constant] = {
    "index_bytes": _constant(8.0, "B", "an id, also where ids are int32"),
    "weighted_input_multiplier": _constant(2.0, "", "input read where ids carry weights"),
    "weighted_kernel_multiplier": _constant(
        1.1, "", "gradient of the weights by forward compute of a weighted table"
    ),
    "lookup_columns": _constant(32.0, "columns", "fewest a lookup of a whole row reads"),
    "wide_columns": _constant(128.0, "columns", "from here on a block has no penalty"),
    "medium_columns": _constant(64.0, "columns", "from here on a block has the medium penalty"),
    "wide_penalty": _constant(1.0, "", "block of 128 columns or more"),
    "medium_penalty": _constant(1.15, "", "block of 64 to 127 columns"),
    "narrow_penalty": _constant(1.75, "", "block of less than 64 columns"),
    "batched_copy_factor": _constant(2.455, "", "copies around a reduce-scatter's backward"),
    "element_wise_factor": _constant(9.22, "", "element-wise kernels on a replica's gradient"),
    "counted_hosts": _constant(2.0, "hosts", "most that an all-reduce is counted over"),
    "many_hosts_multiplier": _constant(2.0, "", "all-reduce over more hosts than are counted"),
}

KERNELS: dict[str, Constant] = {
    "dense_share": _constant(0.5, "", "share of the memory bandwidth that dense tables get"),
    "uvm_divisor": _constant(10.0, "", "bandwidth lost through unified memory"),
    "cache_load_factor": _constant(0.2, "", "cached share of the rows where none is given"),
    "kv_cache_load_factor": _constant(0.2, "", "key-value cache's share where none is given"),
    "cache_row_bytes": _constant(4.0, "B", "bookkeeping of a cache for each row of the shard"),
    "cache_slot_bytes": _constant(16.0, "B", "bookkeeping of a cache for each row it can hold"),
    "prefetch_input_base": _constant(1.0, "inputs", "held by a prefetch at its peak"),
    "prefetch_input_burst": _constant(6.0, "inputs", "held by a prefetch, shared by its passes"),
    "adam_state": _constant(2.0, "", "optimizer state by weight"),
    "other_state": _constant(1.0, "", "optimizer state by weight, of a class it does not know"),
    "rowwise_state_elements": _constant(1.0, "elements", "row-wise Adagrad's state of a row"),
}

TORCHREC: dict[str, Constant] = BANDWIDTHS | BACKWARD | TRAFFIC | KERNELS

PRESET = Preset(2, "cuda", HBM_CAP, DDR_CAP, SSD_CAP, "TorchRec 1.9.2 topology defaults", TORCHREC)


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
