"""Ranks that are threads of one process: the same plan, losses, weights and bytes."""

from __future__ import annotations

import msgspec
import pytest
import torch
from pool import Pool, Threads
from reference import bag_job, small_job, train_unsharded
from tasks import train_sharded
from test_sharded_equals_unsharded import BAGS, CASES, UNITS, WITHIN_HOSTS, hold

from shardwright.core.job import Job

INTERACTIONS = ("dot", "cat", "dcn")
STATEFUL = 5e-6  # from float64, of what divides by roots of small sums, as of processes


def interacting(job: Job, interaction: str) -> Job:
    """The same with another interaction of features."""
    section = msgspec.structs.replace(job.model, interaction=interaction)
    return msgspec.structs.replace(job, model=section)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("case", CASES)
def test_threads_give_the_losses_and_weights_of_one_process(
    threads: Threads, case: str, units: str, world_size: int
) -> None:
    job = small_job(CASES[case], UNITS[units], world_size)
    results = threads.run(world_size, train_sharded, job=job, meta=True)
    hold(results, *train_unsharded(job, torch.float64))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", BAGS)
def test_threads_are_exact_with_adagrad_on_bags_of_any_features(
    threads: Threads, case: str, world_size: int
) -> None:
    job = bag_job(BAGS[case], world_size, "adagrad")
    results = threads.run(world_size, train_sharded, job=job, meta=True)
    hold(results, *train_unsharded(job, torch.float64), tolerance=STATEFUL)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("world_size", "local"), [(2, 1), (4, 2)])
def test_threads_give_the_same_where_types_keep_to_hosts(
    threads: Threads, world_size: int, local: int
) -> None:
    job = bag_job((*WITHIN_HOSTS, "table_row_wise"), world_size, "adagrad", local=local)
    results = threads.run(world_size, train_sharded, job=job, meta=True)
    hold(results, *train_unsharded(job, torch.float64), tolerance=STATEFUL)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("interaction", INTERACTIONS)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_threads_give_what_processes_give(
    pool: Pool, threads: Threads, world_size: int, optimizer: str, interaction: str
) -> None:
    if interaction == "dot":  # of equal dims
        job = small_job(CASES["no columns"], UNITS["mixed"], world_size, optimizer)
    else:
        job = interacting(bag_job(BAGS["all four"], world_size, optimizer), interaction)
    (losses, weights), *_ = pool.run(world_size, train_sharded, job=job, meta=True)
    hold(threads.run(world_size, train_sharded, job=job, meta=True), losses, weights)
