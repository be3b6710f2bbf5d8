"""``apply`` refuses before anything moves."""

from __future__ import annotations

import tempfile

import pytest
import torch
import unit_tasks as tasks
from plans import plan
from pool import Pool
from reference import ROWS, bag_job, small_job
from tasks import train_sharded

MIXED = ("data_parallel", "table_wise", "row_wise") * 2
UNITS = ("shard", "shard")
DISAGREE = {
    "plan": "expected the same plan on every rank, got another one on rank 1",
    "model": "expected the same model on every rank, got another one on rank 1",
    "all models": "top.extra.weight: expected a tensor of the plan",
    "torch": "expected the same torch version on every rank, got another one on rank 1",
    "unit": "middle: expected a part of the model, as unit 'bottom' has, got none",
    "world": "mesh: expected 3 ranks, as the plan, got 2",
    "shape": "as planned, got (4, 3). Plan again for this model.",
}
KERNELS = {
    "fused_uvm": "Plan it with one of these as its compute_kernels.",
    "fused_uvm_caching": "Plan it with one of these as its compute_kernels.",
    "quant": "One process looks rows of bytes up: examples/packing.py.",
}


@pytest.fixture(scope="module")
def said(pool: Pool) -> list[dict[str, str]]:
    """What each of two ranks says, case by case."""
    others = {
        "plan": plan(small_job(MIXED, UNITS, 2, batch=4)),
        "world": plan(small_job(MIXED, UNITS, 3, batch=4)),
    }
    whats = [*DISAGREE, *KERNELS, "guard"]
    made = plan(small_job(MIXED, UNITS, 2))
    return pool.run(2, tasks.disagreements, made=made, others=others, whats=whats)


@pytest.mark.parametrize("what", DISAGREE)
def test_a_disagreement_is_named_on_every_rank(said: list[dict[str, str]], what: str) -> None:
    for found in said:
        assert found[what].startswith("MismatchError")
        assert DISAGREE[what] in found[what]


def test_a_guard_that_is_none_is_refused(said: list[dict[str, str]]) -> None:
    for found in said:
        assert found["guard"] == (
            "InputError: guard: expected a Guard, got bool. Make one with sw.Guard(mesh)."
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_does_not_run_here_is_named_on_every_rank(
    said: list[dict[str, str]], kernel: str
) -> None:
    start = "UnsupportedError: tables.t0.weight: expected a kernel of fused, "
    for found in said:
        assert found[kernel].startswith(start)
        assert f"dense, key_value on cpu, got {kernel}. {KERNELS[kernel]}" in found[kernel]


def test_tables_that_the_disk_has_no_room_for_are_refused_before_anything_moves(pool: Pool) -> None:
    kernels = ("dense", "key_value")
    rows = (10**11, 5, 5, 5, 5, 5)
    made = plan(bag_job(("row_wise",) * 6, 2, rows=rows, kernels=kernels, memory="1000000 GiB"))
    options = {"made": made, "others": {}, "whats": [""]}
    for (text,) in map(dict.values, pool.run(2, tasks.disagreements, **options)):
        assert text.startswith(f"RunError: {tempfile.gettempdir()}: expected ")
        assert " free for tables, as planned, got " in text
        assert text.endswith("Name another folder: train.table_folder.")


@pytest.mark.parametrize("value", [-1, ROWS[2], 2**40])
def test_an_id_out_of_range_names_table_and_value(pool: Pool, value: int) -> None:
    ids = torch.zeros(4, len(ROWS), dtype=torch.int64)
    ids[3, 2] = value
    made = plan(small_job(MIXED, UNITS, 2))
    for found in pool.run(2, tasks.look_up, job=made.job, made=made, ids=ids):
        assert found.startswith("InputError: ids of table 't2', sample 3")
        assert f"got {value}" in found


def test_ids_of_another_shape_are_refused(pool: Pool) -> None:
    made = plan(small_job(MIXED, UNITS, 2))
    for found in pool.run(
        2, tasks.look_up, job=made.job, made=made, ids=torch.zeros(4, 2, dtype=torch.int64)
    ):
        assert "ids: expected shape [batch, 6], got [4, 2]" in found


def test_an_empty_batch_on_every_rank_works(pool: Pool) -> None:
    made = plan(small_job(MIXED, UNITS, 2))
    ids = torch.zeros(0, len(ROWS), dtype=torch.int64)
    assert pool.run(2, tasks.look_up, job=made.job, made=made, ids=ids) == ["accepted", "accepted"]


def test_replicas_that_start_apart_are_refused_by_name(pool: Pool) -> None:
    made = plan(small_job(MIXED, ("replicate", "shard"), 2))
    for found in pool.run(2, tasks.disagreeing_replicas, made=made):
        assert found.startswith("MismatchError: apply: expected the same start of ")


def test_a_bad_id_on_one_rank_raises_on_all_at_once(pool: Pool) -> None:
    made = plan(small_job(MIXED, UNITS, 2))
    first, second = pool.run(2, tasks.odd_lookups, made=made, what="bad id on rank 1")
    fault = "ids of table 't1', sample 1: expected ids from 0 to 12, got -7."
    assert first.startswith(f"PeerError: ids were refused on rank 1, no rows were moved: {fault}")
    assert second.startswith(f"InputError: {fault}")


@pytest.mark.parametrize(
    ("what", "optimizer", "text"),
    [
        ("two lookups", "sgd", "accepted"),
        ("two lookups", "adagrad", "lookups before a backward of rowwise_adagrad tables"),
        ("backward twice", "sgd", "backward of tables: expected one per lookup"),
    ],
)
def test_lookups_that_cannot_be_exact_are_refused(
    pool: Pool, what: str, optimizer: str, text: str
) -> None:
    made = plan(small_job(MIXED, UNITS, 2, optimizer=optimizer))
    for found in pool.run(2, tasks.odd_lookups, made=made, what=what):
        assert text in found


@pytest.mark.slow
def test_a_mesh_of_hosts_and_devices_runs_the_plan_as_all_their_ranks(pool: Pool) -> None:
    job = small_job(MIXED, UNITS, 4)
    options = {"job": job, "made": plan(job), "meta": True}
    flat = pool.run(4, train_sharded, **options)
    hosts = pool.run(4, train_sharded, **options, hosts=2)
    for (losses, weights), (other, others) in zip(flat, hosts, strict=True):
        assert losses == other
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
