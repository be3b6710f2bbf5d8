"""One rank of a TorchRec run under our planner: trains two steps and saves what came out.

    python torchrec_worker.py RANK RANKS FOLDER

Weights, inputs and optimizers are functions of names alone, so the test makes the same unsharded.
"""

from __future__ import annotations

import datetime
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        KeyedJaggedTensor,
    )
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.models.dlrm import DLRM, DLRM_DCN

import shardwright as sw
from shardwright.torchrec import ShardwrightPlanner

BATCH = 6  # samples per rank
STEPS = 2
RATE = 0.1
SECONDS = 60
WIDTH = 8  # of every table of a recommender
DENSE = 3  # its other features
BAGS = {"tw": (30, 8), "dp": (20, 8), "cw": (21, 16), "rw": (13, 8)}  # rows, dim
SEQUENCES = {"tw": (30, 8), "cw": (17, 8), "rw": (15, 8)}
TYPES = {
    "tw": "table_wise",
    "dp": "data_parallel",
    "cw": "column_wise",
    "rw": "row_wise",
}


class EverywhereSharder(EmbeddingBagCollectionSharder):
    """TorchRec offers row-wise bags on accelerators only, though gloo runs them too."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


class Model(nn.Module):
    """Bags and sequences into one number per sample."""

    def __init__(self, device: str) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(
                name=f"bag_{name}",
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=[f"b_{name}"] if name != "cw" else ["b_cw", "b_cw2"],
            )
            for name, (rows, dim) in BAGS.items()
        ]
        sequences = [
            EmbeddingConfig(
                name=f"seq_{name}",
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=[f"s_{name}"],
            )
            for name, (rows, dim) in SEQUENCES.items()
        ]
        self.bags = EmbeddingBagCollection(tables=bags, device=torch.device(device))
        self.sequences = EmbeddingCollection(tables=sequences, device=torch.device(device))
        self.over = nn.Linear(sum(dim for _, dim in BAGS.values()) + 16, 1, device=device)

    def forward(self, bags: KeyedJaggedTensor, sequences: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.bags(bags)
        columns = [pooled[key] for key in sorted(pooled.keys())]
        rows = self.sequences(sequences)
        squares = sum((rows[key].values() ** 2).sum() for key in sorted(rows.keys()))
        return self.over(torch.cat(columns, dim=1)).sum() + squares


def inputs(rank: int, step: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """The ids of one rank and step; sequences and bags of zero to three."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    made = []
    for sizes, prefix in ((BAGS, "b"), (SEQUENCES, "s")):
        keys = {f"{prefix}_{name}": rows for name, (rows, _) in sizes.items()}
        if prefix == "b":
            keys["b_cw2"] = BAGS["cw"][0]
        lengths = torch.randint(0, 4, (len(keys) * BATCH,), generator=generator)
        counts = lengths.view(len(keys), BATCH).sum(1).tolist()
        ids = [
            torch.randint(0, rows, (count,), generator=generator)
            for rows, count in zip(keys.values(), counts, strict=True)
        ]
        made.append(KeyedJaggedTensor(keys=list(keys), values=torch.cat(ids), lengths=lengths))
    return made[0], made[1]


class Clicks(nn.Module):
    """A recommender of TorchRec's own and its loss; one table of each sharding type."""

    def __init__(self, device: str, kind: type[DLRM], **options: Any) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"bag_{name}",
                num_embeddings=BAGS[name][0],
                embedding_dim=WIDTH,
                feature_names=[f"b_{name}"],
            )
            for name in TYPES
        ]
        bags = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        self.net = kind(bags, DENSE, [5, WIDTH], [6, 1], dense_device=device, **options)

    def forward(
        self, dense: torch.Tensor, sparse: KeyedJaggedTensor, labels: torch.Tensor
    ) -> torch.Tensor:
        logits = self.net(dense, sparse).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def clicks(rank: int, step: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """The samples of one rank and step; bags of zero to three."""
    generator = torch.Generator().manual_seed(500 + 1000 * rank + step)
    lengths = torch.randint(0, 4, (len(TYPES), BATCH), generator=generator)
    ids = [
        torch.randint(0, BAGS[name][0], (int(own.sum()),), generator=generator)
        for name, own in zip(TYPES, lengths, strict=True)
    ]
    keys = [f"b_{name}" for name in TYPES]
    sparse = KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=lengths.view(-1))
    labels = torch.randint(0, 2, (BATCH,), generator=generator).float()
    return torch.rand(BATCH, DENSE, generator=generator), sparse, labels


@dataclass(frozen=True)
class Trained:
    """What is trained: a model on a device, the inputs of a rank and step, and its tables as
    (kind, name, rows, dim, features)."""

    model: Callable[[str], nn.Module]
    inputs: Callable[[int, int], tuple[Any, ...]]
    tables: Sequence[tuple[str, str, int, int, int]]


OWN = Trained(
    Model,
    inputs,
    [
        (kind, name, rows, dim, 2 if (kind, name) == ("bag", "cw") else 1)
        for kind, sizes in (("bag", BAGS), ("seq", SEQUENCES))
        for name, (rows, dim) in sizes.items()
    ],
)
_TABLES = [("bag", name, BAGS[name][0], WIDTH, 1) for name in TYPES]
RECOMMENDERS = {
    "DLRM": Trained(partial(Clicks, kind=DLRM), clicks, _TABLES),
    "DLRM_DCN": Trained(
        partial(Clicks, kind=DLRM_DCN, dcn_num_layers=2, dcn_low_rank_dim=3), clicks, _TABLES
    ),
}


def start_weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The first value of a parameter: the same for all who know its name."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.rand(shape, generator=generator) - 0.5


def scenarios() -> dict[str, dict[str, Any]]:
    """What the planner is told: every type forced; columns cut more often than there are ranks,
    as TorchRec's search cuts them; or nothing."""
    forced, narrow = (
        {
            f"{kind}_{name}": ParameterConstraints(sharding_types=[TYPES[name]], min_partition=4)
            for kind, sizes in (("bag", BAGS), ("seq", SEQUENCES))
            for name in sizes
            if name in names
        }
        for names in (tuple(TYPES), ("cw",))
    )
    return {
        "forced": {"constraints": forced},
        "narrow": {
            "constraints": narrow,
            "job_overrides": {"planner": {"options": "torchrec"}},
        },
        "free": {},
    }


def sharders() -> list[Any]:
    """Sharders whose fused kernels do what a plain SGD step does."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE}
    return [EverywhereSharder(dict(fused)), EmbeddingCollectionSharder(dict(fused))]


@torch.no_grad()
def fill(state: dict[str, Any]) -> None:
    """Give every parameter its first value, a sharded one its part."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
            value.copy_(start_weight(name, tuple(value.shape)))
            continue
        whole = start_weight(name, tuple(value.metadata().size))
        for shard in value.local_shards():
            (row, column), (rows, columns) = (
                shard.metadata.shard_offsets,
                shard.metadata.shard_sizes,
            )
            shard.tensor.copy_(whole[row : row + rows, column : column + columns])


def parts(state: dict[str, Any]) -> dict[str, list[tuple[list[int], torch.Tensor]]]:
    """Every parameter as offset and values of what this rank has of it."""
    found: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for name, value in state.items():
        if hasattr(value, "local_shards"):
            found[name] = [
                (list(shard.metadata.shard_offsets), shard.tensor.detach().clone())
                for shard in value.local_shards()
            ]
        else:
            found[name] = [([0] * value.dim(), value.detach().clone())]
    return found


def train(rank: int, ranks: int, given: dict[str, Any], what: Trained = OWN) -> dict[str, Any]:
    """Plan together, shard, train, and tell what became of every parameter."""
    planner = ShardwrightPlanner(Topology(ranks, "cpu"), BATCH, **given)
    plan = planner.collective_plan(what.model("meta"), sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(
        what.model("cpu"), device=torch.device("cpu"), plan=plan, sharders=sharders()
    )
    fill(model.state_dict())
    fused = set(dict(model.fused_optimizer.params)) if model.fused_optimizer else set()
    own = [p for name, p in model.named_parameters() if name not in fused]
    optimizer = torch.optim.SGD(own, lr=RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*what.inputs(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert planner.made is not None
    types = {table.name: (table.sharding_type, table.ranks) for table in planner.made.tables}
    return {"losses": losses, "state": parts(model.state_dict()), "types": types}


def train_with_ours(rank: int, ranks: int, what: Trained = OWN) -> dict[str, Any]:
    """The same model without TorchRec's runtime: its collections become our sharded tables."""
    tables = [
        {
            "name": f"{kind}_{name}",
            "rows": rows,
            "dim": dim,
            "sharding_types": [TYPES[name]],
            "pooled": kind == "bag",
            "pooling_factors": [1.5] * features,
        }
        for kind, name, rows, dim, features in what.tables
    ]
    cluster = {"world_size": ranks, "compute_device": "cpu"}
    job = sw.parse_job({"tables": tables, "cluster": cluster, "batch": {"size": BATCH}})
    model = what.model("cpu")
    fill(model.state_dict())
    mesh = init_device_mesh("cpu", (ranks,))
    model = sw.shard_embeddings(model, sw.plan(job), mesh, optimizer="sgd", learning_rate=RATE)
    losses = []
    for step in range(STEPS):
        loss = model(*what.inputs(rank, step))
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= RATE / ranks * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return {"losses": losses, "state": sw.full_state_dict(model)}


def train_applied(rank: int, ranks: int, what: Trained) -> dict[str, Any]:
    """The same model, unchanged, planned whole and applied: its collections are tables."""
    bags = "net.sparse_arch.embedding_bag_collection.embedding_bags"
    named = {f"{bags}.{kind}_{name}": TYPES[name] for kind, name, *_ in what.tables}
    plan = sw.plan_module(
        lambda: what.model("cpu"),
        what.inputs(0, 0),
        cluster={"preset": "local", "world_size": ranks},
        optimizer="sgd",
        train={"table_optimizer": "sgd", "table_learning_rate": RATE},
        planner={"tables": named},
        batch={"size": BATCH},
    )
    assert {table.name: table.sharding_type for table in plan.tables} == named
    model = what.model("cpu")
    fill(model.state_dict())
    model = sw.apply(model, plan, init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.SGD(sw.optimizer_parameters(model), lr=RATE)
    losses = []
    for step in range(STEPS):
        loss = model(*what.inputs(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": sw.full_state_dict(model)}


def refusal(ranks: int) -> str:
    """How a rank learns that nothing fits."""
    planner = ShardwrightPlanner(Topology(ranks, "cpu", ddr_cap=1000), BATCH)
    try:
        planner.collective_plan(Model("meta"), sharders(), dist.GroupMember.WORLD)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "planned"


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    found: dict[str, Any] = {name: train(rank, ranks, given) for name, given in scenarios().items()}
    found["ours"] = train_with_ours(rank, ranks)
    forced = scenarios()["forced"]
    for name, what in RECOMMENDERS.items():
        found[name] = train(rank, ranks, forced, what)
        found[f"{name} ours"] = train_with_ours(rank, ranks, what)
        found[f"{name} applied"] = train_applied(rank, ranks, what)
    found["refusal"] = refusal(ranks)
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
