"""Named constants by hardware, each with its value, unit, source and date.

A rate named ``*_rate`` is per rank. A job may start from a preset and replace capacities; a
calibrated cluster replaces the constants themselves.
"""

from __future__ import annotations

import msgspec

from shardwright.core.cluster import Cluster, Constant, Device
from shardwright.core.errors import InputError, expected
from shardwright.core.job import ClusterSection
from shardwright.core.units import parse_bytes

GIB = 2**30
_BENCH = "micro-benchmark, 2-core x86-64 host, torch 2.13, 1 thread"
_GLOO = "micro-benchmark, gloo, 2 ranks of that host"
_H100 = "NVIDIA H100 SXM data sheet"


def _constant(value: float, unit: str, source: str, date: str) -> Constant:
    return Constant(value, unit, source, date)


def _links(source: str, date: str, **measured: tuple[float, float]) -> dict[str, Constant]:
    """Latency and rate of each collective."""
    found = {}
    for name, (latency, rate) in measured.items():
        found[f"{name}_latency"] = _constant(latency, "s", source, date)
        found[f"{name}_rate"] = _constant(rate, "B/s", source, date)
    return found


LOCAL = {
    "compute_rate": _constant(60e9, "FLOP/s", _BENCH + ", small fp32 GEMMs", "2026-11-21"),
    "memory_rate": _constant(10e9, "B/s", _BENCH + ", half of the host's 25 GB/s", "2026-11-21"),
    "row_latency": _constant(8e-9, "s", _BENCH + ", one random row of 64 B", "2026-11-21"),
    "operation_latency": _constant(8e-6, "s", _BENCH + ", one eager operation", "2026-11-21"),
    "index_cost": _constant(10e-9, "s", _BENCH + ", address one id", "2026-11-21"),
    "sort_cost": _constant(50e-9, "s", _BENCH + ", sort one id by owner and undo it", "2026-11-21"),
    "parse_cost": _constant(11e-6, "s", _BENCH + ", one click-log row of text", "2026-11-21"),
    **_links(
        _GLOO,
        "2026-11-21",
        all_to_all=(280e-6, 2.5e9),
        all_gather=(350e-6, 1.2e9),
        reduce_scatter=(530e-6, 0.45e9),
        all_reduce=(550e-6, 2.5e9),
    ),
    "sgd_passes": _constant(3.0, "touches", _BENCH + ", scatter of one row", "2026-11-21"),
    "rowwise_adagrad_passes": _constant(
        12.0, "touches", _BENCH + ", sort, sum and write one row", "2026-11-21"
    ),
}

H100 = {
    "compute_rate": _constant(67e12, "FLOP/s", _H100 + ", fp32", "2023-03"),
    "memory_rate": _constant(3.35e12, "B/s", _H100, "2023-03"),
    "row_latency": _constant(0.0, "s", "hidden by parallel access", "2023-03"),
    "operation_latency": _constant(5e-6, "s", "assumed: one kernel launch", "2026-11-21"),
    "index_cost": _constant(0.1e-9, "s", "assumed: one elementwise kernel", "2026-11-21"),
    "sort_cost": _constant(1e-9, "s", "assumed: device radix sort", "2026-11-21"),
    "parse_cost": _constant(11e-6, "s", _BENCH + ", one click-log row of text", "2026-11-21"),
    **_links(
        _H100 + ", NVLink per direction; latency assumed",
        "2023-03",
        all_to_all=(15e-6, 450e9),
        all_gather=(15e-6, 450e9),
        reduce_scatter=(15e-6, 450e9),
        all_reduce=(15e-6, 450e9),
    ),
    "sgd_passes": _constant(3.0, "touches", "read weight and gradient, write", "2026-11-21"),
    "rowwise_adagrad_passes": _constant(
        5.0, "touches", "assumed: one fused kernel with its sort", "2026-11-21"
    ),
}


class Preset(msgspec.Struct, frozen=True):
    """A machine by name, with the capacities of one rank."""

    world_size: int
    compute_device: Device
    hbm_cap: int
    ddr_cap: int
    constants: dict[str, Constant]


PRESETS = {
    "local": Preset(2, "cpu", 0, 2 * GIB, LOCAL),
    "h100-8": Preset(8, "cuda", 80 * 10**9, 128 * GIB, H100),
}


def cluster(section: ClusterSection) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster a job names, and what had to be assumed about it."""
    if section.preset not in PRESETS:
        raise InputError(
            expected("cluster.preset", f"one of {', '.join(PRESETS)}", f"'{section.preset}'")
        )
    preset = PRESETS[section.preset]
    device = section.compute_device or preset.compute_device
    world_size = section.world_size or preset.world_size
    local = section.local_world_size or world_size
    if world_size % local:
        raise InputError(
            expected("cluster.local_world_size", f"a divisor of {world_size}", f"{local}")
        )
    capacities = {
        name: getattr(preset, name)
        if getattr(section, name) is None
        else parse_bytes(getattr(section, name), f"cluster.{name}")
        for name in ("hbm_cap", "ddr_cap")
    }
    decisive = "ddr_cap" if device == "cpu" else "hbm_cap"
    assumptions = [
        f"hardware constants are the preset '{section.preset}'s, not measured on this machine"
    ]
    if getattr(section, decisive) is None:
        assumptions.append(
            f"cluster.{decisive} is the preset '{section.preset}'s: "
            f"{capacities[decisive]:,} B per rank"
        )
    found = Cluster(
        section.preset, world_size, local, device, **capacities, constants=preset.constants
    )
    if found.memory_per_rank == 0:
        raise InputError(
            expected(f"cluster.{decisive}", "the bytes a rank may fill", "0", "Set it in the job.")
        )
    return found, tuple(assumptions)
