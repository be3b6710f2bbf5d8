"""Random jobs of one to three tables on up to six ranks, of every kind that a bound depends on."""

from __future__ import annotations

import random
from typing import Any, get_args

from shardwright.core.sharding import ShardingType
from shardwright.job.job import Job, parse_job

TYPES: tuple[str, ...] = get_args(ShardingType)
KERNELS = ("dense", "fused", "fused_uvm", "fused_uvm_caching", "key_value")
PRESETS = {"cuda": ("h100-8", "v100-8", "a100-8"), "cpu": ("cpu-host", "local")}
RATES = ("hbm_mem_bw", "ddr_mem_bw", "hbm_to_ddr_mem_bw", "intra_host_bw", "inter_host_bw")
PIPELINES = ("none", "train_sparse_dist", "train_prefetch_sparse_dist")


def small_job(seed: int, search: str = "bounded") -> Job:
    """A job drawn from ``seed``.

    :raises InputError: what was drawn does not go together.
    """
    draw = random.Random(seed)
    profile = draw.choice(["cluster", "torchrec-1.9", "torchrec-1.9", "additive"])
    device = "cpu" if draw.random() < 0.15 and profile != "additive" else "cuda"
    count = draw.choice([1, 1, 2, 2, 3])
    tables = [{"name": f"t{i}"} | _table(draw, profile, device) for i in range(count)]
    cluster = _cluster(draw, profile, device, tables)
    return parse_job(
        {
            "tables": tables,
            "cluster": cluster,
            "batch": {"size": draw.choice([1, 32, 256])},
            "planner": _planner(draw, profile, device, count, cluster["world_size"])
            | {"search": search},
        }
    )


def _table(draw: random.Random, profile: str, device: str) -> dict[str, Any]:
    dim = draw.choice([4, 6, 8, 16, 16, 24, 32, 64, 96, 100, 128, 256, 2048])
    table: dict[str, Any] = {
        "rows": draw.choice([1, 3]) if draw.random() < 0.2 else round(10 ** draw.uniform(1, 7)),
        "dim": dim,
        "pooling_factors": [draw.choice([0.0, 0.3, 1.0, 5.0, 20.0]) for _ in range(1 + (dim > 99))],
        "min_partition": max(4, dim // draw.choice([1, 2, 2, 3, 4, 8, 32])),
        "pooled": draw.random() < 0.8,
        "optimizer": draw.choice(["none", "sgd", "adam", "adagrad", "rowwise_adagrad"]),
        "dtype": draw.choice(["fp32", "fp32", "fp32", "fp16"]),
    }
    if draw.random() < 0.5:
        known = TYPES if table["pooled"] else TYPES[:4]
        known = ("table_wise", "column_wise") if profile == "additive" else known
        table["sharding_types"] = draw.sample(known, draw.randint(1, min(3, len(known))))
    if draw.random() < 0.3 and profile != "additive":
        kernels = KERNELS[:2] if device == "cpu" else KERNELS
        table["compute_kernels"] = draw.sample(kernels, draw.randint(1, len(kernels)))
    if draw.random() < 0.3 and device == "cuda":
        table["cache"] = {
            "load_factor": draw.choice([0.0, 0.1, 0.5, 1.0]),
            "prefetch_pipeline": draw.random() < 0.5,
            "stats": [draw.choice([10.0, 1e4]), 0.5, draw.choice([0.0, 0.2, 1.0])],
        }
    return table


def _cluster(
    draw: random.Random, profile: str, device: str, tables: list[dict[str, Any]]
) -> dict[str, Any]:
    """One to three hosts; memory from too little to plenty."""
    local, hosts = draw.choice([(1, 1), (2, 1), (3, 1), (4, 1), (1, 3), (2, 2), (2, 3), (3, 2)])
    ranks = local * hosts
    cluster: dict[str, Any] = {
        "compute_device": device,
        "world_size": ranks,
        "local_world_size": local,
    }
    if profile == "cluster":
        cluster["preset"] = draw.choice(PRESETS[device])
    sizes = [table["rows"] * table["dim"] * 4 for table in tables]
    for tier, share in (("ddr", 1.0 if device == "cpu" else 0.5), ("hbm", 1.0), ("ssd", 0.3)):
        if draw.random() < share and (device == "cuda" or tier == "ddr"):
            size = draw.choice([sum(sizes) / ranks, max(sizes), max(sizes) / ranks, 2**36])
            factor = draw.choice([0.5, 0.9, 1.0, 1.01, 1.1, 1.5, 2.5])
            cluster[f"{tier}_cap"] = max(int(size * factor), 1) + draw.choice([0, 1000, 100_000])
    if profile == "torchrec-1.9" and draw.random() < 0.3:
        cluster |= {rate: 10 ** draw.uniform(3, 9) for rate in RATES if draw.random() < 0.5}
    if draw.random() < 0.1:
        cluster["pod_size"] = hosts
    return cluster


def _planner(
    draw: random.Random, profile: str, device: str, tables: int, ranks: int
) -> dict[str, Any]:
    reserved = draw.choice([("none", {}), ("percentage", {"percentage": 0.1}), ("absolute", {})])
    planner: dict[str, Any] = {
        "constants": profile,
        "reservation": {"kind": reserved[0], "nbytes": 1000} | reserved[1],
    }
    if device == "cuda" and profile != "additive" and draw.random() < 0.3:
        planner["estimator"] = {
            "pipeline_type": draw.choice(PIPELINES),
            "is_inference": draw.random() < 0.5,
            "cache_load_factor": draw.choice([0.1, 0.9]),
        }
    names = [f"t{i}" for i in range(tables)]
    rules: dict[str, Any] = {}
    if draw.random() < 0.2:
        rules["ranks"] = {draw.choice(names): draw.sample(range(ranks), draw.randint(1, ranks))}
    if tables > 1 and draw.random() < 0.25:
        rules[draw.choice(["apart", "together"])] = [draw.sample(names, draw.randint(2, tables))]
    return planner | {"constraints": rules}
