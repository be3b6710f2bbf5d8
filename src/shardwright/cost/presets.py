"""Machines by name: capacities of a rank, and every constant with value, unit, source and date.

A rate named ``*_rate`` is per rank and per direction. Where a data sheet says nothing the source
begins with ``assumed``. ``compute_rate`` is that of products in fp32, which PyTorch keeps unless
told to use tf32; other dtypes have rates of their own where a data sheet has them. Ranks of one
host talk at the rate of each collective, ranks of different hosts at ``inter_host_rate``;
``host_link_rate`` joins an accelerator to its host's memory.
"""

from __future__ import annotations

import msgspec

from shardwright.core.cluster import Constant, Device
from shardwright.core.timeline import PHASES

GIB = 2**30
GB = 10**9
TODAY = "2026-11-21"
COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
_BENCH = "micro-benchmark, 2-core x86-64 host, torch 2.13, 1 thread"
_GLOO = "micro-benchmark, gloo, 2 ranks of that host"


class Preset(msgspec.Struct, frozen=True):
    """A machine by name, with the capacities of one rank and where they are from.

    ``host`` is how many ranks a host has; 0 where all ranks share one, however many they are.
    ``clock`` are what reaches how much of them in a step; an accelerator's are known.
    """

    world_size: int
    compute_device: Device
    hbm_cap: int
    ddr_cap: int
    ssd_cap: int
    capacities: str
    constants: dict[str, Constant]
    host: int = 0
    clock: dict[str, Constant] = {}


class DataSheet(msgspec.Struct, frozen=True):
    """A data sheet by name and date."""

    name: str
    date: str

    def says(self, value: float, unit: str, what: str = "") -> Constant:
        """A constant read from it, or worked out from it as ``what`` says."""
        return Constant(value, unit, f"{self.name}, {what}" if what else self.name, self.date)


def assumed(value: float, unit: str, what: str) -> Constant:
    """A constant that no source backs."""
    return Constant(value, unit, f"assumed: {what}", TODAY)


def _links(source: str, date: str, **measured: tuple[float, float]) -> dict[str, Constant]:
    """Latency and rate of each collective."""
    found = {}
    for name, (latency, rate) in measured.items():
        found[f"{name}_latency"] = Constant(latency, "s", source, date)
        found[f"{name}_rate"] = Constant(rate, "B/s", source, date)
    return found


# Buffers up to here are memory that an earlier one left behind.
_KEPT_BY_MALLOC = Constant(
    float(32 * 2**20), "B", "glibc, mallopt(3): M_MMAP_THRESHOLD at its highest", TODAY
)

# What no data sheet says about any machine.
_ANYWHERE = {
    "parse_cost": Constant(11e-6, "s", _BENCH + ", one click-log row of text", TODAY),
    "sgd_passes": assumed(3.0, "touches", "read weight and gradient, write"),
    "rowwise_adagrad_passes": assumed(5.0, "touches", "one fused kernel with its sort"),
    "adagrad_passes": assumed(7.0, "touches", "row-wise Adagrad, and read and write one state"),
    "adam_passes": assumed(9.0, "touches", "row-wise Adagrad, and read and write two states"),
    "cache_load_factor": assumed(0.2, "share", "a fifth of a table's rows are cached"),
    "cache_miss_rate": assumed(1.0, "share", "ids spread evenly over the rows, none cached"),
}

# What no data sheet says about an accelerator.
_ACCELERATOR = _ANYWHERE | {
    "row_latency": assumed(0.0, "s", "hidden by parallel access"),
    "operation_latency": assumed(5e-6, "s", "one kernel launch"),
    "index_cost": assumed(0.1e-9, "s", "one elementwise kernel"),
    "sort_cost": assumed(1e-9, "s", "device radix sort"),
    "inter_host_latency": assumed(15e-6, "s", "one round through the network"),
    "ssd_rate": assumed(3e9, "B/s", "scattered reads from one NVMe drive per rank"),
    "fresh_memory_bytes": assumed(float(2**60), "B", "torch's allocator keeps every buffer"),
    "overlap": assumed(
        0.8, "share", "collectives have a stream of their own, and some of the cores"
    ),
}


Products = dict[str, Constant]


def _accelerator(
    compute: Constant,
    products: Products,
    memory: Constant,
    link: Constant,
    network: Constant,
    bus: Constant,
    ddr: Constant,
) -> dict[str, Constant]:
    """The constants of one accelerator of a server. ``compute`` is the rate of products in fp32,
    ``products`` are those of other dtypes, without sparsity."""
    constants = _ACCELERATOR | {
        "compute_rate": compute,
        **{f"{dtype}_compute_rate": rate for dtype, rate in products.items()},
        "memory_rate": memory,
        "fresh_memory_rate": assumed(
            memory.value, "B/s", "memory is kept and reused: as memory_rate"
        ),
        "inter_host_rate": network,
        "host_link_rate": bus,
        "ddr_rate": ddr,
    }
    for name in COLLECTIVES:
        constants[f"{name}_latency"] = assumed(15e-6, "s", "one collective on one host")
        constants[f"{name}_rate"] = link
    return constants


_V100 = DataSheet("NVIDIA V100 SXM2 32GB data sheet", "2020-01")
_DGX1 = DataSheet("NVIDIA DGX-1 with V100 data sheet", "2019-03")
_A100 = DataSheet("NVIDIA A100 80GB SXM data sheet", "2021-06")
_DGX_A100 = DataSheet("NVIDIA DGX A100 640GB data sheet", "2021-06")
_H100 = DataSheet("NVIDIA H100 SXM data sheet", "2023-03")
_DGX_H100 = DataSheet("NVIDIA DGX H100 data sheet", "2023-03")
_H200 = DataSheet("NVIDIA H200 SXM data sheet", "2023-11")
_DGX_H200 = DataSheet("NVIDIA DGX H200 data sheet", "2024-03")
_B200 = DataSheet("NVIDIA HGX B200 data sheet", "2024-11")
_DGX_B200 = DataSheet("NVIDIA DGX B200 data sheet", "2024-11")
_MI300X = DataSheet("AMD Instinct MI300X data sheet", "2023-12")
_EPYC = DataSheet("AMD EPYC 9654 data sheet", "2022-11")

_A100_40 = DataSheet("NVIDIA A100 40GB SXM data sheet", "2020-05")
_H100_PCIE = DataSheet("NVIDIA H100 PCIe data sheet", "2023-03")
_H100_NVL = DataSheet("NVIDIA H100 NVL data sheet", "2024-03")
_GB200 = DataSheet("NVIDIA GB200 NVL72 data sheet", "2024-10")
_L40S = DataSheet("NVIDIA L40S data sheet", "2023-08")
_ADA = DataSheet("NVIDIA Ada GPU architecture, GeForce RTX 4090", "2022-09")
_BLACKWELL = DataSheet("NVIDIA RTX Blackwell GPU architecture, GeForce RTX 5090", "2025-01")

_PCIE_4 = "PCIe 4 x16 per direction"
_NVLINK = "NVLink per direction, half of {}"
# What a data sheet says of products: without sparsity, with it, or with it of eight devices.
_DENSE = "{dtype}, dense"
_SUMMED = "{dtype}, dense, summed in fp32"
_SPARSE = "dense, half of the {sparse:,.0f} TFLOP/s with sparsity, {dtype}"
_QUARTER = "dense, a quarter of the {two:,.0f} PFLOP/s of two with sparsity, {dtype}"
_EIGHTH = "dense, a sixteenth of the {eight:,.0f} PFLOP/s of eight with sparsity, {dtype}"


def _products(sheet: DataSheet, words: str, half: float, tf32: float, fp8: float = 0.0) -> Products:
    """FLOP/s of products by dtype; in ``half`` the bits of fp32 both formats go as fast."""
    rates = {"bf16": half, "fp16": half, "tf32": tf32, "fp8": fp8}
    return {
        dtype: sheet.says(
            rate,
            "FLOP/s",
            words.format(dtype=dtype, sparse=2e-12 * rate, two=4e-15 * rate, eight=16e-15 * rate),
        )
        for dtype, rate in rates.items()
        if rate
    }


V100 = _accelerator(
    compute=_V100.says(15.7e12, "FLOP/s", "fp32"),
    products={"fp16": _V100.says(125e12, "FLOP/s", "fp16 on tensor cores")},
    memory=_V100.says(900e9, "B/s"),
    link=_V100.says(150e9, "B/s", _NVLINK.format("300 GB/s")),
    network=_DGX1.says(6.25e9, "B/s", "four 100 Gb/s ports of eight GPUs"),
    bus=_V100.says(16e9, "B/s", "PCIe 3 x16 per direction"),
    ddr=assumed(17e9, "B/s", "an eighth of two sockets of four channels of DDR4-2133"),
)
A100 = _accelerator(
    compute=_A100.says(19.5e12, "FLOP/s", "fp32"),
    products=_products(_A100, _DENSE, 312e12, 156e12),
    memory=_A100.says(2.039e12, "B/s"),
    link=_A100.says(300e9, "B/s", _NVLINK.format("600 GB/s")),
    network=_DGX_A100.says(25e9, "B/s", "one 200 Gb/s port per GPU"),
    bus=_A100.says(32e9, "B/s", "PCIe 4 x16 per direction"),
    ddr=assumed(51.2e9, "B/s", "an eighth of two sockets of eight channels of DDR4-3200"),
)
H100 = _accelerator(
    compute=_H100.says(67e12, "FLOP/s", "fp32"),
    products=_products(_H100, _SPARSE, 989.5e12, 494.5e12, 1979e12),
    memory=_H100.says(3.35e12, "B/s"),
    link=_H100.says(450e9, "B/s", _NVLINK.format("900 GB/s")),
    network=_DGX_H100.says(50e9, "B/s", "one 400 Gb/s port per GPU"),
    bus=_H100.says(64e9, "B/s", "PCIe 5 x16 per direction"),
    ddr=assumed(76.8e9, "B/s", "an eighth of two sockets of eight channels of DDR5-4800"),
)
H200 = _accelerator(
    compute=_H200.says(67e12, "FLOP/s", "fp32"),
    products=_products(_H200, _SPARSE, 989.5e12, 494.5e12, 1979e12),
    memory=_H200.says(4.8e12, "B/s"),
    link=_H200.says(450e9, "B/s", _NVLINK.format("900 GB/s")),
    network=_DGX_H200.says(50e9, "B/s", "one 400 Gb/s port per GPU"),
    bus=_H200.says(64e9, "B/s", "PCIe 5 x16 per direction"),
    ddr=assumed(76.8e9, "B/s", "an eighth of two sockets of eight channels of DDR5-4800"),
)
B200 = _accelerator(
    compute=_B200.says(75e12, "FLOP/s", "an eighth of 600 TFLOP/s, fp32"),
    products=_products(_B200, _EIGHTH, 2.25e15, 1.125e15, 4.5e15),
    memory=_B200.says(8e12, "B/s", "the figure for one GPU"),
    link=_B200.says(900e9, "B/s", _NVLINK.format("1.8 TB/s")),
    network=_DGX_B200.says(50e9, "B/s", "one 400 Gb/s port per GPU"),
    bus=assumed(64e9, "B/s", "PCIe 5 x16 per direction, as the server's processors have it"),
    ddr=assumed(89.6e9, "B/s", "an eighth of two sockets of eight channels of DDR5-5600"),
)
A100_40 = _accelerator(
    compute=_A100_40.says(19.5e12, "FLOP/s", "fp32"),
    products=_products(_A100_40, _DENSE, 312e12, 156e12),
    memory=_A100_40.says(1.555e12, "B/s"),
    link=_A100_40.says(300e9, "B/s", _NVLINK.format("600 GB/s")),
    network=assumed(25e9, "B/s", "one 200 Gb/s port per GPU"),
    bus=_A100_40.says(32e9, "B/s", "PCIe 4 x16 per direction"),
    ddr=assumed(51.2e9, "B/s", "an eighth of two sockets of eight channels of DDR4-3200"),
)


def _h100_by_pcie(
    sheet: DataSheet, fp32: float, products: tuple[float, float, float], memory: float
) -> dict[str, Constant]:
    """Cards of one host that meet over PCIe."""
    pcie = "PCIe 5 x16 per direction"
    return _accelerator(
        compute=sheet.says(fp32, "FLOP/s", "fp32"),
        products=_products(sheet, _SPARSE, *products),
        memory=sheet.says(memory, "B/s"),
        link=sheet.says(64e9, "B/s", f"{pcie}; bridges join pairs only"),
        network=assumed(25e9, "B/s", "one 200 Gb/s port per GPU"),
        bus=sheet.says(64e9, "B/s", pcie),
        ddr=assumed(76.8e9, "B/s", "an eighth of two sockets of eight channels of DDR5-4800"),
    )


H100_PCIE = _h100_by_pcie(_H100_PCIE, 51e12, (756.5e12, 378e12, 1513e12), 2e12)
H100_NVL = _h100_by_pcie(_H100_NVL, 60e12, (835.5e12, 417.5e12, 1670.5e12), 3.9e12)
GB200 = _accelerator(
    compute=_GB200.says(80e12, "FLOP/s", "half of the 160 TFLOP/s of two, fp32"),
    products=_products(_GB200, _QUARTER, 2.5e15, 1.25e15, 5e15),
    memory=_GB200.says(8e12, "B/s", "half of the 16 TB/s of two"),
    link=_GB200.says(900e9, "B/s", _NVLINK.format("1.8 TB/s")),
    network=assumed(50e9, "B/s", "one 400 Gb/s port per GPU"),
    bus=_GB200.says(225e9, "B/s", "NVLink-C2C per direction, a quarter of 900 GB/s for two"),
    ddr=_GB200.says(256e9, "B/s", "half of the 512 GB/s of a Grace"),
)
L40S = _accelerator(
    compute=_L40S.says(91.6e12, "FLOP/s", "fp32"),
    products=_products(_L40S, _DENSE, 362.05e12, 183e12, 733e12),
    memory=_L40S.says(864e9, "B/s"),
    link=_L40S.says(32e9, "B/s", _PCIE_4),
    network=assumed(12.5e9, "B/s", "one 100 Gb/s port per GPU"),
    bus=_L40S.says(32e9, "B/s", _PCIE_4),
    ddr=assumed(51.2e9, "B/s", "an eighth of two sockets of eight channels of DDR4-3200"),
)
# With sums in fp16 cards for games are twice as fast; training sums in fp32.
RTX_4090 = _accelerator(
    compute=_ADA.says(82.6e12, "FLOP/s", "fp32"),
    products=_products(_ADA, _SUMMED, 165.2e12, 82.6e12, 330.3e12),
    memory=_ADA.says(1008e9, "B/s"),
    link=_ADA.says(32e9, "B/s", _PCIE_4),
    network=assumed(1.25e9, "B/s", "one 10 Gb/s port per GPU"),
    bus=_ADA.says(32e9, "B/s", _PCIE_4),
    ddr=assumed(17e9, "B/s", "a fifth of two channels of DDR5-5600"),
)
RTX_5090 = _accelerator(
    compute=_BLACKWELL.says(104.8e12, "FLOP/s", "fp32"),
    products=_products(_BLACKWELL, _SUMMED, 209.5e12, 104.8e12, 419e12),
    memory=_BLACKWELL.says(1792e9, "B/s"),
    link=_BLACKWELL.says(64e9, "B/s", "PCIe 5 x16 per direction"),
    network=assumed(1.25e9, "B/s", "one 10 Gb/s port per GPU"),
    bus=_BLACKWELL.says(64e9, "B/s", "PCIe 5 x16 per direction"),
    ddr=assumed(17e9, "B/s", "a fifth of two channels of DDR5-5600"),
)
MI300X = _accelerator(
    compute=_MI300X.says(163.4e12, "FLOP/s", "fp32"),
    products=_products(_MI300X, _DENSE, 1307.4e12, 653.7e12, 2614.9e12),
    memory=_MI300X.says(5.3e12, "B/s"),
    link=_MI300X.says(448e9, "B/s", "seven Infinity Fabric links, half of 128 GB/s each"),
    network=assumed(50e9, "B/s", "one 400 Gb/s port per accelerator"),
    bus=_MI300X.says(64e9, "B/s", "PCIe 5 x16 per direction"),
    ddr=assumed(76.8e9, "B/s", "an eighth of two sockets of eight channels of DDR5-4800"),
)

LOCAL = _ANYWHERE | {
    "fresh_memory_bytes": _KEPT_BY_MALLOC,
    "compute_rate": Constant(60e9, "FLOP/s", _BENCH + ", small fp32 GEMMs", TODAY),
    "memory_rate": Constant(10e9, "B/s", _BENCH + ", half of the host's 25 GB/s", TODAY),
    "fresh_memory_rate": Constant(
        2.4e9, "B/s", _BENCH + ", new 40 MiB written once by each of 2 ranks", TODAY
    ),
    "overlap": Constant(
        0.1, "share", _GLOO + ", 1 and 8 MiB beside matrix products: 0 to 0.25", TODAY
    ),
    "row_latency": Constant(8e-9, "s", _BENCH + ", one random row of 64 B", TODAY),
    "operation_latency": Constant(8e-6, "s", _BENCH + ", one eager operation", TODAY),
    "index_cost": Constant(10e-9, "s", _BENCH + ", address one id", TODAY),
    "sort_cost": Constant(50e-9, "s", _BENCH + ", sort one id by owner and undo it", TODAY),
    **_links(
        _GLOO,
        TODAY,
        all_to_all=(280e-6, 2.5e9),
        all_gather=(350e-6, 1.2e9),
        reduce_scatter=(530e-6, 0.45e9),
        all_reduce=(550e-6, 2.5e9),
    ),
    "inter_host_rate": assumed(125e6, "B/s", "1 Gb/s Ethernet"),
    "inter_host_latency": assumed(200e-6, "s", "one round through Ethernet"),
    "host_link_rate": assumed(10e9, "B/s", "one memory, as memory_rate"),
    "ddr_rate": assumed(10e9, "B/s", "one memory, as memory_rate"),
    "ssd_rate": assumed(0.5e9, "B/s", "scattered reads from half of one drive"),
    "sgd_passes": Constant(3.0, "touches", _BENCH + ", scatter of one row", TODAY),
    "rowwise_adagrad_passes": Constant(
        12.0, "touches", _BENCH + ", sort, sum and write one row", TODAY
    ),
    "adagrad_passes": assumed(14.0, "touches", "row-wise Adagrad, and read and write one state"),
    "adam_passes": assumed(16.0, "touches", "row-wise Adagrad, and read and write two states"),
}

# What only a calibration for a job tells, with its unit: how fast operators without products move
# bytes, the share of what ranks compute by which the slowest is later than the others, and seconds
# of each phase of a step that are the same whatever the batch.
OF_A_JOB = {
    "elementwise_rate": "B/s",
    "slowest_share": "share",
    **{f"{phase}_latency": "s" for phase in PHASES},
}

CPU_HOST = _ANYWHERE | {
    "fresh_memory_bytes": _KEPT_BY_MALLOC,
    "compute_rate": _EPYC.says(7.37e12, "FLOP/s", "96 cores at 2.4 GHz, 32 fp32 each (assumed)"),
    "memory_rate": _EPYC.says(460.8e9, "B/s", "twelve channels of DDR5-4800"),
    "row_latency": assumed(0.2e-9, "s", "100 ns of DRAM, 500 reads at a time"),
    "operation_latency": assumed(8e-6, "s", "one eager operation"),
    "index_cost": assumed(0.5e-9, "s", "one elementwise operation on all cores"),
    "sort_cost": assumed(5e-9, "s", "sort one id by owner on all cores and undo it"),
    **_links(
        "assumed: shared memory of two sockets",
        TODAY,
        all_to_all=(50e-6, 20e9),
        all_gather=(50e-6, 20e9),
        reduce_scatter=(50e-6, 10e9),
        all_reduce=(50e-6, 20e9),
    ),
    "inter_host_rate": assumed(6.25e9, "B/s", "one 100 Gb/s port of two sockets"),
    "inter_host_latency": assumed(30e-6, "s", "one round through the network"),
    "host_link_rate": _EPYC.says(460.8e9, "B/s", "one memory, as memory_rate"),
    "ddr_rate": _EPYC.says(460.8e9, "B/s", "twelve channels of DDR5-4800"),
    "fresh_memory_rate": assumed(20e9, "B/s", "first touch of 4 KiB pages by many cores"),
    "overlap": assumed(0.7, "share", "collectives have cores of their own, memory is shared"),
    "ssd_rate": assumed(3e9, "B/s", "scattered reads from one NVMe drive per socket"),
    "rowwise_adagrad_passes": assumed(12.0, "touches", "as measured on one core"),
    "adagrad_passes": assumed(14.0, "touches", "row-wise Adagrad, and read and write one state"),
    "adam_passes": assumed(16.0, "touches", "row-wise Adagrad, and read and write two states"),
}

_MODEL = DataSheet(
    "additive cost of sharding studies: fp32 rows through memory and a network", TODAY
)

ADDITIVE = {
    "lookup_rate": _MODEL.says(900e9, "B/s", "memory of one V100"),
    "exchange_rate": _MODEL.says(10e9, "B/s", "network of one rank"),
    "passes": _MODEL.says(3.0, "touches", "forward, and backward as two"),
    "directions": _MODEL.says(2.0, "exchanges", "forward and backward"),
}

# What a step's seconds rest on beside data sheets (:mod:`shardwright.cost.clock`): a unit, and what
# fits steps that others published on A100, on H100 and H200 (dense models in 16 bits), and on both,
# for a machine of which nobody published enough: `validation/published/fit.py` fits them, and says
# what they are worth on rows left out. Each says something of the machine, whatever runs on it.
_FITTED: dict[str, tuple[str, float, float, float]] = {
    "product_efficiency": ("share", 0.724, 0.59, 0.688),  # of the peak that large products reach
    "product_half_size": ("elements", 61.3, 146.0, 34.8),  # with a side of that, half of it
    "attention_efficiency": ("share", 0.354, 0.184, 0.322),  # of the peak, heads of 128
    "memory_efficiency": ("share", 0.937, 0.894, 0.934),  # of the data sheet's rate
    "launch_latency": ("s", 3.86e-05, 3.72e-05, 3.83e-05),  # of a kernel, on the host
    "interleaves": ("share", 0.307, 0.328, 0.27),  # of launches or kernels, the shorter
    "link_efficiency": ("share", 1.0, 1.0, 1.0),  # of the rate inside a host
    "network_efficiency": ("share", 0.784, 0.851, 0.789),  # of the rate across hosts
    "replica_efficiency": ("share", 0.468, 0.453, 0.614),  # of it, for gradients of replicas
    "collective_latency": ("s", 6.99e-05, 3.13e-05, 0.000118),
    "hides": ("share", 0.8, 0.8, 0.8),  # of compute, beside which collectives may travel
    "slows": ("share", 1.0, 0.345, 1.0),  # of hidden collectives' seconds, lost to compute
    "step_latency": ("s", 0.00605, 0.00696, 0.00587),  # of a step, that nothing else explains
    "range": ("share", 0.145, 0.201, 0.465),  # by which most runs are faster or slower
}


def _clock(column: int, source: str) -> dict[str, Constant]:
    return {
        name: Constant(values[column], unit, source, "2026-11-28")
        for name, (unit, *values) in _FITTED.items()
    }


_ON_A100 = _clock(0, "fitted to 495 published runs on A100, of 4 sources")
_ON_H100 = _clock(1, "fitted to 46 published runs on H100 and H200, of 3 sources")
_ANYWHERE_ELSE = _clock(2, "not fitted to this device: what fits A100 and H100")


def _server(
    sizes: tuple[int, int, int],
    source: str,
    constants: dict[str, Constant],
    clock: dict[str, Constant],
    ranks: int = 8,
) -> Preset:
    """A host of as many accelerators; ``sizes`` are GB of memory, GiB of the host's and GB of its
    disks for each."""
    hbm, ddr, ssd = sizes
    held = hbm * GB, ddr * GIB, ssd * GB
    return Preset(ranks, "cuda", *held, source, constants, ranks, clock)


# Machines, described by the constants that the cost profile "cluster" reads.
HARDWARE = {
    "local": Preset(2, "cpu", 0, 2 * GIB, 0, "assumed", LOCAL),
    "v100-8": _server((32, 64, 960), f"{_V100.name}, {_DGX1.name}", V100, _ANYWHERE_ELSE),
    "a100-8": _server((80, 256, 3840), f"{_A100.name}, {_DGX_A100.name}", A100, _ON_A100),
    "h100-8": _server((80, 256, 3840), f"{_H100.name}, {_DGX_H100.name}", H100, _ON_H100),
    "h200-8": _server((141, 256, 3840), f"{_H200.name}, {_DGX_H200.name}", H200, _ON_H100),
    "b200-8": _server((180, 256, 3840), f"{_B200.name}, {_DGX_B200.name}", B200, _ANYWHERE_ELSE),
    "mi300x-8": _server((192, 256, 3840), f"{_MI300X.name}; host assumed", MI300X, _ANYWHERE_ELSE),
    "a100-40-8": _server((40, 128, 1920), f"{_A100_40.name}; host assumed", A100_40, _ON_A100),
    "h100-pcie-8": _server(
        (80, 128, 1920), f"{_H100_PCIE.name}; host assumed", H100_PCIE, _ON_H100
    ),
    "h100-nvl-8": _server((94, 128, 1920), f"{_H100_NVL.name}; host assumed", H100_NVL, _ON_H100),
    # One host is what NVLink joins.
    "gb200-72": _server(
        (186, 223, 1920), f"{_GB200.name}; disks assumed", GB200, _ANYWHERE_ELSE, ranks=72
    ),
    "l40s-8": _server((48, 128, 960), f"{_L40S.name}; host assumed", L40S, _ANYWHERE_ELSE),
    "rtx4090-1": _server(
        (24, 64, 960), f"{_ADA.name}; host assumed", RTX_4090, _ANYWHERE_ELSE, ranks=1
    ),
    "rtx5090-1": _server(
        (32, 64, 960), f"{_BLACKWELL.name}; host assumed", RTX_5090, _ANYWHERE_ELSE, ranks=1
    ),
    "cpu-host": Preset(
        2, "cpu", 0, 768 * GIB, 3840 * GB, "assumed: twelve modules of 64 GiB", CPU_HOST, 2
    ),
}

# Cost profiles with constants of their own, and so with a preset of their own name.
MODELS = ("torchrec-1.9", "additive")

PRESETS = HARDWARE | {
    "additive": Preset(4, "cuda", 4 * GIB, 0, 0, "the 4-GPU tasks of sharding studies", ADDITIVE),
}
