"""Raw gradients of sharded modules are the mean of the unsharded ones over ranks."""

from __future__ import annotations

from typing import Any

import gradient_tasks as tasks
import probe_tasks
import pytest
import torch
from pool import Pool

from shardwright.runtime.units.cutting import MixedPrecision

BF16 = 2.0**-6  # a few roundings of 8 bits, where bf16 is summed over more than two ranks


EVERY = 4  # so many of the cases; together the strategies have all


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        *(("mixture", 2), ("flat", 2), ("per_param", 2), ("param_boundary", 2)),
        *(("mixture", 3), ("flat", 3)),
    ],
)
def test_raw_gradients_are_the_unsharded_mean(pool: Pool, strategy: str, ranks: int) -> None:
    _hold(pool, strategy, ranks, EVERY)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("strategy", "rows"), [("per_param", 1), ("flat", 2), ("param_boundary", 1), ("mixture", 2)]
)
def test_so_they_are_where_replicas_cut_them_again(pool: Pool, strategy: str, rows: int) -> None:
    pool.run(4, probe_tasks.make_grids)
    _hold(pool, strategy, 2 * rows, EVERY, replicas=2)


@pytest.mark.product
@pytest.mark.parametrize(("ranks", "replicas"), [(1, 0), (2, 0), (3, 0), (4, 0), (2, 2), (4, 2)])
@pytest.mark.parametrize("strategy", tasks.STRATEGIES)
def test_so_they_are_in_every_case(pool: Pool, strategy: str, ranks: int, replicas: int) -> None:
    pool.run(4, probe_tasks.make_grids)
    _hold(pool, strategy, ranks, 1, replicas=replicas)


@pytest.mark.parametrize("ranks", [2, 3])
def test_those_that_are_summed_in_fp16_are_means_too(pool: Pool, ranks: int) -> None:
    assert max(pool.run(ranks, tasks.summed_in_halves)) <= 2.0**-9


WAYS: dict[str, Any] = {
    "flat": {"shard_strategy": "flat"},
    "rows": {},
    "rows, reduced in halves": {"precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
    "whole parameters": {"zero": 2, "shard_strategy": "flat"},
    "cut over replicas": {"zero": (2, 3)},
    "fsdp2": "fsdp2",
}
BESIDE = ("flat", "fsdp2")  # which loses what the last microbatch does not use


def test_sums_over_replicas_are_left_to_the_last_microbatch_as_by_fsdp2(pool: Pool) -> None:
    assert _left_to_the_last(pool, "flat") <= _left_to_the_last(pool, "fsdp2")


@pytest.mark.slow
def test_so_they_are_of_units_that_the_last_one_does_not_use(pool: Pool) -> None:
    peaks = {way: _left_to_the_last(pool, way) for way in WAYS if way not in BESIDE}
    assert peaks["rows"] < peaks["cut over replicas"]  # held whole


def _left_to_the_last(pool: Pool, way: str) -> int:
    """Most bytes of any rank, whose gradients are right."""
    pool.run(4, probe_tasks.make_grids)
    task = tasks.summed_over_replicas_at_last
    ranks = pool.run(4, task, way=WAYS[way], all_used=way in BESIDE)
    assert max(apart for apart, _ in ranks) <= (BF16 if "halves" in way else 1e-6), way
    return max(nbytes for _, nbytes in ranks)


def _hold(pool: Pool, strategy: str, ranks: int, every: int, replicas: int = 0) -> None:
    given = {"strategy": strategy, "every": every, "replicas": replicas}
    for found in pool.run(ranks, tasks.raw_gradients, **given):
        assert len(found) == 36 // every
        for case, differences in found.items():
            assert len(differences) == 4 + 3 * 8
            for name, (error, equal) in differences.items():
                loose = "bf16 beside" in case and "down" in name
                assert error <= (BF16 if loose else 1e-6), f"{case}: {name} is {error} off"
                assert equal or ranks > 2, f"{case}: {name} is {error} off"
