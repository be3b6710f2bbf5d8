"""The constants of TorchRec's planner, release 1.9.2, and the machine it assumes by default.

Its bandwidths are bytes per millisecond: 1 GiB/s is 2^30 / 1000 of them.
"""

# Numbers as they stand in TorchRec's source, to the digit, with their place: a better figure here
# would be a worse replica. Machines of a job override bandwidths and multipliers, nothing else.

from __future__ import annotations

from shardwright.core.cluster import Constant
from shardwright.cost.presets import Preset

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
