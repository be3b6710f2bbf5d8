"""A whole step of a DLRM on our runtime beside TorchRec's, in the same processes.

    python benchmarks/whole_dlrm.py --output validation/cpu-2-cores/whole_dlrm.json

26 tables of 100,000 x 16 with one id in each bag, Zipf 1.05, batch 2,048 on each of two ranks; the
bottom is 13-512-256-64-16, the top 8-4-1 ("small") or 512-256-1 ("large"), all with SGD. Ours is
planned with every table table-wise or row-wise and run by ``sw.apply``; TorchRec's is its own DLRM
under DistributedModelParallel with the same types, its tables' optimizer fused, the dense part
under DDP. Contestants take turns step by step on the same batches, one thread each. Time is the CPU
time of a process: ranks share few cores. ``peak_bytes`` are the most that were alive at once in a
step beyond what is there between steps, as torch's allocator reports them, those inside of FBGEMM
among them; ``first_loss`` is of weights that are not the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sharded_embeddings import RATE, SHAPES, WARM, Case, batch
from torch import multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwright as sw
from shardwright.core.job import parse_job
from shardwright.core.plan import Plan
from shardwright.lab.recordings import plan
from shardwright.models.dlrm import DLRM
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters

DENSE = 13
BOTTOM = (512, 256, 64, 16)
TOPS = {"small": (8, 4, 1), "large": (512, 256, 1)}
RANKS = 2
SHAPE = SHAPES["A"]
# dense [B, D], ids [B, F], the same feature by feature with lengths of bags, labels [B]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float]


def planned(top: str, sharding: str, overlap: str, ranks: int = RANKS) -> Plan:
    """Ours, every table of one type and the dense part replicated."""
    tables = [
        {"name": f"t{i}", "rows": SHAPE.rows, "dim": SHAPE.dim, "sharding_types": [sharding]}
        for i in range(SHAPE.tables)
    ]
    job = {
        "model": {"dense_features": DENSE, "bottom": list(BOTTOM), "top": list(TOPS[top])},
        "tables": tables,
        "cluster": {"preset": "local", "world_size": ranks},
        "batch": {"size": SHAPE.batch},
        "planner": {"units": {"bottom": "replicate", "top": "replicate"}},
        "data": {"kind": "synthetic", "zipf": 1.05},
        "train": {"optimizer": "sgd", "learning_rate": RATE, "overlap": overlap},
    }
    return plan(parse_job(job))


def ours(made: Plan, mesh: DeviceMesh) -> Step:
    """A DLRM as ``shardwright train`` has it."""
    model = sw.apply(DLRM(made.job, device="meta"), made, mesh)
    optimizer = make_optimizer("sgd", optimizer_parameters(model, per_unit=True), RATE)

    def step(given: Batch) -> float:
        dense, ids, _, _, labels = given
        logits = model(dense, ids).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def theirs(top: str, sharding: str) -> Step:
    """TorchRec's DLRM, its tables where ours are."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        construct_module_sharding_plan,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan
    from torchrec.models import dlrm

    keys = [f"f{i}" for i in range(SHAPE.tables)]
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=SHAPE.rows,
                embedding_dim=SHAPE.dim,
                feature_names=[key],
            )
            for i, key in enumerate(keys)
        ],
        device=torch.device("cpu"),
    )
    model = dlrm.DLRM(collection, DENSE, list(BOTTOM), list(TOPS[top]), torch.device("cpu"))
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE}
    )
    fused = EmbeddingComputeKernel.FUSED.value
    cut = {
        "table_wise": lambda i: table_wise(rank=i % RANKS, compute_kernel=fused),
        "row_wise": lambda i: row_wise(compute_kernel=fused),
    }[sharding]
    path = "sparse_arch.embedding_bag_collection"
    chosen = construct_module_sharding_plan(
        collection,
        {f"t{i}": cut(i) for i in range(SHAPE.tables)},
        sharder=sharder,
        local_size=RANKS,
        world_size=RANKS,
        device_type="cpu",
    )
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({path: chosen}), sharders=[sharder]
    )
    dense_part = [p for n, p in sharded.named_parameters() if "embedding_bags" not in n]
    optimizer = torch.optim.SGD(dense_part, lr=RATE, foreach=True)

    def step(given: Batch) -> float:
        dense, _, values, lengths, labels = given
        features = KeyedJaggedTensor(keys, values, lengths=lengths)
        logits = sharded(dense, features).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def made_up(case: Case, random: np.random.Generator) -> Batch:
    """One rank's batch."""
    columns = [ids for ids, _ in batch(case, random).values()]
    ids, values = torch.stack(columns, 1), torch.cat(columns)
    dense = torch.from_numpy(random.standard_normal((SHAPE.batch, DENSE), dtype=np.float32))
    labels = torch.from_numpy(random.integers(0, 2, SHAPE.batch).astype(np.float32))
    return dense, ids, values, torch.ones_like(values), labels


def peak_bytes(step: Step, given: Batch) -> int:
    """The most bytes that were alive at once in a step beyond those at its beginning."""
    from torch.autograd import profiler

    with profiler.profile(profile_memory=True, use_kineto=True) as seen:
        step(given)
    events = [e for e in seen.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def work(rank: int, top: str, sharding: str, made: list[Plan], store: str, *rest: Any) -> None:
    """One rank: contestants take turns; CPU and wall seconds of every step."""
    steps, peer, results = rest
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(RANKS))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        timeout=timedelta(seconds=300),
        world_size=RANKS,
        rank=rank,
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    contestants = {"ours": ours(made[0], mesh), "overlap": ours(made[1], mesh)}
    if peer:
        contestants["torchrec"] = theirs(top, sharding)
    case, random = Case("A", sharding), np.random.default_rng(rank)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    found: dict[str, dict[str, float]] = {name: {} for name in contestants}
    for number in range(WARM + steps):
        given = made_up(case, random)
        for name, step in contestants.items():
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            loss = step(given)
            spent = time.process_time() - cpu, time.perf_counter() - wall
            found[name].setdefault("first_loss", round(loss, 4))
            if number >= WARM:
                taken[name].append(spent)
    for name, step in contestants.items():
        dist.barrier()
        found[name]["peak_bytes"] = peak_bytes(step, given)
        cpu_ms, wall_ms = (statistics.median(each) * 1e3 for each in zip(*taken[name], strict=True))
        found[name] |= {"cpu_ms": round(cpu_ms, 3), "wall_ms": round(wall_ms, 3)}
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def run(top: str, sharding: str, steps: int, peer: bool) -> dict[str, Any]:
    """What every contestant takes, and ours in parts of TorchRec's."""
    made = [planned(top, sharding, overlap) for overlap in ("none", "rows")]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        arguments = (top, sharding, made, store, steps, peer, results)
        multiprocessing.spawn(work, arguments, nprocs=RANKS)
    found = results.get()
    line: dict[str, Any] = {"top": top, "sharding": sharding, **found}
    for name in ("ours", "overlap") if peer else ():
        line[f"{name}_over_torchrec"] = {
            key: round(found[name][key] / found["torchrec"][key], 3)
            for key in ("cpu_ms", "wall_ms", "peak_bytes")
        }
    return line


def main() -> None:
    """Both tops and types, one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", choices=["", *TOPS])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    try:
        import torchrec

        peer, versions = True, {"torchrec": torchrec.__version__}
    except ImportError:
        peer, versions = False, {}
    lines = []
    for top in TOPS:
        for sharding in ("table_wise", "row_wise") if options.only in ("", top) else ():
            lines.append(run(top, sharding, options.steps, peer))
            print(json.dumps(lines[-1]), flush=True)
    if options.output:
        document = {"versions": {"torch": torch.__version__, **versions}, "cases": lines}
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
