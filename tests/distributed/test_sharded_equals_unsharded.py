"""Sharded training is unsharded training: same losses, same weights, whatever the plan."""

from __future__ import annotations

import pytest
import torch
from pool import Pool
from reference import bag_job, in_half, small_job, train_unsharded
from tasks import train_sharded

from shardwright.core.schedule import RIDE_BYTES

TYPES = ("data_parallel", "table_wise", "row_wise", "column_wise")
CASES = {kind: (kind,) * 6 for kind in TYPES}
CASES["all four"] = (*TYPES, "row_wise", "table_wise")
CASES["routed mixture"] = ("column_wise", "row_wise", "table_wise") * 2
CASES["replicas and rows"] = ("data_parallel", "row_wise") * 3
CASES["no columns"] = ("data_parallel", "table_wise", "row_wise") * 2
UNITS = {"sharded": ("shard", "shard"), "mixed": ("replicate", "shard")}
TOLERANCE = 1e-6
STATEFUL = 5e-6  # of what divides by roots of small sums
HALVES = [
    *(("adagrad", case) for case in ("no columns", "replicas and rows", *TYPES[:3])),
    *(("sgd", case) for case in (*TYPES, "all four")),
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("case", CASES)
def test_sgd_gives_the_losses_and_weights_of_one_process(
    pool: Pool, case: str, units: str, world_size: int
) -> None:
    job = small_job(CASES[case], UNITS[units], world_size)
    results = pool.run(world_size, train_sharded, job=job, meta=False)
    for dtype in (torch.float32, torch.float64):
        hold(results, *train_unsharded(job, dtype))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", [c for c in CASES if "column_wise" not in CASES[c]])
def test_adagrad_is_exact_row_wise_on_tables_and_element_wise_on_units(
    pool: Pool, case: str, world_size: int
) -> None:
    job = small_job(CASES[case], UNITS["mixed"], world_size, optimizer="adagrad")
    results = pool.run(world_size, train_sharded, job=job, meta=True)
    losses, weights = train_unsharded(job, torch.float64)
    hold(results, losses, weights, tolerance=STATEFUL)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("optimizer", "case"), HALVES)
@pytest.mark.parametrize("world_size", [2, 1, 3, 4])
def test_tables_in_half_precision_are_rounded_once_in_a_step(
    pool: Pool, optimizer: str, case: str, world_size: int
) -> None:
    job = in_half(small_job(CASES[case], UNITS["mixed"], world_size, optimizer=optimizer))
    results = pool.run(world_size, train_sharded, job=job, meta=True)
    losses, weights = train_unsharded(job, torch.float64)
    hold(results, losses, weights, tolerance=STATEFUL)
    for _, found in results:
        kept = [found[f"tables.t{i}.weight"].dtype for i in range(3)]
        assert kept == [torch.bfloat16, torch.float16, torch.float32]


def test_replicated_units_train_like_sharded_ones(pool: Pool) -> None:
    job = small_job(CASES["table_wise"], ("replicate", "replicate"), 3)
    hold(pool.run(3, train_sharded, job=job, meta=True), *train_unsharded(job))


def hold(
    results: list[tuple[list[float], dict[str, torch.Tensor]]],
    losses: list[float],
    weights: dict[str, torch.Tensor],
    tolerance: float = TOLERANCE,
) -> None:
    """Every rank's losses and whole weights are these. In half precision they are so to the bit,
    but for a rounding of one element: where sums differ in their last bit, it may."""
    for found_losses, found_weights in results:
        assert found_losses == pytest.approx(losses, abs=tolerance)
        assert set(found_weights) == set(weights)
        for name, weight in weights.items():
            found, most = found_weights[name], tolerance
            difference = (found.double() - weight.double()).abs()
            if found.itemsize < torch.float32.itemsize:
                count = difference.count_nonzero().item()
                assert count <= 1, f"{count} elements of {name} are off"
                most = torch.finfo(found.dtype).eps * weight.abs().max().item()
            worst = difference.max().item()
            assert worst <= most, f"{name} is {worst} off"


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_replica_too_large_to_ride_with_the_rows_has_a_reduction_of_its_own(
    pool: Pool, optimizer: str
) -> None:
    types = ("data_parallel", "table_wise", "row_wise", "data_parallel", "row_wise", "table_wise")
    rows = (20_000, 13, 5, 1, 30, 64)
    job = small_job(types, UNITS["mixed"], 2, optimizer=optimizer, rows=rows)
    assert RIDE_BYTES < 2 * 20_000 * 8 * 4
    losses, weights = train_unsharded(job, torch.float64)
    hold(pool.run(2, train_sharded, job=job, meta=True), losses, weights, tolerance=STATEFUL)


CUT_BY_COLUMNS = ("column_wise", "row_wise", "table_wise", "column_wise", "column_wise", "row_wise")
BAGS = {
    **{kind: (kind,) * 6 for kind in TYPES if kind != "column_wise"},
    "column_wise": CUT_BY_COLUMNS,
    "all four": (*TYPES, "row_wise", "table_wise"),
}
WITHIN_HOSTS = ("table_column_wise", "table_row_wise", "table_wise", "grid_shard", "grid_shard")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", BAGS)
def test_bags_of_any_features_give_the_losses_and_weights_of_one_process(
    pool: Pool, case: str, world_size: int
) -> None:
    job = bag_job(BAGS[case], world_size)
    results = pool.run(world_size, train_sharded, job=job, meta=True)
    hold(results, *train_unsharded(job, torch.float64))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("world_size", "optimizer"), [(1, "sgd"), (2, "adagrad"), (3, "sgd")])
def test_a_plan_with_tables_on_disk_trains_with_a_tenth_of_their_rows_in_memory(
    pool: Pool, world_size: int, optimizer: str
) -> None:
    kernels = ("dense", "key_value")
    job = bag_job(BAGS["all four"], world_size, optimizer, kernels=kernels)
    results = pool.run(world_size, train_sharded, job=job, meta=True)
    hold(results, *train_unsharded(job, torch.float64), tolerance=STATEFUL)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize(("world_size", "local"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 1)])
def test_types_that_keep_to_hosts_give_the_losses_and_weights_of_one_process(
    pool: Pool, world_size: int, local: int, optimizer: str
) -> None:
    job = bag_job((*WITHIN_HOSTS, "table_row_wise"), world_size, optimizer, local=local)
    results = pool.run(world_size, train_sharded, job=job, meta=True)
    hold(results, *train_unsharded(job, torch.float64), tolerance=STATEFUL)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", BAGS)
def test_bags_train_exactly_with_adagrad_too(pool: Pool, case: str) -> None:
    job = bag_job(BAGS[case], 2, optimizer="adagrad")
    results = pool.run(2, train_sharded, job=job, meta=True)
    hold(results, *train_unsharded(job, torch.float64), tolerance=STATEFUL)
