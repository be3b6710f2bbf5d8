"""TorchRec's planner on one problem, as JSON. Needs torch and torchrec, nothing of ours.

    python benchmarks/planner_torchrec.py plan PROBLEM.json
    python benchmarks/planner_torchrec.py rate PROBLEM.json SHARDS.json
    python benchmarks/planner_torchrec.py many PROBLEMS.json

``plan`` runs its EmbeddingShardingPlanner with the default proposers; ``rate`` prices shards that
another planner placed by TorchRec's own estimators. ``many`` plans a list of problems, one line of
JSON each, without a price where TorchRec finds no plan.
"""

from __future__ import annotations

import collections
import json
import logging
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.planner import (  # noqa: E402
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator  # noqa: E402
from torchrec.distributed.planner.storage_reservations import (  # noqa: E402
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError, Shard  # noqa: E402
from torchrec.optim import RowWiseAdagrad  # noqa: E402


def model_of(problem: dict[str, Any]) -> torch.nn.Module:
    """All tables in one collection without data, weighted ones in another, each with row-wise
    Adagrad."""
    modules = torch.nn.ModuleDict()
    for weighted in (False, True):
        configs = [
            EmbeddingBagConfig(
                name=table["name"],
                num_embeddings=table["rows"],
                embedding_dim=table["dim"],
                feature_names=[f"f_{table['name']}"],
            )
            for table in problem["tables"]
            if table.get("weighted", False) is weighted
        ]
        if configs:
            bags = EmbeddingBagCollection(configs, weighted, torch.device("meta"))
            modules["weighted" if weighted else "ebc"] = bags
    for parameter in modules.parameters():
        parameter._optimizer_classes = [RowWiseAdagrad]
    return modules


def constraints_of(problem: dict[str, Any]) -> dict[str, ParameterConstraints]:
    """Ids per sample, and the kernels and types that are named; where the problem names no device,
    the kernels that keep weights in HBM."""
    usual = None if "device" in problem else ["dense", "fused"]
    return {
        table["name"]: ParameterConstraints(
            pooling_factors=[table["pooling"]],
            compute_kernels=table.get("kernels", usual),
            sharding_types=table.get("types"),
        )
        for table in problem["tables"]
    }


def topology_of(problem: dict[str, Any]) -> Topology:
    """The ranks of the problem with TorchRec's own bandwidths."""
    return Topology(
        problem["ranks"],
        problem.get("device", "cuda"),
        hbm_cap=problem["hbm"],
        ddr_cap=problem.get("ddr"),
        local_world_size=min(problem["host"], problem["ranks"]),
    )


def figures(options: list[Any], ranks: int) -> dict[str, Any]:
    """What a placed plan costs by TorchRec's prices."""
    milliseconds, hbm = [0.0] * ranks, [0] * ranks
    for option in options:
        for shard in option.shards:
            milliseconds[shard.rank] += shard.perf.total
            hbm[shard.rank] += shard.storage.hbm
    return {
        "max_rank_ms": max(milliseconds),
        "mean_rank_ms": sum(milliseconds) / ranks,
        "max_hbm_bytes": max(hbm),
        "types": collections.Counter(option.sharding_type for option in options),
    }


def plan(problem: dict[str, Any]) -> dict[str, Any]:
    """Seconds of ``planner.plan``, which enumerates too, and the plan's price."""
    planner = EmbeddingShardingPlanner(
        topology=topology_of(problem),
        batch_size=problem["batch"],
        storage_reservation=FixedPercentageStorageReservation(problem["reserved"]),
        constraints=constraints_of(problem),
        stats=[],
        debug=False,
        timeout_seconds=problem["seconds"],
    )
    model = model_of(problem)
    started, before = time.perf_counter(), time.process_time()
    planner.plan(model, [EmbeddingBagCollectionSharder()])
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - before,
        "proposals": planner._num_proposals,
        "feasible": planner._num_plans,
        **figures(planner.get_selected_options(), problem["ranks"]),
    }


def many(problems: list[dict[str, Any]]) -> None:
    """A line for each problem: seconds of the processor, and milliseconds where there is a plan."""
    for problem in problems:
        begun = time.process_time()
        try:
            found = {"torchrec_ms": plan(problem)["max_rank_ms"]}
        except PlannerError:
            found = {}
        print(json.dumps({**found, "torchrec_cpu_seconds": time.process_time() - begun}))


def rate(problem: dict[str, Any], placed: dict[str, Any]) -> dict[str, Any]:
    """The price of ``placed``: type, kernel, and row, column, rows, columns, rank of each shard."""
    topology, constraints = topology_of(problem), constraints_of(problem)
    named = {
        name: ParameterConstraints(
            pooling_factors=constraints[name].pooling_factors,
            sharding_types=[found["type"]],
            compute_kernels=[found["kernel"]],
        )
        for name, found in placed.items()
    }
    enumerator = EmbeddingEnumerator(topology, problem["batch"], named)
    options = enumerator.enumerate(model_of(problem), [EmbeddingBagCollectionSharder()])
    for option in options:
        shards = placed[option.name]["shards"]
        option.shards = [
            Shard([rows, columns], [row, column]) for row, column, rows, columns, _ in shards
        ]
        for shard, (*_, rank) in zip(option.shards, shards, strict=True):
            shard.rank = rank
    enumerator.populate_estimates(options)
    return figures(options, problem["ranks"])


def main() -> None:
    """Plan or rate, and print the figures."""
    logging.disable(logging.CRITICAL)
    ready = time.perf_counter()
    problem = json.loads(Path(sys.argv[2]).read_text())
    if sys.argv[1] == "many":
        many(problem)
        return
    if sys.argv[1] == "plan":
        found = plan(problem)
    else:
        found = rate(problem, json.loads(Path(sys.argv[3]).read_text()))
    from importlib.metadata import version

    found |= {
        "ready": ready,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {"torch": torch.__version__, "torchrec": version("torchrec")},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
