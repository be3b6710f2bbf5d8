"""Contestants that take turns step by step in the same processes, TorchRec's tables among them.

Time is the CPU time of a process, for ranks share few cores; wall time stands beside it, medians of
both over steps, and of these over three runs. ``peak_bytes`` are the most that were alive at once
in a step beyond what is there between steps, ``kept_bytes`` what is there, tables and buckets of
gradients among it, as torch's allocator reports them, those inside of FBGEMM among them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Given = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # ids and offsets of features
Figures = dict[str, dict[str, float]]  # of contestants
RATE = 0.01
ZIPF = 1.05
WARM = 3
RUNS = 3  # in processes of their own, for what a step takes depends on where memory came to lie
SETTLED = 0.05  # seconds after which gloo's threads have let go of what was sent
KINDS = ("cpu_ms", "wall_ms", "peak_bytes", "kept_bytes")


@dataclass(frozen=True)
class Shape:
    """Tables of one size and what a rank's batch asks of each."""

    tables: int
    rows: int
    dim: int
    batch: int
    length: float  # ids in a bag, Poisson above 1

    def ids(self, law: str, random: np.random.Generator) -> Given:
        """What one rank asks of every feature."""
        found = {}
        for table in range(self.tables):
            lengths = np.ones(self.batch, dtype=np.int64)
            if self.length > 1:
                lengths = random.poisson(self.length, self.batch)
            offsets = np.concatenate([[0], lengths.cumsum()])
            draw = random.random(offsets[-1])
            if law == "zipf":  # inverse of the law's distribution, then ids without an order
                power = 1 - ZIPF
                rank = (1 + draw * ((self.rows + 1) ** power - 1)) ** (1 / power) - 1
                ids = (rank.astype(np.int64) * 7919 + table) % self.rows
            else:
                ids = (draw * self.rows).astype(np.int64)
            found[f"f{table}"] = (torch.from_numpy(ids), torch.from_numpy(offsets))
        return found


SHAPES = {
    "A": Shape(26, 100_000, 16, 2048, 1),
    "B": Shape(8, 1_000_000, 64, 512, 10),
    "small": Shape(26, 100_000, 16, 16, 1),
}


def collection_of(shape: Shape) -> nn.Module:
    """TorchRec's module of tables t0, t1 and so on, each with a feature f0, f1; without memory, for
    it would be kept beside that of shards."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=shape.rows,
            embedding_dim=shape.dim,
            feature_names=[f"f{i}"],
        )
        for i in range(shape.tables)
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def sharded_by_torchrec(
    model: nn.Module, collection: nn.Module, sharding: str, ranks: int, optimizer: str
) -> nn.Module:
    """``model``, of which ``collection`` is a part or all, under DistributedModelParallel: all
    tables cut alike, their optimizer fused in backward where they are."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel, sharding_plan
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan

    kind = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": kind[optimizer], "learning_rate": RATE}
    )
    fused = {"compute_kernel": EmbeddingComputeKernel.FUSED.value}
    cut: Callable[[int], Any] = {
        "table_wise": lambda i: sharding_plan.table_wise(rank=i % ranks, **fused),
        "row_wise": lambda i: sharding_plan.row_wise(**fused),
        "column_wise": lambda i: sharding_plan.column_wise(ranks=[*range(ranks)], **fused),
        "data_parallel": lambda i: sharding_plan.data_parallel(),
    }[sharding]
    chosen = sharding_plan.construct_module_sharding_plan(
        collection,
        {f"t{i}": cut(i) for i in range(len(collection.embedding_bags))},
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
    path = next(name for name, module in model.named_modules() if module is collection)
    plan = ShardingPlan({path: chosen})
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )


def joined(rank: int, ranks: int, store: str) -> DeviceMesh:
    """The mesh of all ranks, this one of one thread."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        timeout=timedelta(seconds=300),
        world_size=ranks,
        rank=rank,
    )
    return init_device_mesh("cpu", (ranks,))


def take_turns(
    contestants: Mapping[str, Callable[[], Callable[[Any], Any]]],
    batch: Callable[[], Any],
    steps: int,
) -> Figures:
    """What the step that each contestant makes takes, and what its first one gave, of the same
    batches."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    found: dict[str, dict[str, Any]] = {name: {} for name in contestants}
    made = {}
    kept = dict.fromkeys(contestants, 0)
    for name, make in contestants.items():
        made[name], kept[name], _ = alive(make)
    for number in range(WARM + steps):
        given = batch()
        for name, step in made.items():
            dist.barrier()
            if number < WARM:
                gave, more, _ = alive(partial(step, given))
                found[name].setdefault("gave", gave)
                kept[name] += more
                continue
            cpu, wall = time.process_time(), time.perf_counter()
            step(given)
            taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    for name, step in made.items():
        dist.barrier()
        cpu_ms, wall_ms = (statistics.median(each) * 1e3 for each in zip(*taken[name], strict=True))
        _, _, most = alive(partial(step, given))
        found[name] |= zip(
            KINDS, (round(cpu_ms, 3), round(wall_ms, 3), most, kept[name]), strict=True
        )
    return found


def alive(call: Callable[[], Any]) -> tuple[Any, int, int]:
    """What ``call`` gives; how many bytes more are alive after it than before; and the most that
    were at once."""
    from torch.autograd import profiler

    with profiler.profile(profile_memory=True, use_kineto=True) as seen:
        gave = call()
        time.sleep(SETTLED)
        gc.collect()  # what refers to itself
    events = [e for e in seen.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return gave, now, most


def first_of(work: Callable[..., Figures], ranks: int, *arguments: Any) -> Figures:
    """What ``work(rank, ranks, store, *arguments)`` gives on rank 0, of processes of its own:
    medians of several runs, and what first steps of the first gave."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    runs: list[Figures] = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            multiprocessing.spawn(_work, (work, ranks, store, arguments, results), nprocs=ranks)
        runs.append(results.get())
    first, *_ = runs
    for name, figures in first.items():
        figures |= {kind: statistics.median(run[name][kind] for run in runs) for kind in KINDS}
    return first


def _work(rank: int, work: Any, ranks: int, store: str, arguments: Any, results: Any) -> None:
    found = work(rank, ranks, store, *arguments)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def over_torchrec(found: Figures, name: str) -> dict[str, float]:
    """A contestant's figures in parts of TorchRec's."""
    return {kind: round(found[name][kind] / found["torchrec"][kind], 3) for kind in KINDS}


def measure_all(
    about: str | None, only: Sequence[str], cases: Callable[[str], Sequence[Any]], run: Any
) -> None:
    """Every case that is asked for, one line each: what ``run(case, steps, peer)`` gives."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", choices=["", *only], help="cases of this kind")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    try:
        import torchrec

        peer, versions = True, {"torchrec": torchrec.__version__}
    except ImportError:
        peer, versions = False, {}
    lines = []
    for case in cases(options.only):
        lines.append(run(case, options.steps, peer))
        print(json.dumps(lines[-1]), flush=True)
    if options.output:
        document = {"versions": {"torch": torch.__version__, **versions}, "cases": lines}
        options.output.write_text(json.dumps(document, indent=1) + "\n")
