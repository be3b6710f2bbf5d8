"""Our sharded tables beside TorchRec's, step by step in the same processes.

    python benchmarks/sharded_embeddings.py --output validation/cpu-2-cores/sharded_embeddings.json

Configuration A is 26 tables of 100,000 x 16 with one id in each bag, batch 2,048 a rank; B is eight
tables of 1,000,000 x 64 with Poisson(10) ids in a bag, batch 512; "small" is A with batch 16. Ids
follow Zipf's law with exponent 1.05 or are uniform. Every case runs in processes of its own, one
thread each; its contestants take turns step by step, from the same weights and the same batches. A
step is forward, backward and the rows' update. "dedup" is ours with rows that travel once to a rank
that asks for them several times, as a plan may choose; it needs bags of one id.
Ranks share few cores, so the figure is the CPU time of a process; wall time stands beside it.
Where TorchRec is not installed ours runs alone. "half" is ours with rows as fp16 and their
gradients as bf16 on the wire, in the first two cases.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peer_tables import build
from torch import multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Given = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
Step = Callable[[Given], None]
RATE = 0.01
ZIPF = 1.05
WARM = 3


@dataclass(frozen=True)
class Shape:
    """Tables of one size and what a rank's batch asks of each."""

    tables: int
    rows: int
    dim: int
    batch: int
    length: float  # ids in a bag, Poisson above 1


SHAPES = {
    "A": Shape(26, 100_000, 16, 2048, 1),
    "B": Shape(8, 1_000_000, 64, 512, 10),
    "small": Shape(26, 100_000, 16, 16, 1),
}


@dataclass(frozen=True)
class Case:
    """A run: its shape, how tables are cut and learn, which ids are asked for, how many ranks."""

    shape: str
    sharding: str
    optimizer: str = "sgd"
    ids: str = "zipf"
    ranks: int = 2


CASES = [
    *(Case("A", kind) for kind in ("table_wise", "row_wise", "column_wise", "data_parallel")),
    *(Case("A", kind, "rowwise_adagrad") for kind in ("table_wise", "row_wise", "column_wise")),
    *(Case("A", kind, ids="uniform") for kind in ("table_wise", "row_wise")),
    Case("A", "row_wise", ranks=4),
    *(Case("B", kind) for kind in ("table_wise", "row_wise")),
    *(Case("B", kind, "rowwise_adagrad") for kind in ("table_wise", "row_wise")),
    Case("small", "table_wise"),
    Case("small", "row_wise"),
]


def batch(case: Case, random: np.random.Generator) -> Given:
    """Ids and offsets of every feature, of one rank."""
    shape, found = SHAPES[case.shape], {}
    for table in range(shape.tables):
        lengths = np.ones(shape.batch, dtype=np.int64)
        if shape.length > 1:
            lengths = random.poisson(shape.length, shape.batch)
        offsets = np.concatenate([[0], lengths.cumsum()])
        draw = random.random(offsets[-1])
        if case.ids == "zipf":  # inverse of the law's distribution, then ids without an order
            power = 1 - ZIPF
            rank = (1 + draw * ((shape.rows + 1) ** power - 1)) ** (1 / power) - 1
            ids = (rank.astype(np.int64) * 7919 + table) % shape.rows
        else:
            ids = (draw * shape.rows).astype(np.int64)
        found[f"f{table}"] = (torch.from_numpy(ids), torch.from_numpy(offsets))
    return found


def ours(case: Case, mesh: DeviceMesh, weights: Mapping[str, torch.Tensor], **options: Any) -> Step:
    """The tables of ``peer_tables``."""
    shape = SHAPES[case.shape]
    names = [f"t{i}" for i in range(shape.tables)]
    specs = [
        {"name": n, "rows": shape.rows, "dim": shape.dim, "pooling": "sum", "features": [f"f{i}"]}
        for i, n in enumerate(names)
    ]
    types = dict.fromkeys(names, case.sharding)
    module = build(specs, types, mesh, case.optimizer, RATE, weights, **options)
    gradient = torch.full((shape.batch, shape.dim), 1e-3)

    def step(given: Given) -> None:
        found = module(given)
        torch.autograd.backward([*found.values()], [gradient] * len(found))

    return step


def theirs(case: Case, mesh: DeviceMesh, weights: Mapping[str, torch.Tensor]) -> Step:
    """An EmbeddingBagCollection under DistributedModelParallel, its optimizer fused in backward."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan

    shape = SHAPES[case.shape]
    keys = [f"f{i}" for i in range(shape.tables)]
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=shape.rows,
                embedding_dim=shape.dim,
                feature_names=[key],
            )
            for i, key in enumerate(keys)
        ],
        device=torch.device("cpu"),
    )
    for name, weight in weights.items():
        module.embedding_bags[name].weight.data.copy_(weight)
    kind = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": kind[case.optimizer], "learning_rate": RATE}
    )
    dense = case.sharding == "data_parallel"
    ranks = range(case.ranks)
    fused = EmbeddingComputeKernel.FUSED.value
    cuts = {
        "table_wise": lambda i: table_wise(rank=i % case.ranks, compute_kernel=fused),
        "row_wise": lambda i: row_wise(compute_kernel=fused),
        "column_wise": lambda i: column_wise(ranks=[*ranks], compute_kernel=fused),
        "data_parallel": lambda i: data_parallel(),
    }
    chosen = construct_module_sharding_plan(
        module,
        {f"t{i}": cuts[case.sharding](i) for i in range(shape.tables)},
        sharder=sharder,
        local_size=case.ranks,
        world_size=case.ranks,
        device_type="cpu",
    )
    plan = ShardingPlan({"": chosen})
    sharded = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    gradient = torch.full((shape.batch, shape.dim * shape.tables), 1e-3)
    dense_optimizer = torch.optim.SGD(sharded.parameters(), lr=RATE) if dense else None

    def step(given: Given) -> None:
        values = torch.cat([ids for ids, _ in given.values()])
        lengths = torch.cat([offsets.diff() for _, offsets in given.values()])
        found = sharded(KeyedJaggedTensor(keys, values, lengths=lengths))
        found.values().backward(gradient)
        if dense_optimizer is not None:
            dense_optimizer.step()
            dense_optimizer.zero_grad()

    return step


def work(rank: int, case: Case, store: str, steps: int, peer: bool, results: Any) -> None:
    """One rank: contestants take turns; CPU and wall seconds of every step."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(case.ranks), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(case.ranks))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, case.ranks),
        timeout=timedelta(seconds=300),
        world_size=case.ranks,
        rank=rank,
    )
    mesh = init_device_mesh("cpu", (case.ranks,))
    shape = SHAPES[case.shape]
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"t{i}": torch.empty(shape.rows, shape.dim).uniform_(-0.01, 0.01, generator=generator)
        for i in range(shape.tables)
    }
    contestants = {"ours": ours(case, mesh, weights)}
    if shape.length == 1 and case.sharding != "data_parallel":
        contestants["dedup"] = ours(case, mesh, weights, dedup=True)
    if case in CASES[:2]:
        contestants["half"] = ours(case, mesh, weights, communication=("fp16", "bf16"))
    if peer:
        contestants["torchrec"] = theirs(case, mesh, weights)
    del weights
    random = np.random.default_rng(rank)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for number in range(WARM + steps):
        given = batch(case, random)
        for name, step in contestants.items():
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            step(given)
            spent = time.process_time() - cpu, time.perf_counter() - wall
            if number >= WARM:
                taken[name].append(spent)
    if rank == 0:
        results.put(
            {
                name: [1e3 * statistics.median(each) for each in zip(*spent, strict=True)]
                for name, spent in taken.items()
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def run(case: Case, steps: int, peer: bool) -> dict[str, Any]:
    """Medians of a case, in milliseconds of CPU and wall time of a step."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            work,
            (case, str(Path(folder) / "store"), steps, peer, results),
            nprocs=case.ranks,
        )
    found = results.get()
    line: dict[str, Any] = asdict(case)
    for name, (cpu, wall) in found.items():
        line |= {f"{name}_cpu_ms": round(cpu, 3), f"{name}_wall_ms": round(wall, 3)}
    for name in found if peer else ():
        if name != "torchrec":
            start = "" if name == "ours" else f"{name}_"
            for index, kind in enumerate(("cpu", "wall")):
                ratio = found[name][index] / found["torchrec"][index]
                line[f"{start}{kind}_ratio"] = round(ratio, 3)
    return line


def main() -> None:
    """Every case, one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="cases of this shape")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    try:
        import torchrec

        peer, versions = True, {"torchrec": torchrec.__version__}
    except ImportError:
        peer, versions = False, {}
    lines = []
    for case in CASES:
        if options.only in ("", case.shape):
            lines.append(run(case, options.steps, peer))
            print(json.dumps(lines[-1]), flush=True)
    if options.output:
        document = {"versions": {"torch": torch.__version__, **versions}, "cases": lines}
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
