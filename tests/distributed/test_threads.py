"""Ranks that are threads of one process: the same plan, losses, weights and bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import checkpoint_tasks
import msgspec
import pytest
import torch
from held_against import check_bytes
from pool import Pool, Threads
from reference import ROWS, bag_job, small_job, train_unsharded
from tasks import compared, train_sharded
from test_measured_as_predicted import PEAK_TOLERANCE, bigger, check_run, overlapping
from test_sharded_equals_unsharded import BAGS, CASES, UNITS, WITHIN_HOSTS, hold
from unit_tasks import look_up

from shardwright.estimate.recordings import plan
from shardwright.job.job import Job
from shardwright.job.train import Overlap

STATEFUL = 5e-6  # from float64, of what divides by roots of small sums, as of processes


def interacting(job: Job, interaction: str) -> Job:
    """The same with another interaction of features."""
    section = msgspec.structs.replace(job.model, interaction=interaction)
    return msgspec.structs.replace(job, model=section)


_CASES, _UNITS = list(CASES), list(UNITS)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("case", "units", "ranks"),
    [
        ("all four", "mixed", 2),
        *((case, _UNITS[i % 2], 2 + i // 2 % 2) for i, case in enumerate(_CASES)),
        ("all four", "mixed", 1),
    ],
)
def test_threads_give_the_losses_and_weights_of_one_process(
    threads: Threads, case: str, units: str, ranks: int
) -> None:
    job = small_job(CASES[case], UNITS[units], ranks)
    results = threads.run(ranks, train_sharded, job=job, meta=True, made=plan(job))
    hold(results, *_alone("units"))


@pytest.mark.product
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("case", CASES)
def test_so_they_do_in_every_case(threads: Threads, case: str, units: str, world_size: int) -> None:
    job = small_job(CASES[case], UNITS[units], world_size)
    results = threads.run(world_size, train_sharded, job=job, meta=True, made=plan(job))
    hold(results, *_alone("units"))


@cache
def _alone(what: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What one process makes of units, or of bags with Adagrad, however others share them."""
    job = small_job(CASES["all four"], UNITS["mixed"], 1)
    if what == "bags":
        job = bag_job(BAGS["all four"], 1, "adagrad")
    return train_unsharded(job, torch.float64)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("case", "ranks"),
    [("all four", 2), *((case, 2 + i % 2) for i, case in enumerate(BAGS, 1)), ("all four", 1)],
)
def test_threads_are_exact_with_adagrad_on_bags_of_any_features(
    threads: Threads, case: str, ranks: int
) -> None:
    job = bag_job(BAGS[case], ranks, "adagrad")
    results = threads.run(ranks, train_sharded, job=job, meta=True, made=plan(job))
    hold(results, *_alone("bags"), tolerance=STATEFUL)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("world_size", "local"), [(2, 1), (4, 2)])
def test_threads_give_the_same_where_types_keep_to_hosts(
    threads: Threads, world_size: int, local: int
) -> None:
    job = bag_job((*WITHIN_HOSTS, "table_row_wise"), world_size, "adagrad", local=local)
    results = threads.run(world_size, train_sharded, job=job, meta=True, made=plan(job))
    hold(results, *_alone("bags"), tolerance=STATEFUL)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("world_size", "optimizer", "interaction"),
    [(2, "sgd", "dot"), (2, "adagrad", "dcn"), (3, "adagrad", "cat")],
)
def test_threads_give_what_processes_give(
    pool: Pool, threads: Threads, world_size: int, optimizer: str, interaction: str
) -> None:
    if interaction == "dot":  # of equal dims
        job = small_job(CASES["no columns"], UNITS["mixed"], world_size, optimizer)
    else:
        job = interacting(bag_job(BAGS["all four"], world_size, optimizer), interaction)
    (losses, weights), *_ = pool.run(world_size, train_sharded, job=job, meta=True, made=plan(job))
    hold(
        threads.run(world_size, train_sharded, job=job, meta=True, made=plan(job)), losses, weights
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("world_size", "overlap"), [(2, "none"), (2, "rows"), (3, "ids_and_rows")])
def test_bytes_and_actions_of_threads_are_those_of_the_plan(
    threads: Threads, world_size: int, overlap: Overlap
) -> None:
    job = small_job(CASES["all four"], UNITS["mixed"], world_size)
    check_run(threads, plan(job if overlap == "none" else overlapping(job, overlap)))


def test_peaks_of_threads_are_measured_rank_by_rank(threads: Threads) -> None:
    small = small_job(CASES["no columns"], UNITS["sharded"], 2, "adagrad", batch=64)
    check_bytes(threads, bigger(small, (64, 8), (64, 1)), PEAK_TOLERANCE)


def test_what_travels_between_threads_is_compared_with_its_plan(threads: Threads) -> None:
    job = overlapping(small_job(CASES["no columns"], UNITS["mixed"], 2))
    for found in threads.run(2, compared, job=job, made=plan(job), steps=7):
        lines = {(x.rank, x.name, x.kind): x for x in found.exchanges}
        names, kinds = ("rows", "row_gradients"), ("hidden", "exposed")
        assert set(lines) == {(r, n, k) for r in range(2) for n in names for k in kinds}
        assert all((line.predicted or 0) > 0 < (line.measured or 0) for line in lines.values())


def test_rows_that_travel_while_threads_compute_train_the_same(threads: Threads) -> None:
    job = overlapping(small_job(CASES["all four"], UNITS["mixed"], 2))
    results = threads.run(2, train_sharded, job=job, meta=True, made=plan(job))
    hold(results, *_alone("units"))


@pytest.mark.parametrize("world_size", [2, 3])
def test_tables_on_disk_are_each_thread_s_own(threads: Threads, world_size: int) -> None:
    job = bag_job(BAGS["all four"], world_size, "adagrad", kernels=("dense", "key_value"))
    results = threads.run(world_size, train_sharded, job=job, meta=True, made=plan(job))
    hold(results, *_alone("bags"), tolerance=STATEFUL)


@pytest.mark.parametrize("value", [-1, 2**40])
def test_an_id_out_of_range_is_named_by_every_thread(threads: Threads, value: int) -> None:
    ids = torch.zeros(4, len(ROWS), dtype=torch.int64)
    ids[3, 2] = value
    job = small_job(CASES["no columns"], UNITS["sharded"], 2)
    for found in threads.run(2, look_up, job=job, ids=ids):
        assert found.startswith("InputError: ids of table 't2', sample 3")
        assert f"got {value}" in found


def test_what_threads_saved_is_read_by_processes_and_back(
    pool: Pool, threads: Threads, tmp_path: Path
) -> None:
    for number, (writers, readers) in enumerate(((threads, pool), (pool, threads))):
        folder = str(tmp_path / str(number))
        saved = writers.run(4, checkpoint_tasks.write, folder=folder, step=1, seed=1)
        assert saved == ["step-1"] * 4
        for size in (2, 4):
            results = readers.run(size, checkpoint_tasks.read, folder=folder, seed=2)
            assert all(equal for _, equal in results)
