"""A gradient that is not finite, on any rank, of a unit or of a table row, updates nothing."""

from __future__ import annotations

import math
from pathlib import Path

import guard_tasks as tasks
import pytest
from pool import Pool, Threads
from reference import small_job

from shardwright.data.tokens import write_text
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job

TYPES = ("data_parallel", "table_wise", "row_wise", "column_wise", "row_wise", "table_wise")
ROUTED = ("data_parallel", "table_wise", "row_wise") * 2
UNITS = {1: ("shard", "replicate"), 2: ("shard", "shard"), 3: ("replicate", "shard")}
VALUES = {1: math.nan, 2: math.inf, 3: -math.inf}
ROWS = {  # of a table of every sharding type
    f"tables.t{i}.weight": ("tables", (1, i, 2)) for i in range(4)
}
UNIT_PLACES = {  # the last unit of a backward, which tables must wait for, and the first
    "bottom.0.bias": ("bottom.0", (0, 0)),
    "top.2.bias": ("top.2", (1, 3)),
}
REMEDY = "It updated nothing: lower the learning rate or look at the data."


def job_for(world_size: int, optimizer: str) -> Job:
    """Six tables of every sharding type that runs with ``optimizer``, and two units."""
    types = TYPES if optimizer == "sgd" else ROUTED
    return small_job(types, UNITS[world_size], world_size, optimizer)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [
        *((2, "adam"), (3, "sgd"), (2, "adagrad"), (1, "sgd")),
        *(
            pytest.param(ranks, optimizer, marks=pytest.mark.product)
            for ranks, optimizer in [(1, "adam"), (1, "adagrad"), (2, "sgd"), (3, "adam")]
        ),
    ],
)
def test_with_a_guard_neither_units_nor_tables_nor_states_change(
    pool: Pool, ranks: int, optimizer: str
) -> None:
    job = job_for(ranks, optimizer)
    places = ROWS | UNIT_PLACES
    rank, value = ranks - 1, VALUES[ranks]
    results = pool.run(
        ranks,
        tasks.clicks,
        job=job,
        made=plan(job),
        places=list(places.values()),
        value=value,
        guarded=True,
        bad_ranks=(rank,),
    )
    for found in results:
        for name, (text, same, goes_on) in zip(places, found, strict=True):
            got = "nan" if math.isnan(value) else "inf"
            assert text == (
                f"RunError: gradient of {name} on rank {rank} in step 3: expected finite numbers "
                f"with a finite sum of squares, got {got}. {REMEDY}"
            )
            assert same, f"{name} changed something"
            assert goes_on


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "sgd"), (3, "adagrad")])
def test_in_a_loop_of_ones_own_no_row_is_updated_by_a_bad_row_gradient(
    pool: Pool, ranks: int, optimizer: str
) -> None:
    job = job_for(ranks, optimizer)
    results = pool.run(
        ranks,
        tasks.clicks,
        job=job,
        made=plan(job),
        places=list(ROWS.values()),
        value=VALUES[ranks],
        guarded=False,
        bad_ranks=(0,),
    )
    for found in results:
        for name, (text, same, goes_on) in zip(ROWS, found, strict=True):
            assert text.startswith(f"RunError: gradient of {name} on rank 0: expected finite")
            assert same, f"{name} changed something"
            assert goes_on


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("bad_ranks", "value", "text"),
    [
        ((0, 2), math.nan, "on ranks 0, 2 in step 3: expected finite numbers with a finite sum"),
        (
            (1,),
            3e19,
            "on rank 1 in step 3: expected finite numbers with a finite sum of squares, "
            "got numbers as large as 3e+19.",
        ),
    ],
)
def test_every_rank_is_named_and_squares_that_overflow_are_refused(
    pool: Pool, bad_ranks: tuple[int, ...], value: float, text: str
) -> None:
    job = small_job(TYPES, UNITS[3], 3)
    places = [ROWS["tables.t2.weight"], UNIT_PLACES["bottom.0.bias"]]
    results = pool.run(
        3,
        tasks.clicks,
        job=job,
        made=plan(job),
        places=places,
        value=value,
        guarded=True,
        bad_ranks=bad_ranks,
    )
    for found in results:
        for said, same, _ in found:
            assert text in said
            assert same


def test_on_a_grid_the_rank_of_the_job_is_named(threads: Threads) -> None:
    for found in threads.run(4, tasks.on_a_grid, bad=2):
        assert found.startswith("RunError: gradient of weight on rank 2: expected finite numbers")


def test_a_rank_with_another_bad_gradient_is_not_named_for_the_first(threads: Threads) -> None:
    for found in threads.run(3, tasks.bad_in_two_places):
        assert found.startswith("RunError: gradient of first on rank 1: expected finite numbers")
        assert ", got nan. " in found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("world_size", "prefetch"), [(2, 1), (3, 0)])
def test_a_transformer_is_left_as_it_was(
    pool: Pool, tmp_path: Path, world_size: int, prefetch: int
) -> None:
    text = tmp_path / "text.txt"
    write_text(text, 3000)
    units = {"embed": "replicate", "layers": "shard", "head": "shard"}
    job = parse_job(
        {
            "model": {"kind": "transformer", "layers": 2, "dim": 16, "heads": 4},
            "batch": {"size": 2, "sequence": 11},
            "data": {"path": str(text)},
            "cluster": {"world_size": world_size},
            "planner": {"units": units, "dense": {"prefetch": prefetch}},
            "train": {"steps": 6, "optimizer": "adam"},
        }
    )
    made = plan(job)
    for found, same, goes_on in pool.run(
        world_size, tasks.language, job=job, made=made, path="layers.1"
    ):
        assert found.startswith("RunError: gradient of layers.1.")
        assert f"on rank {world_size - 1}: expected finite numbers" in found
        assert same
        assert goes_on
