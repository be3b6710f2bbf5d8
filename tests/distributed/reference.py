"""Jobs, batches and the unsharded model that sharded ones are held against."""

from __future__ import annotations

import tempfile
from typing import Any

import msgspec
import torch
from torch import nn

from shardwright.job.job import Job, parse_job
from shardwright.job.model_of_job import reads_bags
from shardwright.models.dlrm import DLRM
from shardwright.tracker.tensors import DTYPES

ROWS = (7, 13, 5, 1, 30, 64)
GLOBAL_BATCH = 12
STEPS = 5
RATE = 0.1
EPSILON = 1e-8


def small_job(
    types: tuple[str, ...],
    units: tuple[str, str],
    world_size: int,
    optimizer: str = "sgd",
    batch: int = 0,
    rows: tuple[int, ...] = ROWS,
) -> Job:
    """A DLRM of six uneven tables, each forced to a sharding type, and forced unit modes."""
    tables: list[dict[str, Any]] = [
        {"name": f"t{i}", "rows": n, "dim": 8, "sharding_types": [kind]}
        for i, (n, kind) in enumerate(zip(rows, types, strict=True))
    ]
    return parse_job(
        {
            "model": {"dense_features": 3, "bottom": [5, 8], "top": [9, 7, 1]},
            "tables": tables,
            "cluster": {"world_size": world_size},
            "batch": {"size": batch or GLOBAL_BATCH // world_size},
            "planner": {"units": dict(zip(("bottom", "top"), units, strict=True))},
            "train": {"optimizer": optimizer, "learning_rate": RATE, "steps": STEPS},
        }
    )


def bag_job(
    types: tuple[str, ...],
    world_size: int,
    optimizer: str = "sgd",
    batch: int = 0,
    rows: tuple[int, ...] = ROWS,
    local: int | None = None,
    kernels: tuple[str, ...] = ("dense", "fused"),
    memory: str = "1 GiB",
) -> Job:
    """A DLRM with a cross network, of six tables whose dims, pooling and features differ."""
    kinds: tuple[dict[str, Any], ...] = (
        {"dim": 8},
        {"dim": 6, "pooling_factors": [3.0], "pooling_type": "mean"},
        {"dim": 4, "pooling_factors": [2.0, 1.0], "features": ["first", "second"]},
        {"dim": 8, "pooling_factors": [0.5]},
        {"dim": 8, "pooling_factors": [4.0], "module_weighted": True},
        {"dim": 5, "pooling_factors": [5.0]},
    )
    tables = [
        {"name": f"t{i}", "rows": n, "sharding_types": [kind], "min_partition": 2, **keys}
        | {"compute_kernels": kernels, "cache": {"load_factor": 0.1}}
        for i, (n, kind, keys) in enumerate(zip(rows, types, kinds, strict=True))
    ]
    return parse_job(
        {
            "model": {
                "dense_features": 3,
                "bottom": [5, 7],
                "top": [9, 1],
                "interaction": "dcn",
                "cross_rank": 4,
            },
            "tables": tables,
            "cluster": {
                "world_size": world_size,
                "local_world_size": local or world_size,
                "ddr_cap": memory,
                "ssd_cap": memory,
            },
            "batch": {"size": batch or GLOBAL_BATCH // world_size},
            "train": {
                "optimizer": optimizer,
                "learning_rate": RATE,
                "steps": STEPS,
                "table_folder": tempfile.gettempdir(),
            },
        }
    )


def in_half(job: Job) -> Job:
    """With the weights of tables in bf16, fp16 and fp32 in turn."""
    dtypes = ("bf16", "fp16", "fp32")
    tables = [msgspec.structs.replace(t, dtype=dtypes[i % 3]) for i, t in enumerate(job.tables)]
    return msgspec.structs.replace(job, tables=tuple(tables))


def batches(job: Job, steps: int = STEPS, total: int = GLOBAL_BATCH) -> list[Any]:
    """The same global batches on every rank: dense [B, 3], ids [B, F] or bags, labels [B]."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(steps):
        dense = torch.randn(total, job.model.dense_features, generator=generator)
        if reads_bags(job):
            ids: Any = _bags(job, total, generator)
        else:
            columns = [torch.randint(t.rows, (total,), generator=generator) for t in job.tables]
            ids = torch.stack(columns, 1)
        labels = torch.randint(2, (total,), generator=generator).float()
        made.append((dense, ids, labels))
    return made


def _bags(job: Job, total: int, generator: torch.Generator) -> dict[str, tuple[torch.Tensor, ...]]:
    """Bags of each feature of up to twice its pooling factor, of the very factor where it is 1."""
    made: dict[str, tuple[torch.Tensor, ...]] = {}
    for table in job.tables:
        for name, length in zip(table.feature_names, table.pooling_factors, strict=True):
            lengths = torch.randint(int(2 * length) + 1, (total,), generator=generator)
            lengths = torch.ones_like(lengths) if length == 1 else lengths
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            ids = torch.randint(table.rows, (int(offsets[-1]),), generator=generator)
            weights = (torch.rand(len(ids), generator=generator),) if table.weighted else ()
            made[name] = (ids, offsets, *weights)
    return made


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean binary cross-entropy."""
    dense, ids, labels = batch
    return nn.functional.binary_cross_entropy_with_logits(model(dense, ids).squeeze(1), labels)


def train_unsharded(
    job: Job, dtype: torch.dtype = torch.float32
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of one process on the whole batch; of tables in half precision rows
    are rounded after each step."""
    stored = {f"{table.name}.weight": DTYPES[table.dtype] for table in job.tables}
    model = DLRM(job).to(dtype)
    adagrad = job.train.optimizer == "adagrad"
    tables = dict(model.tables.named_parameters())
    others = [p for n, p in model.named_parameters() if not n.startswith("tables.")]
    optimizer = (torch.optim.Adagrad if adagrad else torch.optim.SGD)(others, lr=RATE)
    sums = {name: torch.zeros(len(p), dtype=dtype) for name, p in tables.items()}
    losses = []
    for dense, ids, labels in batches(job):
        loss = loss_of(model, (dense.to(dtype), _in(ids, dtype), labels.to(dtype)))
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        with torch.no_grad():
            for name, table in tables.items():
                step = table.grad
                if adagrad:
                    sums[name] += step.square().mean(1)
                    step = step / (sums[name].sqrt() + EPSILON).unsqueeze(1)
                table -= RATE * step
                if name in stored and stored[name] != torch.float32:
                    table.copy_(table.to(stored[name]))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def _in(ids: Any, dtype: torch.dtype) -> Any:
    """Ids, or bags whose weights have ``dtype``."""
    if isinstance(ids, torch.Tensor):
        return ids
    return {
        name: (values, offsets, *(weight.to(dtype) for weight in weights))
        for name, (values, offsets, *weights) in ids.items()
    }
