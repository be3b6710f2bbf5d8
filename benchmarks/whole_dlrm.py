"""A whole step of a DLRM on our runtime beside TorchRec's, in the same processes.

    python benchmarks/whole_dlrm.py --output validation/cpu-2-cores/whole_dlrm.json

26 tables of 100,000 x 16 with one id in each bag, Zipf 1.05, batch 2,048 on each of two ranks, and
16 ("tiny"); the bottom is 13-512-256-64-16, the top 8-4-1 ("small", "tiny") or 512-256-1 ("large"),
all with SGD. Ours is planned with every table table-wise or row-wise and run by ``sw.apply``;
TorchRec's is its own DLRM under DistributedModelParallel with the same types, its tables' optimizer
fused, the dense part under DDP. Contestants take turns step by step on the same batches, one thread
each. ``first_loss`` is of weights that are not the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from side_by_side import (
    RATE,
    SHAPES,
    Figures,
    Shape,
    collection_of,
    first_of,
    joined,
    measure_all,
    over_torchrec,
    sharded_by_torchrec,
    take_turns,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan
from shardwright.models.dlrm import DLRM
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters

DENSE = 13
BOTTOM = (512, 256, 64, 16)
SMALL, LARGE = (8, 4, 1), (512, 256, 1)
KINDS = {  # shape of tables, and the top
    "small": (SHAPES["A"], SMALL),
    "large": (SHAPES["A"], LARGE),
    "tiny": (SHAPES["small"], SMALL),
}
RANKS = 2
Case = tuple[str, str]  # its kind, and how tables are cut
# dense [B, D], ids [B, F], the same feature by feature with lengths of bags, labels [B]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float]


def planned(case: Case, overlap: str, ranks: int = RANKS) -> Plan:
    """Ours, every table of one type and the dense part replicated."""
    shape, top = KINDS[case[0]]
    tables = [
        {"name": f"t{i}", "rows": shape.rows, "dim": shape.dim, "sharding_types": [case[1]]}
        for i in range(shape.tables)
    ]
    job = {
        "model": {"dense_features": DENSE, "bottom": list(BOTTOM), "top": list(top)},
        "tables": tables,
        "cluster": {"preset": "local", "world_size": ranks},
        "batch": {"size": shape.batch},
        "planner": {"units": {"bottom": "replicate", "top": "replicate"}},
        "data": {"kind": "synthetic", "zipf": 1.05},
        "train": {"optimizer": "sgd", "learning_rate": RATE, "overlap": overlap},
    }
    return plan(parse_job(job))


def ours(made: Plan, mesh: DeviceMesh) -> Step:
    """A DLRM as ``shardwright train`` has it."""
    model = sw.apply(DLRM(made.job, device="meta"), made, mesh)
    optimizer = make_optimizer("sgd", optimizer_parameters(model, per_unit=True), RATE)
    return partial(step_of, lambda given: model(given[0], given[1]), optimizer)


def theirs(case: Case) -> Step:
    """TorchRec's DLRM, its tables where ours are."""
    from torchrec import KeyedJaggedTensor
    from torchrec.models import dlrm

    shape, top = KINDS[case[0]]
    collection = collection_of(shape)
    model = dlrm.DLRM(collection, DENSE, list(BOTTOM), list(top), torch.device("cpu"))
    sharded = sharded_by_torchrec(model, collection, case[1], RANKS, "sgd")
    dense_part = [p for n, p in sharded.named_parameters() if "embedding_bags" not in n]
    optimizer = torch.optim.SGD(dense_part, lr=RATE, foreach=True)
    keys = [f"f{i}" for i in range(shape.tables)]

    def logits(given: Batch) -> torch.Tensor:
        dense, _, values, lengths, _ = given
        found: torch.Tensor = sharded(dense, KeyedJaggedTensor(keys, values, lengths=lengths))
        return found

    return partial(step_of, logits, optimizer)


def step_of(logits: Callable[[Batch], torch.Tensor], optimizer: Any, given: Batch) -> float:
    """A training step; the loss."""
    loss = nn.functional.binary_cross_entropy_with_logits(logits(given).squeeze(1), given[-1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def made_up(shape: Shape, random: np.random.Generator) -> Batch:
    """One rank's batch."""
    columns = [ids for ids, _ in shape.ids("zipf", random).values()]
    ids, values = torch.stack(columns, 1), torch.cat(columns)
    dense = torch.from_numpy(random.standard_normal((shape.batch, DENSE), dtype=np.float32))
    labels = torch.from_numpy(random.integers(0, 2, shape.batch).astype(np.float32))
    return dense, ids, values, torch.ones_like(values), labels


def work(
    rank: int, ranks: int, store: str, case: Case, made: list[Plan], steps: int, peer: bool
) -> Figures:
    """One rank of a case."""
    mesh = joined(rank, ranks, store)
    contestants: dict[str, Callable[[], Step]] = {
        "ours": partial(ours, made[0], mesh),
        "overlap": partial(ours, made[1], mesh),
    }
    if peer:
        contestants["torchrec"] = partial(theirs, case)
    batch = partial(made_up, KINDS[case[0]][0], np.random.default_rng(rank))
    return take_turns(contestants, batch, steps)


def run(case: Case, steps: int, peer: bool) -> dict[str, Any]:
    """What every contestant takes, and ours in parts of TorchRec's."""
    made = [planned(case, overlap) for overlap in ("none", "rows")]
    found = first_of(work, RANKS, case, made, steps, peer)
    for figures in found.values():
        figures["first_loss"] = round(figures.pop("gave"), 4)
    line: dict[str, Any] = {"top": case[0], "sharding": case[1], **found}
    for name in ("ours", "overlap") if peer else ():
        line[f"{name}_over_torchrec"] = over_torchrec(found, name)
    return line


def cases(kind: str) -> Sequence[Case]:
    """Those of a kind, or all, with both types."""
    kinds = [kind] if kind else [*KINDS]
    return [(each, sharding) for each in kinds for sharding in ("table_wise", "row_wise")]


if __name__ == "__main__":
    measure_all(__doc__, [*KINDS], cases, run)
