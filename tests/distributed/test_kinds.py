"""Kinds of embeddings that are sharded train as on one process, and take what was predicted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from combinations import in_turn
from held_against import check_bytes
from plans import plan
from pool import Pool
from reference import GLOBAL_BATCH, RATE, ROWS, STEPS, bag_job, train_unsharded
from tasks import train_sharded

from shardwright.core.kinds import EmbeddingsSection, settled
from shardwright.job.job import Job, parse_job

KINDS: dict[str, dict[str, Any]] = {
    "hash": {"kind": "hash"},
    "double_hash": {"kind": "double_hash"},
    "qr mult": {"kind": "qr"},
    "qr add": {"kind": "qr", "operation": "add"},
    "qr concat": {"kind": "qr", "operation": "concat"},
    "mixed_dim": {"kind": "mixed_dim"},
    "memcom": {"kind": "memcom"},
    "tt": {"kind": "tt", "rank": 2},
    "dhe": {"kind": "dhe", "hashes": 8, "hidden": 6, "layers": 3},
    "robe": {"kind": "robe"},
}
MIXED = ("row_wise", "table_wise", "data_parallel")
TYPES = {"mixed": (*MIXED, *MIXED), "rows": ("row_wise",) * 6, "columns": ("column_wise",) * 6}
CUT = ("hash", "double_hash", "qr mult", "qr add")  # whose members have columns to cut
BAGS = ("qr mult", "mixed_dim", "memcom", "tt", "robe")  # daily
ABOVE = 6  # rows: some of the tables stay full


def kind_job(
    keys: dict[str, Any],
    types: tuple[str, ...],
    world_size: int,
    optimizer: str = "sgd",
    batch: int = 0,
    rows: tuple[int, ...] = ROWS,
) -> Job:
    """A DLRM whose larger tables are of one kind, one id for each."""
    tables = [
        {"name": f"t{i}", "rows": n, "dim": 8, "sharding_types": [kind], "min_partition": 4}
        for i, (n, kind) in enumerate(zip(rows, types, strict=True))
    ]
    return parse_job(
        {
            "model": {"dense_features": 3, "bottom": [5, 8], "top": [9, 7, 1]},
            "embeddings": keys | {"above": ABOVE},
            "tables": tables,
            "cluster": {"world_size": world_size},
            "batch": {"size": batch or GLOBAL_BATCH // world_size},
            "train": {"optimizer": optimizer, "learning_rate": RATE, "steps": STEPS},
        }
    )


def of_kind(job: Job, keys: dict[str, Any]) -> Job:
    """The job with its larger tables of one kind."""
    section = msgspec.convert(keys | {"above": ABOVE}, EmbeddingsSection)
    return msgspec.structs.replace(job, tables=settled(job.tables, section))


WHOLE: dict[bytes, Any] = {}


def check(pool: Pool, job: Job) -> None:
    """Trains on ranks as on one process, whatever its tables are cut into."""
    tables = [msgspec.structs.replace(t, sharding_types=()) for t in job.tables]
    key = msgspec.json.encode((job.model, tables, job.train))
    if key not in WHOLE:
        WHOLE[key] = train_unsharded(job, torch.float64)
    made = plan(job)
    hold(pool.run(made.world_size, train_sharded, job=job, meta=True, made=made), *WHOLE[key])


def hold(results: list[Any], losses: list[float], weights: dict[str, torch.Tensor]) -> None:
    for found_losses, found in results:
        assert found_losses == pytest.approx(losses, abs=5e-6)
        assert set(found) == set(weights)
        for name, weight in weights.items():
            apart = (found[name].double() - weight.double()).abs().max().item()
            assert apart <= 5e-6, f"{name} is {apart} off"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("kind", "optimizer"), in_turn([*KINDS][::-1], ["adagrad", "sgd"]))
def test_a_kind_on_two_ranks_trains_as_on_one_process(
    pool: Pool, kind: str, optimizer: str
) -> None:
    job = kind_job(KINDS[kind], TYPES["mixed"], 2, optimizer)
    check(pool, job)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("kind", "world_size"), in_turn(KINDS, [1, 3]))
def test_a_kind_cut_by_rows_trains_as_on_one_process(
    pool: Pool, kind: str, world_size: int
) -> None:
    job = kind_job(KINDS[kind], TYPES["rows"], world_size)
    check(pool, job)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", CUT)
def test_a_kind_cut_by_columns_trains_as_on_one_process(pool: Pool, kind: str) -> None:
    job = kind_job(KINDS[kind], TYPES["columns"], 2)
    check(pool, job)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in BAGS else pytest.mark.product)
        for kind in KINDS
        if kind != "qr concat"
    ],
)
def test_bags_of_a_kind_train_as_on_one_process(pool: Pool, kind: str) -> None:
    keys = KINDS[kind] | ({"block": 1} if kind == "robe" else {})
    job = of_kind(bag_job(TYPES["mixed"], 2), keys)
    check(pool, job)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "kind",
    ["dhe", "mixed_dim", *(pytest.param(k, marks=pytest.mark.product) for k in ("qr mult", "tt"))],
)
def test_peaks_of_bags_of_a_kind_are_within_three_percent(pool: Pool, kind: str) -> None:
    rows = (3000, 900, 500, 10, 2000, 700)
    check_bytes(pool, of_kind(bag_job(TYPES["mixed"], 2, batch=256, rows=rows), KINDS[kind]), 0.03)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_kind_are_exact_and_its_peak_within_three_percent(pool: Pool, kind: str) -> None:
    rows = (3000, 900, 500, 10, 2000, 700)
    check_bytes(pool, kind_job(KINDS[kind], TYPES["mixed"], 2, batch=256, rows=rows), 0.03)
